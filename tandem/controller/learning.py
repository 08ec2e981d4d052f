"""A batch with advantages -> optimizer steps: the cut into steps, what each token weighs, and what came of it."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

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


def update(
    actor: Actor, critic: Critic | None, algorithm: Algorithm, batch: Batch, config: TrainConfig, step: int
) -> StepMetrics:
    """Every optimizer step of one training step, the actor's and the critic's on the same rows at the same time.

    Returns the mean of each metric over them. Where the trainer has computed no log-probs before, `old_logprobs` become
    those of the first optimizer step's own forward pass, which no update precedes; NaN on rows that are not in it.
    """
    row_of_token = batch.row_of_token
    trainable_B = _trainable_rows(batch, algorithm, config)
    correction_metrics = _set_rollout_correction(batch, config)
    first_logprobs_T = np.where(batch.loss_mask, np.float32(np.nan), np.float32(0))
    step_metrics: list[StepMetrics] = []
    weights_moved = False
    for epoch in range(config.algorithm.epochs):
        for rows in split_groups(batch, config.algorithm.minibatches, (config.trainer.seed, step, epoch)):
            in_step_T = batch.loss_mask & _are_in(rows, batch)[row_of_token]
            weights_T = algorithm.weights(torch.as_tensor(in_step_T), torch.as_tensor(row_of_token)).numpy()
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
    if batch.tokens.old_logprobs is None or config.algorithm.rollout_correction.skip_old_logprobs:
        batch.tokens.old_logprobs = first_logprobs_T
    trained_share = {"actor/trained_share": float(trainable_B.mean())}
    return {**mean_metrics(step_metrics), **trained_share, **correction_metrics, **_mismatch(batch)}


def needs_old_logprobs(config: TrainConfig, algorithm: Algorithm) -> bool:
    """The trainer's log-probs are needed before the update, so that they take a pass of their own.

    With one optimizer step on fresh trajectories the loss's own pass has them. Importance weights and advantages that
    read them are due before that. `skip_old_logprobs` takes the engine's instead, everywhere.
    """
    correction = config.algorithm.rollout_correction
    several_steps = config.algorithm.epochs * config.algorithm.minibatches > 1
    early = Signal.POLICY_LOGPROBS in algorithm.needs or correction.type != "none"
    return (several_steps or early) and not correction.skip_old_logprobs


def _set_rollout_correction(batch: Batch, config: TrainConfig) -> StepMetrics:
    """Fill the importance weights of the policy loss, where the engine drew the tokens by other log-probs; metrics."""
    settings, tokens = config.algorithm.rollout_correction, batch.tokens
    if settings.type == "none":
        return {}
    assert tokens.old_logprobs is not None and tokens.rollout_logprobs is not None
    columns = (tokens.old_logprobs, tokens.rollout_logprobs, batch.loss_mask, batch.row_of_token)
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
    """bool `[B]`: rows whose gradient can differ from zero."""
    trainable_T, training = batch.loss_mask, config.training
    if training.skip_zero_advantage and algorithm.zero_without_advantage and not training.adds_losses:
        assert batch.tokens.advantages is not None
        trainable_T = trainable_T & (batch.tokens.advantages != 0)
    return np.bincount(batch.row_of_token[trainable_T], minlength=len(batch)) > 0


def _mismatch(batch: Batch) -> StepMetrics:
    """How far the trainer's log-probs are from the generation engine's, on the trained tokens, same weights.

    `kl` is the k3 estimate of KL(rollout || trainer): mean(exp(d) - 1 - d), d = trainer - rollout.
    """
    trainer, rollout = batch.tokens.old_logprobs, batch.tokens.rollout_logprobs
    assert trainer is not None and rollout is not None
    difference = (trainer - rollout)[batch.loss_mask]
    difference = difference[~np.isnan(difference)].astype(np.float64)
    if not len(difference):
        return {}
    return {
        "rollout/mismatch_kl": float(np.mean(np.expm1(difference) - difference)),
        "rollout/mismatch_max": float(np.abs(difference).max()),
        "rollout/mismatch_share": float((np.abs(difference) > MISMATCH_BOUND).mean()),
    }
