"""The actor and the reference: the policy that trains, and the frozen one it is kept close to."""

import numpy as np
import torch

from tandem.algorithms import Algorithm
from tandem.batching import split_groups
from tandem.config import TrainConfig
from tandem.training.base import TrainEngine
from tandem.types import Batch, BoolArray, FloatArray, IntArray, StepMetrics
from tandem.workers.passes import mean_metrics, optimizer_step, score_tokens


class Reference:
    """A policy that only scores."""

    def __init__(self, engine: TrainEngine, config: TrainConfig) -> None:
        self._engine = engine
        self._tokens_per_micro_batch = config.training.tokens_per_micro_batch

    def logprobs(self, batch: Batch) -> FloatArray:
        """float32 `[T]`, 0 outside `loss_mask`."""
        return score_tokens(self._engine, batch, self._tokens_per_micro_batch, lambda out: out.logprobs_S)


class Actor(Reference):
    """The policy that trains."""

    def __init__(self, engine: TrainEngine, algorithm: Algorithm, config: TrainConfig) -> None:
        super().__init__(engine, config)
        self._algorithm = algorithm
        self._config = config

    @property
    def needs_old_logprobs(self) -> bool:
        """With one optimizer step on fresh trajectories the old policy is the one in hand; with more it is not."""
        return self._config.algorithm.epochs * self._config.algorithm.minibatches > 1

    def update(self, batch: Batch, step: int) -> StepMetrics:
        """Every optimizer step of one training step; fills `old_logprobs` where the loop has not.

        Log-probs of rows that were skipped are then NaN.
        """
        config = self._config
        seen = np.where(batch.loss_mask, np.float32(np.nan), np.float32(0))
        done: list[StepMetrics] = []
        for epoch in range(config.algorithm.epochs):
            for rows in split_groups(batch, config.algorithm.minibatches, (config.trainer.seed, step, epoch)):
                informative = rows[self._informative(batch)[rows]]
                self._weigh(batch, rows, informative)
                done.append(
                    optimizer_step(
                        self._engine, batch, informative, self._algorithm.loss, self._tokens_per_micro_batch, seen
                    )
                )
        if batch.tokens.old_logprobs is None:
            batch.tokens.old_logprobs = seen
        return {
            **mean_metrics(done, "actor"),
            "actor/trained_share": float(self._informative(batch).mean()),
            **_mismatch(batch),
        }

    def _informative(self, batch: Batch) -> BoolArray:
        """bool `[B]`: rows whose gradient can differ from zero."""
        tokens = batch.loss_mask
        if self._config.training.skip_zero_advantage and self._algorithm.zero_without_advantage:
            assert batch.tokens.advantages is not None
            tokens = tokens & (batch.tokens.advantages != 0)
        return np.bincount(batch.row_of_token[tokens], minlength=len(batch)) > 0

    def _weigh(self, batch: Batch, rows: IntArray, trained: IntArray) -> None:
        """Fill `weights` for an optimizer step on `rows`, of which only `trained` are passed on."""
        row_of_token = batch.row_of_token
        mask = batch.loss_mask & np.isin(row_of_token, rows)
        weights = self._algorithm.weights(torch.from_numpy(mask), torch.from_numpy(row_of_token))
        batch.tokens.weights = weights.numpy()
        batch.tokens.shares = token_shares(batch.loss_mask & np.isin(row_of_token, trained))


def token_shares(mask: BoolArray) -> FloatArray:
    """1 / (number of tokens in the mask) on them, 0 elsewhere."""
    return (mask / max(int(mask.sum()), 1)).astype(np.float32)


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
