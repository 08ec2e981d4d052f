"""A judged batch -> optimizer steps: the cut into steps, what each token weighs, and what came of it."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch

from tandem.algorithms import Algorithm
from tandem.algorithms.rollout_correction import rollout_weights
from tandem.batching.packing import select_rows, split_groups
from tandem.config.tree import TrainConfig
from tandem.controller.groups import WorkerGroup
from tandem.types import Batch, BoolArray, FloatArray, IntArray, StepMetrics

MISMATCH_BOUND = 0.01
"""Log-probs of engine and trainer that differ by more are counted in `rollout/mismatch_share`."""


def update(
    actor: WorkerGroup, critic: WorkerGroup | None, algorithm: Algorithm, batch: Batch, config: TrainConfig, step: int
) -> StepMetrics:
    """Every optimizer step of one training step, the actor's and the critic's on the same rows at the same time.

    Returns the mean of each metric over them. Fills `old_logprobs` where nothing has, with NaN on rows left out.
    """
    seen = np.where(batch.loss_mask, np.float32(np.nan), np.float32(0))
    learns_B, row_of_token = _learns(batch, algorithm, config), batch.row_of_token
    correction, corrected = _correction(batch, config)
    done: list[StepMetrics] = []
    for epoch in range(config.algorithm.epochs):
        for rows in split_groups(batch, config.algorithm.minibatches, (config.trainer.seed, step, epoch)):
            mask = batch.loss_mask & _members(rows, batch)[row_of_token]
            weights = algorithm.weights(torch.from_numpy(mask), torch.from_numpy(row_of_token)).numpy()
            kept = rows[learns_B[rows]]
            acting = actor.learn(_part(batch, kept, weights * correction), algorithm.loss)
            if critic:
                done.append(critic.learn(_part(batch, rows, weights), algorithm.value_loss).get()[0])
            metrics, logprobs = acting.get()
            if epoch == 0:
                seen[_members(kept, batch)[row_of_token]] = logprobs
            done.append(metrics)
    if batch.tokens.old_logprobs is None or config.algorithm.rollout_correction.skip_old_logprobs:
        batch.tokens.old_logprobs = np.where(batch.loss_mask, seen, np.float32(0))
    trained = {"actor/trained_share": float(learns_B.mean())}
    return {**mean_metrics(done), **trained, **corrected, **_mismatch(batch)}


def old_policy_changes(config: TrainConfig) -> bool:
    """The old policy's log-probs need a pass of their own.

    With one optimizer step on fresh trajectories it is the policy in hand; importance weights are due before that.
    """
    correction = config.algorithm.rollout_correction
    several = config.algorithm.epochs * config.algorithm.minibatches > 1
    return (several or correction.type != "none") and not correction.skip_old_logprobs


def _correction(batch: Batch, config: TrainConfig) -> tuple[FloatArray, StepMetrics]:
    """`[T]`: what each token's weight is multiplied with, for the engine drew it by other log-probs; metrics."""
    settings, tokens = config.algorithm.rollout_correction, batch.tokens
    assert tokens.rollout_logprobs is not None
    if settings.skip_old_logprobs:
        tokens.old_logprobs = tokens.rollout_logprobs
    if settings.type == "none":
        return np.ones(len(batch.response_ids), np.float32), {}
    assert tokens.old_logprobs is not None
    columns = (tokens.old_logprobs, tokens.rollout_logprobs, batch.loss_mask, batch.row_of_token)
    weights, metrics = rollout_weights(settings, *map(torch.from_numpy, columns))
    return weights.numpy(), metrics


def token_shares(mask: BoolArray) -> FloatArray:
    """1 / (number of tokens in the mask) on them, 0 elsewhere."""
    return (mask / max(int(mask.sum()), 1)).astype(np.float32)


def mean_metrics(done: Sequence[StepMetrics]) -> StepMetrics:
    """The mean of each metric over those that have it."""
    return {name: fmean(one[name] for one in done if name in one) for one in done for name in one}


def _members(rows: IntArray, batch: Batch) -> BoolArray:
    """bool `[B]`: the row is one of `rows`."""
    members_B = np.zeros(len(batch), dtype=np.bool_)
    members_B[rows] = True
    return members_B


def _part(batch: Batch, rows: IntArray, weights: FloatArray) -> Batch:
    """The rows of one optimizer step, with what their tokens weigh in the loss and in metrics."""
    part = replace(batch, tokens=replace(batch.tokens, weights=weights))
    part = part if len(rows) == len(batch) else select_rows(part, rows)
    part.tokens.shares = token_shares(part.loss_mask)
    return part


def _learns(batch: Batch, algorithm: Algorithm, config: TrainConfig) -> BoolArray:
    """bool `[B]`: rows whose gradient can differ from zero."""
    tokens = batch.loss_mask
    if config.training.skip_zero_advantage and algorithm.zero_without_advantage:
        assert batch.tokens.advantages is not None
        tokens = tokens & (batch.tokens.advantages != 0)
    return np.bincount(batch.row_of_token[tokens], minlength=len(batch)) > 0


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
