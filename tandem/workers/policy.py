"""The actor and the reference: the policy that trains, and the frozen one it is kept close to."""

import numpy as np

from tandem.algorithms import Algorithm
from tandem.config.tree import TrainConfig
from tandem.training.base import TrainEngine
from tandem.types import Batch, BoolArray, FloatArray, StepMetrics
from tandem.workers.passes import score_tokens, train_on


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
        seen = np.where(batch.loss_mask, np.float32(np.nan), np.float32(0))
        learns_B, loss = self._learns(batch), self._algorithm.loss
        metrics = train_on(self._engine, batch, learns_B, self._algorithm, loss, self._config, step, "actor", seen)
        if batch.tokens.old_logprobs is None:
            batch.tokens.old_logprobs = seen
        return {**metrics, "actor/trained_share": float(learns_B.mean()), **_mismatch(batch)}

    def _learns(self, batch: Batch) -> BoolArray:
        """bool `[B]`: rows whose gradient can differ from zero."""
        tokens = batch.loss_mask
        if self._config.training.skip_zero_advantage and self._algorithm.zero_without_advantage:
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
