"""What the loop asks the trainer for before an update, and which log-probs its metrics compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem.algorithms import make_algorithm
from tandem.batching.packing import to_batch
from tandem.config.tree import TrainConfig
from tandem.controller.dataflow import refresh_reference
from tandem.controller.learning import check_rollout_logprobs, placed_step, update, why_nothing_was_learned
from tandem.controller.placed import PlacedRows
from tandem.controller.roles import MovingReference
from tandem.controller.rollouts import is_informative
from tandem.controller.worker_groups import Future
from tandem.errors import EngineError
from tandem.types import Batch, FloatArray, Group, Prompt, Score, Status, StepMetrics, Trajectory
from tests.cluster_workers import ragged_batch


def settings(**algorithm: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": Path("m")},
            "data": {"prompts_per_step": 4},
            "algorithm": {"type": "grpo", "group_size": 2, **algorithm},
            "trainer": {"run_dir": "r", "steps": 1},
        }
    )


class MovingActor:
    """An actor whose log-probs fall by 1 with every optimizer step; it keeps the columns that it was given."""

    def __init__(self) -> None:
        self.steps = 0
        self.batches: list[Batch] = []

    def learn(self, rows: PlacedRows, loss: object) -> Future[tuple[StepMetrics, FloatArray]]:
        batch = rows.whole()
        logprobs_T = np.full(len(batch.response_ids), -1.0 - self.steps, np.float32)
        self.steps += 1
        self.batches.append(batch)
        return Future(lambda: ({"actor/grad_norm": 1.0}, logprobs_T), notify=[].append)

    def learn_steps(self, steps: Sequence[PlacedRows], loss: object) -> Future[list[tuple[StepMetrics, FloatArray]]]:
        learned = [self.learn(rows, loss).get() for rows in steps]
        return Future(lambda: learned, notify=[].append)


def scored_batch() -> Batch:
    batch = ragged_batch([2, 3, 1, 4])
    tokens = len(batch.response_ids)
    batch.tokens.rollout_logprobs = np.full(tokens, -1.0, np.float32)
    batch.tokens.advantages = np.ones(tokens, np.float32)
    return batch


def run(config: TrainConfig, batch: Batch) -> tuple[MovingActor, StepMetrics]:
    actor: Any = MovingActor()
    algorithm = make_algorithm(config.algorithm, 8)
    with placed_step(batch, algorithm, config, step=1) as placed:
        return actor, update(actor, None, algorithm, placed, config)


def test_mismatch_is_that_of_the_weights_that_generated() -> None:
    """Later minibatches are scored by weights that have moved: engine and trainer agree, and so says the metric."""
    config = settings(minibatches=2, rollout_correction={"skip_old_logprobs": True})
    batch = scored_batch()
    batch.tokens.old_logprobs = batch.tokens.rollout_logprobs
    actor, metrics = run(config, batch)
    assert actor.steps == 2
    assert metrics["rollout/mismatch_max"] == 0 and metrics["rollout/mismatch_kl"] == 0
    assert batch.tokens.old_logprobs is batch.tokens.rollout_logprobs, "which the ratio was to"
    assert batch.tokens.trainer_logprobs is not None
    first = ~np.isnan(batch.tokens.trainer_logprobs)
    assert first.sum() == len(actor.batches[0].response_ids)
    assert (batch.tokens.trainer_logprobs[first] == -1).all()


def test_the_correction_is_a_column_of_its_own() -> None:
    config = settings(rollout_correction={"type": "mask", "upper": 1.5})
    batch = scored_batch()
    batch.tokens.old_logprobs = np.where(batch.row_of_token == 1, np.float32(0), batch.tokens.rollout_logprobs)
    actor, _ = run(config, batch)
    [trained] = actor.batches
    assert np.array_equal(trained.tokens.importance_weights == 0, trained.row_of_token == 1)
    assert (trained.tokens.loss_weights > 0).all(), "what a token weighs in KL and entropy"


@pytest.mark.parametrize(
    ("training", "rows"),
    [
        ({"type": "fsdp"}, 3),
        ({"type": "fsdp", "skip_zero_advantage": False}, 4),
        ({"type": "megatron"}, 3),
        ({"type": "megatron", "load_balancing_loss": 0.01}, 4),
        ({"type": "megatron", "router_z_loss": 0.01}, 4),
    ],
)
def test_a_row_without_advantage_is_left_out_where_it_has_no_gradient(training: dict[str, Any], rows: int) -> None:
    """Losses of routers have one on every row."""
    config = settings()
    tree = config.model_dump(mode="json", exclude_unset=True)
    config = TrainConfig.model_validate({**tree, "training": training})
    batch = scored_batch()
    batch.tokens.advantages = (batch.row_of_token != 1).astype(np.float32)
    actor, metrics = run(config, batch)
    assert len(actor.batches[0]) == rows
    assert metrics["actor/trained_share"] == rows / 4


def trajectory(sample: int) -> Trajectory:
    ids, prompt = np.zeros(2, np.int32), Prompt(0, np.zeros(1, np.int32), "?", "test", None)
    logprobs = np.zeros(2, np.float32)
    return Trajectory(prompt, sample, ids, np.ones(2, np.bool_), logprobs, ids, "", Status.COMPLETED)


NONE, WRONG, RIGHT = Score(None, failure=Status.NOT_SCORED), Score(0.0), Score(1.0)


@pytest.mark.parametrize(
    ("algorithm", "scores", "why"),
    [
        ("grpo", [[NONE, NONE], [NONE, NONE]], "no answer has a reward"),
        ("grpo", [[RIGHT, NONE], [NONE, WRONG]], "no answer with a reward has a sibling with one"),
        ("grpo", [[RIGHT, RIGHT], [WRONG, NONE]], "siblings all have the same reward"),
        ("grpo", [[RIGHT, WRONG], [NONE, NONE]], "all advantages are 0, though rewards differ"),
        ("reinforce_plus_plus", [[RIGHT, RIGHT], [RIGHT, NONE]], "all answers have the same reward"),
        ("on_policy_distillation", [[RIGHT, RIGHT], [WRONG, WRONG]], "the teacher gives all tokens the probabilities"),
        ("on_policy_distillation", [[NONE, NONE], [NONE, NONE]], "the teacher gives all tokens the probabilities"),
    ],
)
def test_why_nothing_was_learned(algorithm: str, scores: list[list[Score]], why: str) -> None:
    models = {"path": Path("m"), "teacher_path": Path("t") if "distillation" in algorithm else None}
    tree = settings().model_dump(exclude={"algorithm"}) | {"model": models, "algorithm": {"type": algorithm}}
    config = TrainConfig.model_validate(tree)
    made = make_algorithm(config.algorithm, 8)
    groups = [Group([trajectory(sample) for sample in range(2)], own) for own in scores]
    batch = to_batch(groups, reads_rewards=config.algorithm.reads_rewards)
    assert why_nothing_was_learned(batch, made, config, np.zeros(len(batch), np.bool_)).startswith(why)


@pytest.mark.parametrize(
    ("cut", "own", "why"),
    [
        ([True, True], True, "algorithm.mask_truncated leaves out answers that were cut, as all that could teach were"),
        (
            [True, False],
            True,
            "algorithm.mask_truncated leaves out answers that were cut, as all that could teach were",
        ),
        ([False, False], False, "no answer with a reward has a token of the policy's own"),
    ],
)
def test_answers_that_were_cut_are_the_reason_only_where_they_are(cut: list[bool], own: bool, why: str) -> None:
    """The second answer's advantage is 0."""
    batch = to_batch([Group([trajectory(0), trajectory(1)], [RIGHT, WRONG])])
    batch.loss_mask &= own
    batch.tokens.advantages = np.where(batch.row_of_token == 0, np.float32(1), np.float32(0))
    found = why_nothing_was_learned(batch, make_algorithm(settings().algorithm, 8), settings(), np.array(cut))
    assert found.startswith(why)


@pytest.mark.parametrize(
    "algorithm",
    [{"type": "on_policy_distillation", "top_k": 2}, {"kl": {"place": "loss"}}, {"entropy_coefficient": 0.1}],
    ids=str,
)
def test_answers_that_teach_without_an_advantage_were_cut(algorithm: dict[str, Any]) -> None:
    """Not their equal rewards are the reason then, nor their teacher."""
    models = {"path": Path("m"), "teacher_path": Path("t") if "top_k" in algorithm else None}
    named = {"type": "grpo", "group_size": 2, **algorithm}
    tree = settings().model_dump(exclude={"algorithm"}) | {"model": models, "algorithm": named}
    config = TrainConfig.model_validate(tree)
    batch = to_batch([Group([trajectory(0), trajectory(1)], [RIGHT, RIGHT])])
    batch.tokens.advantages = np.zeros(len(batch.loss_mask), np.float32)
    cut = np.ones(len(batch), np.bool_)
    found = why_nothing_was_learned(batch, make_algorithm(config.algorithm, 8), config, cut)
    assert found == "algorithm.mask_truncated leaves out answers that were cut, as all that could teach were"


def test_a_group_that_was_cut_as_a_whole_is_replaced_where_it_trains_nothing() -> None:
    def group(*statuses: Status) -> Group:
        answers = [replace(trajectory(sample), status=status) for sample, status in enumerate(statuses)]
        return Group(answers, [RIGHT, WRONG])

    all_cut, one_cut = group(Status.TRUNCATED, Status.TRUNCATED), group(Status.TRUNCATED, Status.COMPLETED)
    assert [is_informative(all_cut, masked) for masked in (False, True)] == [True, False]
    assert is_informative(one_cut, mask_truncated=True)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "fixed_length"])
def test_rows_that_are_left_out_weigh_nothing_and_leave_the_others_what_they_weigh_alone(aggregation: str) -> None:
    config = settings(loss={"aggregation": aggregation}, minibatches=2)
    algorithm = make_algorithm(config.algorithm, 8)
    left_out_B = np.array([False, True, False, False])
    actor, critic = MovingActor(), MovingActor()
    critic_algorithm: Any = algorithm
    critic_algorithm.value_loss = algorithm.loss
    batch = scored_batch()
    batch.tokens.old_logprobs = batch.tokens.rollout_logprobs
    with placed_step(batch, algorithm, config, 1, left_out_B) as placed:
        models: tuple[Any, Any] = actor, critic
        metrics = update(*models, critic_algorithm, placed, config)
    assert metrics["actor/trained_share"] == 3 / 4
    for model in (actor, critic):
        trained = [(len(one), one.tokens.loss_weights) for one in model.batches]
        assert sum(rows for rows, _ in trained) == 3
        assert all(weights is not None and (weights > 0).all() for _, weights in trained)
        if aggregation == "token_mean":
            assert all(np.isclose(weights.sum(), 1) for _, weights in trained if weights is not None)


def test_a_reference_takes_up_the_weights_of_each_step_that_refresh_steps_divides() -> None:
    taken: list[tuple[int, float]] = []

    class Reference(MovingReference):
        def __init__(self) -> None:
            """It has no ranks."""

        def approach_actor(self, share: float) -> Future[None]:
            taken.append((step, share))
            return Future(lambda: None, notify=[].append)

    config = settings(kl={"place": "loss", "refresh_steps": 3, "refresh_share": 0.6})
    roles: Any = SimpleNamespace(reference=Reference())
    for step in range(1, 8):
        refresh_reference(roles, config, step)
    assert taken == [(3, 0.6), (6, 0.6)]


def test_log_probs_of_an_engine_that_are_no_numbers_end_the_run() -> None:
    batch = to_batch([Group([trajectory(0), trajectory(1)], [RIGHT, WRONG])])
    check_rollout_logprobs(batch, 3)
    assert batch.tokens.rollout_logprobs is not None
    batch.tokens.rollout_logprobs[1] = np.nan
    with pytest.raises(EngineError, match=r"step 3: the engine's log-probs of 1 of \d+ tokens are no finite numbers"):
        check_rollout_logprobs(batch, 3)
