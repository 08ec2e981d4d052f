"""A batch with advantages -> optimizer steps: the cut into steps, what each token weighs, and what came of it."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch

from tandem.algorithms import Algorithm
from tandem.algorithms.base import Signal
from tandem.algorithms.rollout_correction import rollout_weights
from tandem.batching.packing import select_rows, split_groups
from tandem.config.tree import TrainConfig
from tandem.controller.roles import Actor, Critic
from tandem.types import Batch, BoolArray, FloatArray, IntArray, StepMetrics

MISMATCH_BOUND = 0.01
"""Log-probs of engine and trainer that differ by more are counted in `rollout/mismatch_share`."""
ANCHOR_BOUND = 0.05
"""Engines whose log-probs are further from the trainer's, in the mean, are no anchor for a clip."""
Float64Array = np.ndarray[Any, np.dtype[np.float64]]


def update(
    actor: Actor, critic: Critic | None, algorithm: Algorithm, batch: Batch, config: TrainConfig, step: int
) -> StepMetrics:
    """Every optimizer step of one training step, the actor's and the critic's on the same rows at the same time.

    Returns the mean of each metric over them. Where the trainer has computed no log-probs before, `old_logprobs` become
    those of the first optimizer step's own forward pass, which no update precedes; NaN on rows that are not in it.
    Asserts that where a token is of older weights the losses are given old log-probs: without, they take r to be 1.
    """
    is_stale_T = batch.loss_mask & (batch.versions < step - 1)
    assert batch.tokens.old_logprobs is not None or not is_stale_T.any(), (
        f"step {step}: {is_stale_T.sum()} trained tokens are older than version {step - 1}, and have no old_logprobs"
    )
    row_of_token, trajectory_of_token = batch.row_of_token, batch.trajectory_of_token
    trainable_B = _trainable_rows(batch, algorithm, config)
    correction_metrics = _set_rollout_correction(batch, config)
    first_logprobs_T = np.where(batch.loss_mask, np.float32(np.nan), np.float32(0))
    step_metrics: list[StepMetrics] = []
    weights_moved = False
    for epoch in range(config.algorithm.epochs):
        for rows in split_groups(batch, config.algorithm.minibatches, (config.trainer.seed, step, epoch)):
            in_step_T = batch.loss_mask & _are_in(rows, batch)[row_of_token]
            weights_T = algorithm.weights(torch.as_tensor(in_step_T), torch.as_tensor(trajectory_of_token)).numpy()
            trainable = rows[trainable_B[rows]]
            learning = actor.learn(_optimizer_step_batch(batch, trainable, weights_T), algorithm.loss)
            if critic:
                assert algorithm.value_loss is not None
                critic_batch = _optimizer_step_batch(batch, rows, weights_T)
                step_metrics.append(critic.learn(critic_batch, algorithm.value_loss).get()[0])
            metrics, logprobs_T = learning.get()
            if not weights_moved:
                first_logprobs_T[_are_in(trainable, batch)[row_of_token]] = logprobs_T
            weights_moved = True
            step_metrics.append(metrics)
    if batch.tokens.old_logprobs is None or config.takes_engine_logprobs:
        batch.tokens.old_logprobs = first_logprobs_T
    trained_share = {"actor/trained_share": float(trainable_B[batch.first_branches].mean())}
    comparison = _compare_with_engine(batch, config.trainer.max_staleness, version=step - 1)
    return {**mean_metrics(step_metrics), **trained_share, **correction_metrics, **comparison}


def needs_old_logprobs(config: TrainConfig, algorithm: Algorithm) -> bool:
    """The trainer's log-probs are needed before the update, so that they take a pass of their own.

    With one optimizer step on trajectories of the same weights the loss's own pass has them. Importance weights and
    advantages that read them are due before that. `skip_old_logprobs` takes the engine's instead, everywhere.
    """
    several_steps = config.algorithm.epochs * config.algorithm.minibatches > 1
    corrected = config.algorithm.rollout_correction.type != "none"
    early = Signal.POLICY_LOGPROBS in algorithm.needs or corrected or config.trainer.max_staleness > 0
    return (several_steps or early) and not config.takes_engine_logprobs


def _set_rollout_correction(batch: Batch, config: TrainConfig) -> StepMetrics:
    """Fill the importance weights of the policy loss, where the engine drew the tokens by other log-probs; metrics."""
    settings, tokens = config.algorithm.rollout_correction, batch.tokens
    if settings.type == "none":
        return {}
    assert tokens.old_logprobs is not None and tokens.rollout_logprobs is not None
    columns = (tokens.old_logprobs, tokens.rollout_logprobs, batch.loss_mask, batch.trajectory_of_token)
    weights_T, metrics = rollout_weights(settings, *map(torch.as_tensor, columns))
    tokens.importance_weights = weights_T.numpy()
    return metrics


def token_shares(mask: BoolArray) -> FloatArray:
    """1 / (number of tokens in the mask) on them, 0 elsewhere."""
    return (mask / max(int(mask.sum()), 1)).astype(np.float32)


def mean_metrics(step_metrics: Sequence[StepMetrics]) -> StepMetrics:
    """The mean of each metric over the optimizer steps that have it."""
    names = [name for metrics in step_metrics for name in metrics]
    return {name: fmean(metrics[name] for metrics in step_metrics if name in metrics) for name in dict.fromkeys(names)}


def _are_in(rows: IntArray, batch: Batch) -> BoolArray:
    """bool `[B]`: the row is one of `rows`."""
    are_in_B = np.zeros(len(batch), dtype=np.bool_)
    are_in_B[rows] = True
    return are_in_B


def _optimizer_step_batch(batch: Batch, rows: IntArray, weights_T: FloatArray) -> Batch:
    """The rows of one optimizer step, with what their tokens weigh in the loss and in metrics."""
    part = replace(batch, tokens=replace(batch.tokens, weights=weights_T))
    part = part if len(rows) == len(batch) else select_rows(part, rows)
    part.tokens.shares = token_shares(part.loss_mask)
    return part


def _trainable_rows(batch: Batch, algorithm: Algorithm, config: TrainConfig) -> BoolArray:
    """bool `[B]`: rows of trajectories whose gradient can differ from zero."""
    trainable_T, training = batch.loss_mask, config.training
    if training.skip_zero_advantage and algorithm.zero_without_advantage and not training.adds_losses:
        assert batch.tokens.advantages is not None
        trainable_T = trainable_T & (batch.tokens.advantages != 0)
    return np.isin(batch.trajectories, batch.trajectory_of_token[trainable_T])


def _compare_with_engine(batch: Batch, max_staleness: int, version: int) -> StepMetrics:
    """How far the trainer's log-probs before the step are from the generation engine's, on the trained tokens.

    On tokens of the weights that the step trained, `version`, that is a mismatch of engine and trainer. On older ones
    it is also how far the policy has moved since: the drift. Rows that no pass went through are left out.
    """
    trainer, rollout = batch.tokens.old_logprobs, batch.tokens.rollout_logprobs
    assert trainer is not None and rollout is not None
    difference_T = (trainer - rollout).astype(np.float64)
    known_T = batch.loss_mask & ~np.isnan(difference_T)
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
    if not config.takes_engine_logprobs or config.algorithm.loss.ratio_to != "old_policy":
        return None
    trainer, rollout = batch.tokens.old_logprobs, batch.tokens.rollout_logprobs
    assert trainer is not None and rollout is not None
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
