"""A batch with advantages -> optimizer steps: the cut into steps, what each token weighs, and what came of it."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch

from tandem.algorithms import Algorithm
from tandem.algorithms.base import Need
from tandem.algorithms.group_relative import GroupRelative
from tandem.algorithms.rollout_correction import rollout_weights
from tandem.batching.balance import BalancedPass
from tandem.batching.packing import split_groups, take_rows
from tandem.config.ratio import RatioPlan, TrainerPass, anchored_at_engine, ratio_plan
from tandem.config.tree import TrainConfig
from tandem.controller.placed import Placed, PlacedRows
from tandem.controller.roles import Actor, Critic
from tandem.errors import EngineError
from tandem.types import Batch, BoolArray, FloatArray, IntArray, StepMetrics

MISMATCH_BOUND = 0.01
"""Log-probs of engine and trainer that differ by more are counted in `rollout/mismatch_share`."""
ANCHOR_BOUND = 0.05
"""Engines whose log-probs are further from the trainer's, in the mean, are no anchor for a clip."""
_FORWARD_AND_BACKWARD = 3.0
"""Of a training pass, in forward passes."""
Float64Array = np.ndarray[Any, np.dtype[np.float64]]


class PlacedStep(Placed):
    """The batch of a training step on the ranks, cut into optimizer steps."""

    def __init__(
        self,
        batch: Batch,
        step: int,
        epochs: Sequence[Sequence[IntArray]],
        passes: Sequence[BalancedPass],
        left_out_B: BoolArray,
        plan: RatioPlan,
    ) -> None:
        """`step` counts from 1: the weights that it trains are of version `step - 1`."""
        super().__init__(batch, passes, f"training step {step}")
        self.step = step
        self.ratio_plan = plan
        """Which log-probs are the old policy's in this step."""
        self.epochs = epochs
        """The rows of each optimizer step, by epoch."""
        self.left_out_B = left_out_B
        """Rows that no optimizer step has."""


def check_rollout_logprobs(batch: Batch, step: int) -> None:
    """Raises EngineError where the engines' log-probs are no finite numbers, as the weights are not."""
    assert batch.tokens.rollout_logprobs is not None
    bad_T = batch.loss_mask & ~np.isfinite(batch.tokens.rollout_logprobs)
    if bad_T.any():
        raise EngineError(
            f"step {step}: the engine's log-probs of {bad_T.sum():,} of {batch.loss_mask.sum():,} tokens are no finite "
            "numbers, so the weights that it serves are none: mostly training.optimizer.lr is too high. The last "
            "checkpoint may be of before"
        )


def why_nothing_was_learned(batch: Batch, algorithm: Algorithm, config: TrainConfig, left_out_B: BoolArray) -> str:
    """Of a step in which no answer could teach, for a person. `left_out_B`: rows that no optimizer step had."""
    firsts = batch.first_branches
    scored_B, groups_B, rewards_B = batch.scored[firsts], batch.groups[firsts], batch.rewards[firsts]
    taught = bool({Need.TEACHER_LOGPROBS, Need.TEACHER_TOP_LOGPROBS} & algorithm.needs)
    if not scored_B.any() and not (taught and batch.loss_mask.any()):
        return "no answer has a reward (reward/not_scored, errors and timeouts count why)"
    teaches_T = batch.loss_mask & _has_advantage(batch) if _leaves_rows_out(algorithm, config) else batch.loss_mask
    if ((batch.tokens_by_row(teaches_T) > 0) & left_out_B).any():
        return "algorithm.mask_truncated leaves out answers that were cut, as all that could teach were"
    if not batch.loss_mask.any():
        return "no answer with a reward has a token of the policy's own"
    if taught:
        return "the teacher gives all tokens the probabilities that the policy gives them, as the same model does"
    _, siblings = np.unique(groups_B[scored_B], return_counts=True)
    if isinstance(algorithm, GroupRelative) and siblings.max() < 2:
        return "no answer with a reward has a sibling with one, to which it could be compared"
    if isinstance(algorithm, GroupRelative) and not _rewards_differ(batch)[batch.scored].any():
        return "siblings all have the same reward"
    if len(np.unique(rewards_B[scored_B])) == 1:
        return "all answers have the same reward"
    return "all advantages are 0, though rewards differ"


def _has_advantage(batch: Batch) -> BoolArray:
    """bool `[T]`; of a batch without advantages yet, everywhere."""
    advantages_T = batch.tokens.advantages
    return np.ones(len(batch.loss_mask), np.bool_) if advantages_T is None else advantages_T != 0


def placed_step(
    batch: Batch, algorithm: Algorithm, config: TrainConfig, step: int, left_out_B: BoolArray | None = None
) -> PlacedStep:
    """Rows are balanced over ranks in every pass of the step: that of all rows' log-probs, and each optimizer step.

    Which rows have advantage 0 and need no pass is not known yet. They are mostly those of siblings that all have the
    same reward: optimizer steps are balanced with these and without them. `left_out_B`: rows that get log-probs
    with the others, and that no optimizer step has; default: none.
    """
    settings = config.algorithm
    left_out_B = np.zeros(len(batch), np.bool_) if left_out_B is None else left_out_B
    seeds = [(config.trainer.seed, step, epoch) for epoch in range(settings.epochs)]
    epochs = [[rows[~left_out_B[rows]] for rows in split_groups(batch, settings.minibatches, seed)] for seed in seeds]
    cuts = [rows for epoch in epochs for rows in epoch]
    if _leaves_rows_out(algorithm, config):
        differ_B = _rewards_differ(batch)
        cuts += [rows[differ_B[rows]] for rows in cuts]
    weight = _FORWARD_AND_BACKWARD * settings.epochs * settings.minibatches / len(cuts)
    passes = [BalancedPass(np.arange(len(batch))), *(BalancedPass(rows, weight) for rows in cuts)]
    reads_old, critic_alone = Need.OLD_LOGPROBS in algorithm.needs, warms_up(config, step)
    staleness = config.trainer.max_staleness
    plan = ratio_plan(settings, staleness, reads_old_logprobs=reads_old, critic_alone=critic_alone)
    return PlacedStep(batch, step, epochs, passes, left_out_B, plan)


def _rewards_differ(batch: Batch) -> BoolArray:
    """bool `[B]`: the row's siblings do not all have the same reward, of those that have one."""
    _, group_of_row_B = np.unique(batch.groups, return_inverse=True)
    highest, lowest = np.full((2, len(batch)), -np.inf)
    np.maximum.at(highest, group_of_row_B, np.where(batch.scored, batch.rewards, -np.inf))
    np.maximum.at(lowest, group_of_row_B, np.where(batch.scored, -batch.rewards, -np.inf))
    return (highest != -lowest)[group_of_row_B]


def update(
    actor: Actor, critic: Critic | None, algorithm: Algorithm, placed: PlacedStep, config: TrainConfig
) -> StepMetrics:
    """Every optimizer step of one training step: one call of the actor's ranks, and one of the critic's, for all.

    Returns the mean of each metric over them, and fills `trainer_logprobs`, of the pass that `placed.ratio_plan` says.
    Asserts that where a token is of older weights the losses are given old log-probs: without, they take r to be 1.
    """
    batch, version = placed.batch, placed.step - 1
    is_stale_T = batch.loss_mask & (batch.versions < version)
    assert batch.tokens.old_logprobs is not None or not is_stale_T.any(), (
        f"step {placed.step}: {is_stale_T.sum()} trained tokens are older than version {version}, and have no "
        "old_logprobs"
    )
    trainable_B = _trainable_rows(batch, algorithm, config) & ~placed.left_out_B
    taken_T = batch.loss_mask & ~np.repeat(placed.left_out_B, np.diff(batch.response_offsets))
    correction_metrics = _set_rollout_correction(batch, config, taken_T)
    critic_alone = warms_up(config, placed.step)
    trained, of_critic = _optimizer_steps(placed, algorithm, trainable_B)
    learning = None if critic_alone else actor.learn_steps(trained, algorithm.loss)
    step_metrics: list[StepMetrics] = []
    if critic:
        assert algorithm.value_loss is not None
        learning_values = critic.learn_steps(of_critic, algorithm.value_loss)
        step_metrics += [metrics for metrics, _ in learning_values.get()]
    learned = learning.get() if learning else []
    step_metrics += [metrics for metrics, _ in learned]
    if placed.ratio_plan.trainer_pass is TrainerPass.BEFORE_UPDATE:
        batch.tokens.trainer_logprobs = batch.tokens.old_logprobs
    elif placed.ratio_plan.trainer_pass is TrainerPass.FIRST_STEP:
        rows = trained[0].selection.rows
        assert rows is not None
        batch.tokens.trainer_logprobs = _in_the_batch(batch, rows, learned[0][1])
    share = 0.0 if critic_alone else float(trainable_B[batch.first_branches].mean())
    trained_share = {"actor/trained_share": share}
    comparison = _compare_with_engine(batch, config.trainer.max_staleness, version, taken_T)
    return {**mean_metrics(step_metrics), **trained_share, **correction_metrics, **comparison}


def _optimizer_steps(
    placed: PlacedStep, algorithm: Algorithm, trainable_B: BoolArray
) -> tuple[list[PlacedRows], list[PlacedRows]]:
    """The optimizer steps of the actor, on the rows that it can learn from, of which the first tells its log-probs
    where these are the trainer's; and those of the critic, on all rows."""
    first_tells = placed.ratio_plan.trainer_pass is TrainerPass.FIRST_STEP
    trained: list[PlacedRows] = []
    of_critic: list[PlacedRows] = []
    for rows in (rows for epoch in placed.epochs for rows in epoch):
        weights = _token_weights(placed.batch, rows, algorithm)
        own = rows[trainable_B[rows]]
        own_weights = take_rows(weights, _offsets(placed.batch, rows), np.searchsorted(rows, own))
        trained.append(placed.rows(own, weights=own_weights, to_controller=first_tells and not trained))
        of_critic.append(placed.rows(rows, weights=weights, to_controller=False))
    return trained, of_critic


def warms_up(config: TrainConfig, step: int) -> bool:
    """The critic alone learns in this step, which counts from 1."""
    return step <= config.critic_warmup_steps


def _set_rollout_correction(batch: Batch, config: TrainConfig, taken_T: BoolArray) -> StepMetrics:
    """Fill the importance weights of the policy loss, where the engine drew the tokens by other log-probs; metrics.
    `taken_T`: the tokens that optimizer steps have."""
    settings, tokens = config.algorithm.rollout_correction, batch.tokens
    if settings.type == "none":
        return {}
    assert tokens.old_logprobs is not None and tokens.rollout_logprobs is not None
    columns = (tokens.old_logprobs, tokens.rollout_logprobs, taken_T, batch.trajectory_of_token)
    weights_T, metrics = rollout_weights(settings, *map(torch.as_tensor, columns))
    tokens.importance_weights = weights_T.numpy()
    return metrics


def mean_metrics(step_metrics: Sequence[StepMetrics]) -> StepMetrics:
    """The mean of each metric over the optimizer steps that have it."""
    names = [name for metrics in step_metrics for name in metrics]
    return {name: fmean(metrics[name] for metrics in step_metrics if name in metrics) for name in dict.fromkeys(names)}


def _token_weights(batch: Batch, rows: IntArray, algorithm: Algorithm) -> FloatArray:
    """What the tokens of one optimizer step's rows weigh, head to tail."""
    mask = take_rows(batch.loss_mask, batch.response_offsets, rows)
    trajectories = np.repeat(batch.trajectories[rows].astype(np.int64), np.diff(_offsets(batch, rows)))
    return algorithm.weights(torch.tensor(mask), torch.as_tensor(trajectories)).numpy()


def _offsets(batch: Batch, rows: IntArray) -> IntArray:
    """Of the response tokens of some rows, head to tail."""
    return np.r_[0, np.diff(batch.response_offsets)[rows].cumsum()]


def _in_the_batch(batch: Batch, rows: IntArray, column: FloatArray) -> FloatArray:
    """`[T]`: the column of some rows, NaN on the trained tokens of the others."""
    whole_T = np.where(batch.loss_mask, np.float32(np.nan), np.float32(0))
    starts, stops, begins = batch.response_offsets[rows], batch.response_offsets[rows + 1], _offsets(batch, rows)[:-1]
    for start, stop, begin in zip(starts.tolist(), stops.tolist(), begins.tolist(), strict=True):
        whole_T[start:stop] = column[begin : begin + stop - start]
    return whole_T


def _leaves_rows_out(algorithm: Algorithm, config: TrainConfig) -> bool:
    """Rows whose advantages are 0 need no pass."""
    training = config.training
    return training.skip_zero_advantage and algorithm.zero_without_advantage and not training.adds_losses


def _trainable_rows(batch: Batch, algorithm: Algorithm, config: TrainConfig) -> BoolArray:
    """bool `[B]`: rows of trajectories whose gradient can differ from zero."""
    trainable_T = batch.loss_mask
    if _leaves_rows_out(algorithm, config):
        assert batch.tokens.advantages is not None
        trainable_T = trainable_T & (batch.tokens.advantages != 0)
    return np.isin(batch.trajectories, batch.trajectories[batch.tokens_by_row(trainable_T) > 0])


def _compare_with_engine(batch: Batch, max_staleness: int, version: int, taken_T: BoolArray) -> StepMetrics:
    """How far the trainer's log-probs before the step are from the generation engine's, on the trained tokens.

    On tokens of the weights that the step trained, `version`, that is a mismatch of engine and trainer. On older ones
    it is also how far the policy has moved since: the drift. Rows that no pass went through are left out,
    and so are tokens that no optimizer step has, all but `taken_T`. Nothing where no pass has told the trainer's.
    """
    trainer, rollout = batch.tokens.trainer_logprobs, batch.tokens.rollout_logprobs
    if trainer is None:
        return {}
    assert rollout is not None
    difference_T = (trainer - rollout).astype(np.float64)
    known_T = taken_T & ~np.isnan(difference_T)
    if max_staleness == 0:
        return _mismatch(difference_T[known_T])
    metrics = _mismatch(difference_T[known_T & (batch.versions == version)])
    drift = difference_T[known_T & (batch.versions < version)]
    if len(drift):
        metrics["rollout/drift_kl"] = _k3(drift)
    if known_T.any():
        metrics["rollout/ess"] = _effective_share(difference_T[known_T])
    return metrics


def _mismatch(difference: Float64Array) -> StepMetrics:
    if not len(difference):
        return {}
    return {
        "rollout/mismatch_kl": _k3(difference),
        "rollout/mismatch_max": float(np.abs(difference).max()),
        "rollout/mismatch_share": float((np.abs(difference) > MISMATCH_BOUND).mean()),
    }


def _k3(difference: Float64Array) -> float:
    """The k3 estimate of KL(rollout || trainer): mean(exp(d) - 1 - d), d = trainer - rollout."""
    return float(np.mean(np.expm1(difference) - difference))


def _effective_share(log_ratio: Float64Array) -> float:
    """Effective sample size over the number of samples: (sum w)^2 / (n sum w^2), w = exp(log_ratio) (Kong 1992)."""
    weights = np.exp(log_ratio - log_ratio.max())  # a common factor cancels
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def mismatch_warning(batch: Batch, config: TrainConfig, version: int) -> str | None:
    """What to tell the user where the clip is anchored at the log-probs of an engine that is far from the trainer.

    Of answers that the weights of `version` made as a whole: in others the engine may have kept what older weights
    computed of their beginnings. `batch` is one that `update` has gone through.
    """
    at_engine = anchored_at_engine(config.algorithm, config.trainer.max_staleness)
    trainer, rollout = batch.tokens.trainer_logprobs, batch.tokens.rollout_logprobs
    if not at_engine or config.algorithm.loss.divides_by != "old_policy" or trainer is None:
        return None
    assert rollout is not None
    row_of_token, trained_T = batch.row_of_token, batch.loss_mask
    stale_tokens_B = np.bincount(row_of_token[trained_T & (batch.versions < version)], minlength=len(batch))
    distance = np.abs(trainer - rollout)[trained_T & (stale_tokens_B == 0)[row_of_token]]
    distance = distance[~np.isnan(distance)]
    if not len(distance) or (mean := float(distance.mean())) <= ANCHOR_BOUND:
        return None
    return (
        f"algorithm.rollout_correction.skip_old_logprobs: the loss's ratio is to the engine's log-probs, and they are "
        f"{mean:.2g} nats a token from the trainer's with the same weights (more than {ANCHOR_BOUND}): a run may "
        "collapse under that. `tandem check` tells a fault from rounding; against rounding set "
        "algorithm.rollout_correction: {type: truncate, level: sequence} (docs/rollout_correction.md)"
    )
