"""The critic: values of every token, and their regression to the returns."""

import numpy as np

from tandem.algorithms import Algorithm
from tandem.config.tree import TrainConfig
from tandem.training.base import TrainEngine
from tandem.types import Batch, FloatArray, StepMetrics
from tandem.workers.passes import score_tokens, train_on


class Critic:
    """Predicts the return before each token."""

    def __init__(self, engine: TrainEngine, algorithm: Algorithm, config: TrainConfig) -> None:
        self._engine = engine
        self._algorithm = algorithm
        self._config = config

    def values(self, batch: Batch) -> FloatArray:
        """float32 `[T]`, 0 outside `loss_mask`."""
        return score_tokens(self._engine, batch, self._config.training.tokens_per_micro_batch, lambda out: out.values_S)

    def update(self, batch: Batch, step: int) -> StepMetrics:
        """Every optimizer step of one training step, cut as the actor's are."""
        loss, every = self._algorithm.value_loss, np.ones(len(batch), dtype=np.bool_)
        assert loss is not None
        return train_on(self._engine, batch, every, self._algorithm, loss, self._config, step, "critic")
