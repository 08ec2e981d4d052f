"""The PPO family's dataflow: one function, one line a stage."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tandem.algorithms import Algorithm
from tandem.algorithms.base import Need, Rollouts
from tandem.batching.packing import to_batch, truncated_rows
from tandem.config.ratio import Anchor, TrainerPass
from tandem.config.tree import TrainConfig
from tandem.controller.assembly import Roles
from tandem.controller.clock import Clock
from tandem.controller.learning import PlacedStep, check_rollout_logprobs, placed_step, update
from tandem.controller.roles import MovingReference
from tandem.controller.rollouts import RolloutProducer
from tandem.controller.worker_groups import Future
from tandem.reward.manager import metrics as reward_metrics
from tandem.rollout.metrics import metrics as conversation_metrics
from tandem.types import Batch, BoolArray, Group, StepMetrics


class StepResult(NamedTuple):
    """What a step leaves behind."""

    groups: list[Group]
    batch: Batch
    metrics: StepMetrics
    left_out_B: BoolArray
    """Rows that no optimizer step has had."""


def train_step(
    roles: Roles, algorithm: Algorithm, config: TrainConfig, rollouts: RolloutProducer, step: int
) -> StepResult:
    """Take the groups of a step, then learn; `step` counts from 1, the weights that it trains are published as its
    version. Meanwhile further groups are generated and scored, `trainer.max_staleness` steps ahead at most.

    Sheng et al. 2024 (HybridFlow), figure 1: generation, preparation and learning stages of RLHF.
    """
    groups = rollouts.take(step)
    done = learn_step(roles, algorithm, config, groups, step, rollouts)
    return done._replace(metrics={**done.metrics, **rollouts.metrics()})


class Phases(Protocol):
    """Who hears when the models begin to compute and when they are trained: `Devices` or a `RolloutProducer`."""

    def to_preparation(self) -> None:
        """The models compute until the next publish."""
        ...

    def to_update(self) -> None:
        """From here on the actor and the critic alone compute; a reference may take up weights."""
        ...

    def publish(self, version: int) -> None:
        """Serve the actor's present weights as `version`."""
        ...


def learn_step(
    roles: Roles, algorithm: Algorithm, config: TrainConfig, groups: list[Group], step: int, phases: Phases
) -> StepResult:
    """Prepare, compute advantages, update, publish: what follows on scored groups."""
    clock = Clock()
    batch = to_batch(groups, reads_rewards=config.algorithm.reads_rewards)
    check_rollout_logprobs(batch, step)
    phases.to_preparation()
    left_out_B = truncated_rows(groups) & config.algorithm.mask_truncated
    with placed_step(batch, algorithm, config, step, left_out_B) as placed:
        clock("preparation", lambda: prepare(roles, algorithm, placed))
        metrics = clock("advantages", lambda: compute_advantages(algorithm, groups, batch, (config.trainer.seed, step)))
        phases.to_update()
        metrics |= clock("update", lambda: update(roles.actor, roles.critic, algorithm, placed, config))
    refresh_reference(roles, config, step)
    clock("publish", lambda: phases.publish(step))
    told = {**reward_metrics(groups), **conversation_metrics(groups), **metrics, **clock.seconds}
    return StepResult(groups, batch, told, left_out_B)


def refresh_reference(roles: Roles, config: TrainConfig, step: int) -> None:
    """Let the reference take up the weights that the step has trained, where it is time."""
    kl = config.algorithm.kl
    if isinstance(roles.reference, MovingReference) and step % kl.refresh_steps == 0:
        roles.reference.approach_actor(kl.refresh_share).get()


def prepare(roles: Roles, algorithm: Algorithm, placed: PlacedStep) -> None:
    """Fill the columns that models compute from the trajectories; pools that differ compute at the same time.
    `placed.ratio_plan` says which log-probs are those of the old policy."""
    tokens = placed.batch.tokens
    if placed.ratio_plan.anchor is Anchor.ENGINE:
        tokens.old_logprobs = tokens.rollout_logprobs
    old = "old_logprobs" if placed.ratio_plan.trainer_pass is TrainerPass.BEFORE_UPDATE else None
    filling: list[Future[Any]] = []
    if Need.SQUARED_PROBS in algorithm.needs:
        filling.append(roles.actor.token_statistics(placed.rows(fills=(old, "squared_probs"))))
    elif old:
        filling.append(roles.actor.logprobs(placed.rows(fills=(old,))))
    if roles.reference:
        filling.append(roles.reference.logprobs(placed.rows(fills=("ref_logprobs",))))
    if roles.teacher and Need.TEACHER_LOGPROBS in algorithm.needs:
        filling.append(roles.teacher.logprobs(placed.rows(fills=("teacher_logprobs",))))
    if roles.teacher and Need.TEACHER_TOP_LOGPROBS in algorithm.needs:
        fills = ("teacher_top_ids", "teacher_top_logprobs")
        filling.append(roles.teacher.top_logprobs(placed.rows(fills=fills)))
    if roles.critic:
        filling.append(roles.critic.values(placed.rows(fills=("values",))))
    for column in filling:
        column.get()


def compute_advantages(algorithm: Algorithm, groups: Sequence[Group], batch: Batch, seed: Sequence[int]) -> StepMetrics:
    """Fill the batch's advantages, its returns and the tokens that the loss selects."""
    tokens, firsts = batch.tokens.map(torch.as_tensor), batch.first_branches
    result = algorithm.advantages(
        Rollouts(
            rewards_B=torch.as_tensor(batch.rewards[firsts]),
            scored_B=torch.as_tensor(batch.scored[firsts]),
            groups_B=torch.as_tensor(batch.groups[firsts].astype(np.int64)),
            trajectories_T=torch.as_tensor(batch.trajectory_of_token),
            branches_T=torch.as_tensor(batch.row_of_token),
            mask_T=torch.as_tensor(batch.loss_mask),
            old_logprobs_T=tokens.old_logprobs if Need.OLD_LOGPROBS in algorithm.needs else None,
            ref_logprobs_T=tokens.ref_logprobs,
            teacher_logprobs_T=tokens.teacher_logprobs,
            values_T=tokens.values,
            squared_probs_T=tokens.squared_probs,
            turn_rewards_T=tokens.turn_rewards,
            greedy_rewards_B=_greedy_rewards(groups) if Need.GREEDY_REWARDS in algorithm.needs else None,
            parts=_reward_parts(groups) if Need.REWARD_PARTS in algorithm.needs else {},
            seed=int(np.random.SeedSequence(seed).generate_state(1)[0]),
        )
    )
    batch.tokens.advantages = result.advantages_T.numpy()
    batch.tokens.returns = None if result.returns_T is None else result.returns_T.numpy()
    batch.tokens.selected = None if result.selected_T is None else result.selected_T.numpy()
    return result.metrics


def _greedy_rewards(groups: Sequence[Group]) -> torch.Tensor:
    values = [group.greedy.value if group.greedy else None for group in groups for _ in group.scores]
    return torch.tensor([math.nan if value is None else value for value in values])


def _reward_parts(groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    parts = [score.parts for group in groups for score in group.scores]
    names = sorted({name for own in parts for name in own})
    return {name: torch.tensor([own.get(name, math.nan) for own in parts]) for name in names}


def describe_batch(batch: Batch, config: TrainConfig, version: int) -> StepMetrics:
    """Lengths of prompts and responses, staleness and entropy of the rollout; with `perf/tokens` for the run.

    A response is all branches of a trajectory together, a prompt what the first of them begins with.

    `version`: that of the weights which the step trained. Asserts that no trained token is of a newer one, or of one
    that is older by more than `trainer.max_staleness`.
    """
    firsts = batch.first_branches
    responses = np.add.reduceat(np.diff(batch.response_offsets), firsts)
    prompts = np.diff(batch.prompt_offsets)[firsts]
    metrics = {"perf/tokens": float(len(batch.response_ids) + len(batch.prompt_ids))}
    for name, lengths in (("response_length", responses), ("prompt_length", prompts)):
        metrics[f"{name}/mean"] = float(lengths.mean())
        metrics[f"{name}/max"] = float(lengths.max())
        metrics[f"{name}/min"] = float(lengths.min())
    metrics["response_length/clip_ratio"] = float((responses >= config.generation.max_response_tokens).mean())
    _check_staleness(batch, config.trainer.max_staleness, version)
    if batch.loss_mask.any():
        assert batch.tokens.rollout_logprobs is not None
        metrics["rollout/entropy"] = float(-batch.tokens.rollout_logprobs[batch.loss_mask].mean())
        metrics["rollout/staleness/mean"] = float((version - batch.versions[batch.loss_mask]).mean())
        if config.trainer.max_staleness:
            metrics["rollout/staleness/max"] = float((version - batch.versions[batch.loss_mask]).max())
            metrics["rollout/mixed_share"] = _mixed_share(batch)
    return metrics


def _mixed_share(batch: Batch) -> float:
    """The share of the trained trajectories whose trained tokens are of more than one version."""
    rows_A, versions_A = batch.trajectory_of_token[batch.loss_mask], batch.versions[batch.loss_mask]
    _, starts = np.unique(rows_A, return_index=True)
    return float((np.maximum.reduceat(versions_A, starts) > np.minimum.reduceat(versions_A, starts)).mean())


def _check_staleness(batch: Batch, max_staleness: int, version: int) -> None:
    staleness_T = np.where(batch.loss_mask, version - batch.versions, 0)
    beyond = np.flatnonzero((staleness_T < 0) | (staleness_T > max_staleness))
    assert not len(beyond), (
        f"step {version + 1}, row {batch.row_of_token[beyond[0]]}: a token of version {batch.versions[beyond[0]]} is "
        f"trained on version {version}, with trainer.max_staleness: {max_staleness}"
    )
