"""A judged batch -> optimizer steps: the cut into steps, what each token weighs, and what came of it."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch

from tandem.algorithms import Algorithm
from tandem.batching.packing import select_rows, split_groups
from tandem.config.tree import TrainConfig
from tandem.controller.groups import WorkerGroup
from tandem.types import Batch, BoolArray, FloatArray, IntArray, StepMetrics


def update(
    actor: WorkerGroup, critic: WorkerGroup | None, algorithm: Algorithm, batch: Batch, config: TrainConfig, step: int
) -> StepMetrics:
    """Every optimizer step of one training step, the actor's and the critic's on the same rows at the same time.

    Returns the mean of each metric over them. Fills `old_logprobs` where nothing has, with NaN on rows left out.
    """
    seen = np.where(batch.loss_mask, np.float32(np.nan), np.float32(0))
    learns_B, row_of_token = _learns(batch, algorithm, config), batch.row_of_token
    done: list[StepMetrics] = []
    for epoch in range(config.algorithm.epochs):
        for rows in split_groups(batch, config.algorithm.minibatches, (config.trainer.seed, step, epoch)):
            mask = batch.loss_mask & _members(rows, batch)[row_of_token]
            weights = algorithm.weights(torch.from_numpy(mask), torch.from_numpy(row_of_token)).numpy()
            kept = rows[learns_B[rows]]
            acting = actor.learn(_part(batch, kept, weights), algorithm.loss)
            if critic:
                done.append(critic.learn(_part(batch, rows, weights), algorithm.value_loss).get()[0])
            metrics, logprobs = acting.get()
            seen[_members(kept, batch)[row_of_token]] = logprobs
            done.append(metrics)
    if batch.tokens.old_logprobs is None:
        batch.tokens.old_logprobs = np.where(batch.loss_mask, seen, np.float32(0))
    return {**mean_metrics(done), "actor/trained_share": float(learns_B.mean()), **_mismatch(batch)}


def old_policy_changes(config: TrainConfig) -> bool:
    """With one optimizer step on fresh trajectories the old policy is the one in hand; with more it is not."""
    return config.algorithm.epochs * config.algorithm.minibatches > 1


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
    }
