"""What the training roles have in common: scoring passes and optimizer steps over a batch."""

from collections.abc import Callable
from statistics import fmean

import numpy as np
import torch

from tandem.algorithms import Algorithm
from tandem.batching.packing import micro_batches, split_groups
from tandem.config.tree import TrainConfig
from tandem.training.base import TrainEngine
from tandem.types import Batch, BoolArray, FloatArray, IntArray, Outputs, StepMetrics, TokenLoss

Column = Callable[[Outputs[torch.Tensor]], torch.Tensor | None]


def score_tokens(engine: TrainEngine, batch: Batch, tokens_per_micro_batch: int, column: Column) -> FloatArray:
    """`column` of the engine's outputs, without gradient; float32 `[T]`, 0 outside `loss_mask`."""
    result = np.zeros(len(batch.response_ids), dtype=np.float32)
    packed = micro_batches(batch, np.arange(len(batch)), tokens_per_micro_batch)
    for micro_batch, outputs in zip(packed, engine.forward(packed), strict=True):
        scored = column(outputs)
        assert scored is not None
        result[micro_batch.source] = scored.float().cpu().numpy()
    return result


def optimizer_step(
    engine: TrainEngine,
    batch: Batch,
    rows: IntArray,
    loss: TokenLoss[torch.Tensor],
    tokens_per_micro_batch: int,
    prefix: str,
    seen_logprobs: FloatArray | None = None,
) -> StepMetrics:
    """One optimizer step on `rows`; `batch.tokens` holds every column that the loss reads, weights included.

    Metrics are those of the loss, `<prefix>/grad_norm` and `<prefix>/lr`. The forward passes' log-probs are left in
    `seen_logprobs` `[T]`.
    """
    packed = micro_batches(batch, rows, tokens_per_micro_batch)
    result = engine.forward_backward(packed, loss)
    for micro_batch, outputs in zip(packed, result.outputs, strict=True):
        if seen_logprobs is not None and outputs.logprobs_S is not None:
            seen_logprobs[micro_batch.source] = outputs.logprobs_S.float().cpu().numpy()
    return {**result.metrics, **{f"{prefix}/{name}": value for name, value in engine.optimizer_step().items()}}


def train_on(
    engine: TrainEngine,
    batch: Batch,
    learns_B: BoolArray,
    algorithm: Algorithm,
    loss: TokenLoss[torch.Tensor],
    config: TrainConfig,
    step: int,
    prefix: str,
    seen_logprobs: FloatArray | None = None,
) -> StepMetrics:
    """All optimizer steps of one training step; the mean of each metric over them.

    Only rows that learn are passed on; the loss is normalised over all. The cut into optimizer steps follows from the
    seed and the step, so the roles share it.
    """
    done: list[StepMetrics] = []
    row_of_token, budget = batch.row_of_token, config.training.tokens_per_micro_batch
    for epoch in range(config.algorithm.epochs):
        for rows in split_groups(batch, config.algorithm.minibatches, (config.trainer.seed, step, epoch)):
            kept = rows[learns_B[rows]]
            mask = batch.loss_mask & np.isin(row_of_token, rows)
            weights = algorithm.weights(torch.from_numpy(mask), torch.from_numpy(row_of_token))
            batch.tokens.weights = weights.numpy()
            batch.tokens.shares = token_shares(batch.loss_mask & np.isin(row_of_token, kept))
            done.append(optimizer_step(engine, batch, kept, loss, budget, prefix, seen_logprobs))
    return {name: fmean(one[name] for one in done if name in one) for one in done for name in one}


def token_shares(mask: BoolArray) -> FloatArray:
    """1 / (number of tokens in the mask) on them, 0 elsewhere."""
    return (mask / max(int(mask.sum()), 1)).astype(np.float32)
