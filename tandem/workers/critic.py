"""The critic: values of every token, and their regression to the returns."""

import numpy as np
import torch

from tandem.algorithms import Algorithm
from tandem.batching import split_groups
from tandem.config import TrainConfig
from tandem.training.base import TrainEngine
from tandem.types import Batch, FloatArray, StepMetrics
from tandem.workers.passes import mean_metrics, optimizer_step, score_tokens
from tandem.workers.policy import token_shares


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
        config, loss = self._config, self._algorithm.value_loss
        assert loss is not None
        done: list[StepMetrics] = []
        for epoch in range(config.algorithm.epochs):
            for rows in split_groups(batch, config.algorithm.minibatches, (config.trainer.seed, step, epoch)):
                mask = batch.loss_mask & np.isin(batch.row_of_token, rows)
                weights = self._algorithm.weights(torch.from_numpy(mask), torch.from_numpy(batch.row_of_token))
                batch.tokens.weights, batch.tokens.shares = weights.numpy(), token_shares(mask)
                done.append(optimizer_step(self._engine, batch, rows, loss, config.training.tokens_per_micro_batch))
        return mean_metrics(done, "critic")
