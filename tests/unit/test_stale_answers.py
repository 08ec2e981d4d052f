"""`trainer.max_staleness`: the bound that holds on every trained token, and what a batch of mixed versions tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.algorithms import make_algorithm
from tandem.config.algorithms import BUILTIN, LossConfig, PolicyGradientConfig
from tandem.config.load import load_config
from tandem.config.ratio import Anchor
from tandem.config.tree import SftConfig, TrainConfig
from tandem.controller.dataflow import describe_batch
from tandem.controller.learning import mismatch_warning, placed_step, update
from tandem.controller.placed import PlacedRows
from tandem.controller.worker_groups import Future
from tandem.errors import UserError
from tandem.jobs.notes import notes
from tandem.types import Batch, FloatArray, Outputs, StepMetrics, TokenColumns
from tests.cluster_workers import ragged_batch
from tests.every_loss import KL_COEFFICIENT, every_loss


def settings(max_staleness: int, **algorithm: Any) -> TrainConfig:
    learns_from_teacher = algorithm.get("type") == "on_policy_distillation"
    return load_config(
        TrainConfig,
        {
            "model": {"path": Path("m")} | ({"teacher_path": Path("t")} if learns_from_teacher else {}),
            "data": {"prompts_per_step": 4},
            "algorithm": {"type": "grpo", "group_size": 2, **algorithm},
            "trainer": {"run_dir": "r", "steps": 1, "max_staleness": max_staleness},
        },
    )


def mixed_batch() -> Batch:
    """Rows of versions 4 4 | 2 3 4 | 3 | 4 4 4 4."""
    batch = ragged_batch([2, 3, 1, 4])
    batch.versions = np.array([4, 4, 2, 3, 4, 3, 4, 4, 4, 4], np.int32)
    return batch


def test_no_trained_token_is_staler_than_the_bound() -> None:
    batch = mixed_batch()
    assert describe_batch(batch, settings(2), version=4)["rollout/staleness/mean"] == pytest.approx(0.4)
    with pytest.raises(AssertionError) as raised:
        describe_batch(batch, settings(1), version=4)
    message = "step 5, row 1: a token of version 2 is trained on version 4, with trainer.max_staleness: 1"
    assert str(raised.value) == message
    batch.loss_mask[2] = False  # it is not trained on
    describe_batch(batch, settings(1), version=4)


def test_no_trained_token_is_of_weights_to_come() -> None:
    with pytest.raises(AssertionError, match="step 4, row 0: a token of version 4 is trained on version 3"):
        describe_batch(mixed_batch(), settings(7), version=3)


def test_what_generates_nothing_has_no_staleness() -> None:
    tree = {"model": {"path": "m"}, "data": {"train_files": ["a.parquet"]}}
    with pytest.raises(UserError, match="max_staleness: 1, but this command generates no answers"):
        load_config(SftConfig, {**tree, "trainer": {"run_dir": "r", "steps": 1, "max_staleness": 1}})


def test_metrics_of_mixed_versions() -> None:
    metrics = describe_batch(mixed_batch(), settings(2), version=4)
    assert metrics["rollout/staleness/max"] == 2
    assert metrics["rollout/mixed_share"] == 1 / 4
    unmixed = mixed_batch()
    unmixed.loss_mask[[2, 3]] = False
    assert describe_batch(unmixed, settings(2), version=4)["rollout/mixed_share"] == 0


def test_a_synchronous_run_has_the_metrics_it_had() -> None:
    batch = ragged_batch([2, 3])
    assert {name for name in describe_batch(batch, settings(0), version=0) if "rollout" in name} == {
        "rollout/entropy",
        "rollout/staleness/mean",
    }
    _, metrics = learn(settings(0), batch, DIFFERENCE[:5])
    assert {name for name in metrics if "rollout" in name} == {
        "rollout/mismatch_kl",
        "rollout/mismatch_max",
        "rollout/mismatch_share",
    }


class FixedActor:
    """An actor whose log-probs are given."""

    def __init__(self, logprobs_T: FloatArray) -> None:
        self.logprobs_T = logprobs_T
        self.batches: list[Batch] = []

    def learn(self, rows: PlacedRows, loss: object) -> Future[tuple[StepMetrics, FloatArray]]:
        self.batches.append(rows.whole())
        return Future(lambda: ({}, self.logprobs_T), notify=[].append)

    def learn_steps(self, steps: Sequence[PlacedRows], loss: object) -> Future[list[tuple[StepMetrics, FloatArray]]]:
        learned = [self.learn(rows, loss).get() for rows in steps]
        return Future(lambda: learned, notify=[].append)


DIFFERENCE = np.array([0, 0.02, 0.5, log(2), -0.005, -log(2), 0, 0, 0, 0], np.float32)
"""Of the trainer's log-probs from the engine's, on the tokens of `mixed_batch`."""


def learn(config: TrainConfig, batch: Batch, difference_T: FloatArray, step: int = 5) -> tuple[FixedActor, StepMetrics]:
    """One update on log-probs of the engine that are -2; as `prepare` fills them, so are the old ones."""
    tokens = batch.tokens
    tokens.rollout_logprobs = np.full(len(batch.response_ids), -2, np.float32)
    tokens.advantages = np.ones(len(batch.response_ids), np.float32)
    actor: Any = FixedActor(tokens.rollout_logprobs + difference_T)
    step = 1 if not batch.versions.any() else step
    algorithm = make_algorithm(config.algorithm, 8)
    with placed_step(batch, algorithm, config, step) as placed:
        if placed.ratio_plan.anchor is Anchor.ENGINE:
            tokens.old_logprobs = tokens.rollout_logprobs
        return actor, update(actor, None, algorithm, placed, config)


def test_fresh_tokens_tell_the_mismatch_and_older_ones_the_drift() -> None:
    """The log-probs are those of the only optimizer step's own pass: the clip is anchored at the engine's."""
    actor, metrics = learn(settings(2), mixed_batch(), DIFFERENCE)
    [trained] = actor.batches
    assert np.array_equal(trained.tokens.old_logprobs, trained.tokens.rollout_logprobs)
    fresh = [0, 0.02, -0.005, 0, 0, 0, 0]
    assert metrics["rollout/mismatch_max"] == pytest.approx(0.02, rel=1e-4)
    assert metrics["rollout/mismatch_share"] == pytest.approx(1 / 7)
    assert metrics["rollout/mismatch_kl"] == pytest.approx(sum(exp(d) - 1 - d for d in fresh) / 7, rel=1e-3)
    drift = (exp(0.5) - 1 - 0.5) + (2 - 1 - log(2)) + (0.5 - 1 + log(2))
    assert metrics["rollout/drift_kl"] == pytest.approx(drift / 3, rel=1e-5)
    weights = [exp(d) for d in fresh] + [exp(0.5), 2, 0.5]
    effective = sum(weights) ** 2 / sum(w * w for w in weights)
    assert metrics["rollout/ess"] == pytest.approx(effective / 10, rel=1e-5)


def test_a_batch_without_fresh_tokens_has_no_mismatch() -> None:
    batch = mixed_batch()
    batch.versions[:] = 3
    _, metrics = learn(settings(2), batch, DIFFERENCE)
    assert {name for name in metrics if "rollout" in name} == {"rollout/drift_kl", "rollout/ess"}


def test_the_share_of_effective_samples_is_a_number_whatever_the_ratios() -> None:
    _, metrics = learn(settings(2), mixed_batch(), np.where(DIFFERENCE > 0.6, np.float32(400), DIFFERENCE))
    assert metrics["rollout/ess"] == pytest.approx(1 / 10)


def test_tokens_of_older_weights_have_old_log_probs() -> None:
    """Without, the losses take the ratio to be 1."""
    with pytest.raises(AssertionError, match="step 5: 3 trained tokens are older than version 4, and have no old_log"):
        learn(settings(0), mixed_batch(), DIFFERENCE)


TRUNCATE = "set rollout_correction.type: truncate or mask"
NOTHING = {"rollout_correction": {"skip_old_logprobs": False}}
NO_RATIO = f"answers of older weights; {TRUNCATE}, or loss.type: clip"
LEFT_ALONE = (
    "skip_old_logprobs: false leaves nothing with trainer.max_staleness: 2 that corrects for answers of older weights; "
    f"leave it out, or {TRUNCATE}"
)
REFUSED = [
    ({**NOTHING}, LEFT_ALONE),
    ({"type": "ppo", **NOTHING}, LEFT_ALONE),
    ({"minibatches": 4, **NOTHING}, LEFT_ALONE),
    ({"loss": {"type": "cispo"}, **NOTHING}, LEFT_ALONE),
    ({"loss": {"type": "reinforce"}}, NO_RATIO),
    ({"loss": {"type": "reinforce"}, "rollout_correction": {"skip_old_logprobs": True}}, NO_RATIO),
    *[({"type": name}, NO_RATIO) for name in ("gpg", "maxrl", "opo", "otb", "remax", "rloo")],
    ({"type": "otb", "loss": {"type": "clip"}}, f"stand in for them; {TRUNCATE}"),
    ({"type": "otb", "loss": {"type": "dppo"}}, "set rollout_correction.skip_old_logprobs: false"),
    ({"type": "dppo", "rollout_correction": {"type": "truncate"}}, "would correct twice"),
]


@pytest.mark.parametrize(("algorithm", "message"), REFUSED)
def test_stale_answers_that_nothing_corrects_are_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        settings(2, **algorithm)
    assert message in str(raised.value)
    assert "correct twice" in message or "trainer.max_staleness: 2" in str(raised.value)


@pytest.mark.parametrize(("algorithm", "message"), REFUSED[:-1])
def test_without_staleness_they_are_not(algorithm: dict[str, Any], message: str) -> None:
    settings(0, **algorithm)


def test_every_algorithm_and_loss_goes_with_stale_answers_once_they_are_corrected() -> None:
    """By its own defaults or by a correction; each of them, so that a new one is looked at."""
    corrected = {"gpg", "maxrl", "on_policy_distillation", "opo", "otb", "remax", "rloo"}
    for name in BUILTIN.sections(PolicyGradientConfig):
        needed = {"rewards": {"acc": 1}} if name == "gdpo" else {}
        correction = {"rollout_correction": {"type": "truncate"}} if name in corrected else {}
        settings(1, type=name, **needed, **correction)


@pytest.mark.parametrize("name", every_loss())
def test_a_loss_has_the_ratio_that_its_section_says(name: str) -> None:
    """Its surrogate moves with the old log-probs, with the engine's, or with neither."""
    loss = every_loss()[name]
    logprobs, zeros = torch.tensor([-1.0, -2.0]), torch.zeros(2)
    columns: TokenColumns[Any] = TokenColumns(
        loss_weights=torch.tensor([0.5, 0.5]),
        shares=torch.tensor([0.5, 0.5]),
        advantages=torch.tensor([1.0, 0.5]),
        old_logprobs=logprobs,
        rollout_logprobs=logprobs,
        ref_logprobs=logprobs,
        selected=torch.tensor([False, False]),
        trajectories=torch.tensor([0, 1]),
    )

    def value(**changed: Any) -> float:
        outputs: Outputs[Any] = Outputs(logprobs_S=logprobs, entropy_S=zeros)
        return loss(outputs, replace(columns, **changed))[0].item()

    lower = logprobs - 0.0001  # within the narrowest clip, that of gspo
    moves = {"old_policy": value(old_logprobs=lower) != value(), "engine": value(rollout_logprobs=lower) != value()}
    kind = BUILTIN.sections(LossConfig)[name]
    assert [ratio for ratio, moved in moves.items() if moved] == [r for r in moves if r == kind.divides_by]


@pytest.mark.parametrize("name", every_loss())
def test_kl_and_entropy_are_the_same_wherever_the_ratio_is_anchored(name: str) -> None:
    """Token 1 has no advantage: what is left of its gradient is its KL's and its entropy's, by hand."""
    loss, weight = every_loss()[name], 0.25
    columns: TokenColumns[Any] = TokenColumns(
        loss_weights=torch.tensor([weight, weight]),
        shares=torch.tensor([0.5, 0.5]),
        advantages=torch.tensor([1.0, 0.0]),
        ref_logprobs=torch.tensor([-1.5, -2.5]),
        rollout_logprobs=torch.tensor([-1.4, -2.4]),
        selected=torch.tensor([False, False]),
        trajectories=torch.tensor([0, 1]),
    )
    for old in ([-1.1, -2.1], [-1.4, -2.4]):
        for importance in (None, torch.tensor([1.7, 1.7]), torch.tensor([0.0, 0.0])):
            logprobs = torch.tensor([-1.1, -2.1], requires_grad=True)
            entropy = torch.tensor([0.7, 0.9], requires_grad=True)
            given = replace(columns, old_logprobs=torch.tensor(old), importance_weights=importance)
            value, metrics = loss(Outputs(logprobs_S=logprobs, entropy_S=entropy), given)
            by_logprob, by_entropy = torch.autograd.grad(value, [logprobs, entropy])
            assert by_entropy.tolist() == pytest.approx([-0.1 * weight] * 2)
            assert by_logprob[1].item() == pytest.approx(weight * KL_COEFFICIENT * (1 - exp(-2.5 + 2.1)), rel=1e-4)
            assert metrics["actor/entropy"].item() == pytest.approx(0.8)


def test_an_engine_far_from_the_trainer_is_told_where_it_is_the_anchor() -> None:
    """Rows 0 and 3 are of the newest weights as a whole; mean difference 0.06."""
    difference = np.array([0.3, 0, 9, 9, 9, 9, 0, 0.06, 0, 0], np.float32)
    batch, config = mixed_batch(), settings(2)
    learn(config, batch, difference)
    warning = mismatch_warning(batch, config, version=4)
    assert warning is not None
    assert "0.06 nats a token from the trainer's with the same weights (more than 0.05)" in warning
    assert "set algorithm.rollout_correction: {type: truncate, level: sequence}" in warning
    batch = mixed_batch()
    learn(config, batch, difference / 2)
    assert mismatch_warning(batch, config, version=4) is None


@pytest.mark.parametrize("algorithm", [{"rollout_correction": {"type": "truncate"}}, {"type": "dppo"}])
def test_no_clip_is_anchored_there(algorithm: dict[str, Any]) -> None:
    batch = mixed_batch()
    learn(settings(2), batch, np.full(10, 1, np.float32))
    assert mismatch_warning(batch, settings(2, **algorithm), version=4) is None


@pytest.mark.parametrize(("staleness", "told"), [(1, 0), (2, 1)])
def test_a_loss_whose_ratio_nothing_bounds_is_told_of(staleness: int, told: int) -> None:
    config = settings(staleness)
    algorithm = type(config.algorithm).model_validate({"minibatches": 2, "loss": {"type": "kl_cov"}})
    config = config.model_copy(update={"algorithm": algorithm})
    assert sum("does not bound its ratio" in note for note in notes(config, 100)) == told
