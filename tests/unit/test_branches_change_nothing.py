"""Cutting a trajectory into branches changes neither siblings' advantages nor loss and gradient: every advantage, every
loss, every aggregation, every packing, on one rank and on several.

A branch begins with the tokens before it as its prompt, so each token keeps its context. An actor and a critic that are
tables, of a number a token, stand for models.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tandem.algorithms import make_algorithm
from tandem.batching.balance import balance_rows
from tandem.batching.packing import micro_batches, select_rows, to_batch
from tandem.config.algorithms import BUILTIN, LossConfig, PolicyGradientConfig
from tandem.config.rules import broken_rules
from tandem.config.tree import TrainConfig
from tandem.controller.dataflow import compute_advantages, describe_batch
from tandem.controller.learning import placed_step, update
from tandem.controller.placed import PlacedRows
from tandem.controller.worker_groups import Future
from tandem.types import Batch, Branch, FloatArray, Group, Outputs, Prompt, Score, Status, StepMetrics, Trajectory

ALGORITHMS = BUILTIN.sections(PolicyGradientConfig)
LOSSES = BUILTIN.sections(LossConfig)
AGGREGATIONS = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length")
MAX_RESPONSE_TOKENS = 12
TOKEN_COLUMNS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "squared_probs", "turn_rewards")


@dataclass
class Table:
    """A model whose outputs for a token are an entry each of its tables; the token's id is its place in them.

    `learn` computes the loss as training workers do, on `ranks` ranks in micro-batches of `tokens` tokens.
    """

    outputs: Outputs[torch.Tensor]
    ranks: int
    tokens: int
    losses: list[float] = field(default_factory=list[float])

    def learn(self, rows: PlacedRows, loss: Any) -> Future[tuple[StepMetrics, FloatArray]]:
        batch = rows.whole()
        total, metrics = torch.zeros(()), dict[str, float]()
        for own in balance_rows(batch, self.ranks):
            part = select_rows(batch, own)
            whole = not loss.token_local
            for packed in micro_batches(part, range(len(part)), self.tokens, whole_trajectories=whole):
                targets = torch.from_numpy(packed.targets).long()
                outputs = self.outputs.map(lambda column, targets=targets: column[targets])
                term, found = loss(outputs, packed.columns.map(torch.as_tensor))
                total = total + term
                metrics = {name: metrics.get(name, 0.0) + value.item() for name, value in found.items()}
        if total.requires_grad:
            total.backward()
        self.losses.append(total.item())
        logprobs = self.outputs.logprobs_S
        known_T = np.zeros(len(batch.response_ids), np.float32)
        return Future(
            lambda: (metrics, known_T if logprobs is None else logprobs.detach().numpy()[batch.response_ids]),
            notify=[].append,
        )

    def learn_steps(self, steps: Sequence[PlacedRows], loss: Any) -> Future[list[tuple[StepMetrics, FloatArray]]]:
        learned = [self.learn(rows, loss).get() for rows in steps]
        return Future(lambda: learned, notify=[].append)

    @property
    def gradients(self) -> list[torch.Tensor]:
        columns = (self.outputs.logprobs_S, self.outputs.entropy_S, self.outputs.values_S)
        return [torch.zeros_like(c) if c.grad is None else c.grad for c in columns if c is not None]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Group], list[Group], int]:
    """The groups of a step, the same with trajectories cut into branches, and how many response tokens there are."""
    whole: list[Group] = []
    cut: list[Group] = []
    tokens = 0
    for _ in range(draw(st.integers(1, 3))):
        siblings: list[tuple[Trajectory, Trajectory]] = []
        for sample in range(draw(st.integers(2, 4))):
            masks = draw(st.lists(st.booleans(), min_size=1, max_size=7))
            cuts = sorted(draw(st.sets(st.integers(1, 6), max_size=3)) & set(range(1, len(masks))))
            one = answer(list(range(tokens, tokens + len(masks))), masks, sample)
            siblings.append((one, in_branches(one, cuts)))
            tokens += len(masks)
        values = st.sampled_from([None, 0.0, 0.5, 1.0])
        rewards = draw(st.lists(values, min_size=len(siblings), max_size=len(siblings)))
        scores = [
            Score(None, failure=Status.REWARD_ERROR) if r is None else Score(r, {"a": r, "b": 1 - r}) for r in rewards
        ]
        whole.append(Group([one for one, _ in siblings], scores, greedy=Score(0.25)))
        cut.append(Group([other for _, other in siblings], scores, greedy=Score(0.25)))
    return whole, cut, tokens


def answer(ids: list[int], mask: list[bool], sample: int) -> Trajectory:
    return Trajectory(
        prompt=Prompt(0, np.array([1, 2], np.int32), "", "source", None),
        sample=sample,
        response_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.bool_),
        rollout_logprobs=np.zeros(len(ids), np.float32),
        versions=np.zeros(len(ids), np.int32),
        text="",
        status=Status.COMPLETED,
    )


def in_branches(one: Trajectory, cuts: list[int]) -> Trajectory:
    """The same tokens in the same contexts: what comes before a cut is part of the next branch's prompt."""
    bounds = [0, *cuts, len(one.response_ids)]
    first, *others = (
        Branch(
            prompt_ids=np.concatenate((one.prompt.token_ids, one.response_ids[:start])),
            response_ids=one.response_ids[start:stop],
            loss_mask=one.loss_mask[start:stop],
            rollout_logprobs=one.rollout_logprobs[start:stop],
            versions=one.versions[start:stop],
        )
        for start, stop in pairwise(bounds)
    )
    return replace(
        one,
        response_ids=first.response_ids,
        loss_mask=first.loss_mask,
        rollout_logprobs=first.rollout_logprobs,
        versions=first.versions,
        branches=tuple(others),
    )


def configured(options: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"prompts_per_step": 4},
            "generation": {"max_response_tokens": MAX_RESPONSE_TOKENS},
            "algorithm": {"group_size": 2, **options},
            "trainer": {"run_dir": "r", "steps": 1},
        }
    )


def learned(
    config: TrainConfig, groups: list[Group], numbers: dict[str, FloatArray], ranks: int, tokens: int
) -> tuple[Batch, list[float], list[torch.Tensor], StepMetrics]:
    """One step on these groups: the batch, the losses, gradients by each token's outputs, the metrics."""
    algorithm = make_algorithm(config.algorithm, MAX_RESPONSE_TOKENS)
    batch = to_batch(groups)
    for name in TOKEN_COLUMNS:
        setattr(batch.tokens, name, numbers[name][batch.response_ids])
    metrics = compute_advantages(algorithm, groups, batch, (0, 1))

    def table(**columns: FloatArray) -> Any:
        leaves = {name: torch.tensor(column, requires_grad=True) for name, column in columns.items()}
        return Table(Outputs(**leaves), ranks, tokens)

    actor = table(logprobs_S=numbers["logprobs"], entropy_S=numbers["entropy"])
    critic = table(values_S=numbers["new_values"]) if algorithm.value_loss else None
    with placed_step(batch, algorithm, config, step=1) as placed:
        metrics |= update(actor, critic, algorithm, placed, config)
    metrics |= {name: value for name, value in describe_batch(batch, config, version=0).items() if "perf" not in name}
    models = [actor, critic] if critic else [actor]
    gradients = [gradient for model in models for gradient in model.gradients]
    return batch, [loss for model in models for loss in model.losses], gradients, metrics


def random_numbers(tokens: int, draw: int) -> dict[str, FloatArray]:
    """An entry a token: log-probs near one another, the critic's values, an entropy."""
    random = np.random.default_rng(draw)
    logprobs = -random.exponential(1.0, tokens)
    numbers = {name: logprobs + 0.3 * random.standard_normal(tokens) for name in TOKEN_COLUMNS}
    numbers |= {"logprobs": logprobs, "entropy": random.random(tokens), "squared_probs": random.random(tokens)}
    numbers |= {"values": random.random(tokens), "new_values": random.random(tokens)}
    numbers["turn_rewards"] = random.random(tokens) * (random.random(tokens) < 0.4)
    return {name: column.astype(np.float32) for name, column in numbers.items()}


@st.composite
def configurations(draw: st.DrawFn, algorithm: str, loss: str) -> dict[str, Any]:
    """Without what counts along a whole sequence, which a cut must change: KL in the reward, gamma and lambda below 1,
    the punishment of overlong answers (the longest branch's: `test_algorithms_families`)."""
    correction = draw(st.sampled_from(["none", "truncate", "mask"]))
    level = draw(st.sampled_from(["token", "sequence", "geometric"]))
    place = draw(st.sampled_from(["none", "loss"]))
    options: dict[str, Any] = {
        "type": algorithm,
        "epochs": 2,
        "loss": {"type": loss, "aggregation": draw(st.sampled_from(AGGREGATIONS))},
        "kl": {"place": place, "coefficient": 0.1},
        "entropy_coefficient": draw(st.sampled_from([0.0, 0.1])),
        "rollout_correction": {"type": correction, "level": level},
    }
    if ALGORITHMS[algorithm].takes_turn_rewards and loss != "gmpo" and draw(st.booleans()):
        options["turn_rewards"] = "by_turn"
        if "normalize_by_std" in ALGORITHMS[algorithm].model_fields:
            options["normalize_by_std"] = False
    return options


def pairs() -> Iterator[Any]:
    """Each algorithm with one loss and each loss with one algorithm; the others of their product by night."""
    for algorithm in ALGORITHMS:
        for loss in LOSSES:
            yield pytest.param(
                algorithm, loss, marks=() if algorithm == "grpo" or loss == "clip" else pytest.mark.nightly
            )


@pytest.mark.parametrize(("algorithm", "loss"), list(pairs()))
def test_branches_change_neither_advantages_nor_loss_nor_gradient(algorithm: str, loss: str) -> None:
    fixed: dict[str, Any] = {"rewards": {"a": 1.0, "b": 0.5}} if algorithm == "gdpo" else {}
    try:
        refused = broken_rules(configured({"type": algorithm, "epochs": 2, "loss": {"type": loss}, **fixed}))
    except ValidationError as error:
        refused = [str(error)]
    if refused:
        pytest.skip(f"{algorithm} with the loss {loss}: {refused[0]}")

    @seed(zlib.crc32(f"{algorithm} {loss}".encode()))
    @settings(max_examples=4, deadline=None, phases=[Phase.generate], database=None)
    @given(
        step=steps(),
        options=configurations(algorithm, loss),
        ranks=st.sampled_from([1, 2, 3]),
        tokens=st.sampled_from([1, 6, 12, 1000]),
        draw=st.integers(0, 100),
    )
    def holds(step: Any, options: dict[str, Any], ranks: int, tokens: int, draw: int) -> None:
        whole, cut, count = step
        try:
            config = configured({**options, **fixed})
        except ValidationError as error:
            assert "correct twice" in str(error), error
            return
        numbers = random_numbers(count, draw)
        batch, losses, gradients, metrics = learned(config, whole, numbers, 1, 1000)
        of_branches, losses_cut, gradients_cut, metrics_cut = learned(config, cut, numbers, ranks, tokens)
        assert np.array_equal(batch.response_ids, of_branches.response_ids)
        for name in ("advantages", "returns", "importance_weights", "selected"):
            one, other = getattr(batch.tokens, name), getattr(of_branches.tokens, name)
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(losses, losses_cut, rtol=1e-4, atol=1e-5)
        for one, other in zip(gradients, gradients_cut, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert metrics.keys() == metrics_cut.keys()
        for name, value in metrics.items():
            assert metrics_cut[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name

    holds()
