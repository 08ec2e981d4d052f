"""The PPO family's dataflow: one function, one line a stage."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from tandem.algorithms import Algorithm
from tandem.algorithms.base import Rollouts, Signal
from tandem.batching.packing import to_batch
from tandem.config.tree import TrainConfig
from tandem.controller.groups import WorkerGroup
from tandem.controller.learning import old_policy_changes, update
from tandem.controller.reward_model import Rewards
from tandem.controller.roles import Roles
from tandem.reward.manager import metrics as reward_metrics
from tandem.types import Batch, Group, Prompt, StepMetrics
from tandem.workers.rollout import Ask, draw_asks

R = TypeVar("R")
TRAIN, EVAL = 0, 1
"""What seeds are drawn for."""


class Step(NamedTuple):
    groups: list[Group]
    batch: Batch
    metrics: StepMetrics


@dataclass(slots=True)
class Clock:
    """Runs stages and adds up the seconds of each as `time/<stage>_s`."""

    seconds: StepMetrics = field(default_factory=dict[str, float])

    def __call__(self, stage: str, run: Callable[[], R]) -> R:
        start = time.perf_counter()
        result = run()
        name = f"time/{stage}_s"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return result


def train_step(
    roles: Roles, algorithm: Algorithm, config: TrainConfig, prompts: Iterator[Sequence[Prompt]], step: int
) -> Step:
    """Generate, score, prepare, judge, learn, publish. `step` counts from 1; the trained weights are its version.

    Sheng et al. 2024 (HybridFlow), figure 1: generation, preparation and learning stages of RLHF.
    """
    clock = Clock()
    groups, drawn = generate_and_score(roles.rollout, roles.reward, config, prompts, step, clock, algorithm.needs)
    done = learn_step(roles, algorithm, config, groups, step, clock)
    return done._replace(metrics={**done.metrics, **drawn})


def generate_and_score(
    rollout: WorkerGroup,
    reward: Rewards,
    config: TrainConfig,
    prompts: Iterator[Sequence[Prompt]],
    step: int,
    clock: Clock,
    needs: frozenset[Signal] = frozenset(),
) -> tuple[list[Group], StepMetrics]:
    """A group for each prompt of a step, and how the groups were come by.

    With `algorithm.resample_rounds` (DAPO's dynamic sampling, Yu et al. 2025, equation 11) groups that teach nothing,
    for their rewards are all equal, are replaced by groups of further prompts. What then is missing after the last
    round they fill up themselves.
    """
    rounds = config.algorithm.resample_rounds
    kept: list[Group] = []
    dull: list[Group] = []
    size = done = 0
    while done <= rounds and (done == 0 or len(kept) < size):
        batch = next(prompts)
        place = (config.trainer.seed, TRAIN, step, done) if done else (config.trainer.seed, TRAIN, step)
        groups = _ask(rollout, reward, draw_asks(batch, config.algorithm.group_size, *place), step, clock, needs)
        kept += [group for group in groups if not rounds or _teaches(group)]
        dull += [group for group in groups if rounds and not _teaches(group)]
        size, done = len(batch), done + 1
    used, unused = (kept + dull)[:size], (kept + dull)[size:]
    counts = {"rounds": done, "unused": sum(len(group.scores) for group in unused), "dull": max(size - len(kept), 0)}
    return used, {f"rollout/resample/{name}": float(count) for name, count in counts.items() if rounds}


def _ask(
    rollout: WorkerGroup, reward: Rewards, asks: list[Ask], step: int, clock: Clock, needs: frozenset[Signal]
) -> list[Group]:
    siblings = clock("generation", lambda: rollout.generate(asks).get())
    groups = clock("reward", lambda: reward.score(siblings, step))
    if Signal.GREEDY_REWARDS in needs:
        single = [ask._replace(seeds=ask.seeds[:1]) for ask in asks]
        answers = clock("generation", lambda: rollout.generate(single, greedy=True).get())
        for group, answered in zip(groups, clock("reward", lambda: reward.score(answers, step)), strict=True):
            group.greedy = answered.scores[0]
    return groups


def _teaches(group: Group) -> bool:
    return len({score.value for score in group.scores if score.value is not None}) > 1


def learn_step(
    roles: Roles, algorithm: Algorithm, config: TrainConfig, groups: list[Group], step: int, clock: Clock
) -> Step:
    actor, reference, critic, batch = roles.actor, roles.reference, roles.critic, to_batch(groups)
    roles.to_training()
    clock("preparation", lambda: prepare(actor, reference, critic, batch, old_policy=old_policy_changes(config)))
    if Signal.SQUARED_PROBS in algorithm.needs:
        batch.tokens.squared_probs = clock("preparation", lambda: actor.squared_probs(batch).get())
    metrics = clock("advantages", lambda: judge(algorithm, groups, batch, (config.trainer.seed, step)))
    metrics |= clock("update", lambda: update(actor, critic, algorithm, batch, config, step))
    clock("publish", lambda: roles.publish(step))
    return Step(groups, batch, {**reward_metrics(groups), **metrics, **clock.seconds})


def prepare(
    actor: WorkerGroup, reference: WorkerGroup | None, critic: WorkerGroup | None, batch: Batch, *, old_policy: bool
) -> None:
    """Fill the columns that the models say of the trajectories, every pool at the same time.

    Without `old_policy` the actor is not asked: its log-probs will be those of the only optimizer step's pass.
    """
    old = actor.logprobs(batch) if old_policy else None
    ref = reference.logprobs(batch) if reference else None
    values = critic.values(batch) if critic else None
    batch.tokens.old_logprobs, batch.tokens.ref_logprobs, batch.tokens.values = (
        future and future.get() for future in (old, ref, values)
    )


def judge(algorithm: Algorithm, groups: Sequence[Group], batch: Batch, seed: Sequence[int]) -> StepMetrics:
    """Fill the batch's advantages, its returns and the tokens that the loss selects."""
    tokens = batch.tokens.map(torch.from_numpy)
    policy_logprobs = tokens.rollout_logprobs if tokens.old_logprobs is None else tokens.old_logprobs
    assert policy_logprobs is not None
    verdict = algorithm.advantages(
        Rollouts(
            rewards_B=torch.from_numpy(batch.rewards),
            scored_B=torch.from_numpy(batch.scored),
            groups_B=torch.from_numpy(batch.groups.astype(np.int64)),
            rows_T=torch.from_numpy(batch.row_of_token),
            mask_T=torch.from_numpy(batch.loss_mask),
            policy_logprobs_T=policy_logprobs,
            ref_logprobs_T=tokens.ref_logprobs,
            values_T=tokens.values,
            squared_probs_T=tokens.squared_probs,
            greedy_rewards_B=_greedy_rewards(groups) if Signal.GREEDY_REWARDS in algorithm.needs else None,
            parts=_reward_parts(groups) if Signal.REWARD_PARTS in algorithm.needs else {},
            seed=int(np.random.SeedSequence(seed).generate_state(1)[0]),
        )
    )
    batch.tokens.advantages = verdict.advantages_T.numpy()
    batch.tokens.returns = None if verdict.returns_T is None else verdict.returns_T.numpy()
    batch.tokens.selected = None if verdict.selected_T is None else verdict.selected_T.numpy()
    return verdict.metrics


def _greedy_rewards(groups: Sequence[Group]) -> torch.Tensor:
    values = [group.greedy.value if group.greedy else None for group in groups for _ in group.scores]
    return torch.tensor([math.nan if value is None else value for value in values])


def _reward_parts(groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    parts = [score.parts for group in groups for score in group.scores]
    names = sorted({name for own in parts for name in own})
    return {name: torch.tensor([own.get(name, math.nan) for own in parts]) for name in names}


def describe_batch(batch: Batch, max_response_tokens: int, version: int) -> StepMetrics:
    """Lengths of prompts and responses, staleness and entropy of the rollout; with `perf/tokens` for the run."""
    responses, prompts = np.diff(batch.response_offsets), np.diff(batch.prompt_offsets)
    metrics: dict[str, Any] = {"perf/tokens": responses.sum() + prompts.sum()}
    for name, lengths in (("response_length", responses), ("prompt_length", prompts)):
        metrics |= {f"{name}/mean": lengths.mean(), f"{name}/max": lengths.max(), f"{name}/min": lengths.min()}
    metrics["response_length/clip_ratio"] = (responses >= max_response_tokens).mean()
    if batch.loss_mask.any():
        assert batch.tokens.rollout_logprobs is not None
        metrics["rollout/entropy"] = -batch.tokens.rollout_logprobs[batch.loss_mask].mean()
        metrics["rollout/staleness/mean"] = (version - batch.versions[batch.loss_mask]).mean()
    return {name: float(value) for name, value in metrics.items()}
