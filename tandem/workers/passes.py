"""What the training roles have in common: scoring passes and optimizer steps over a batch."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tandem.batching import micro_batches
from tandem.training.base import TrainEngine
from tandem.types import Batch, FloatArray, IntArray, Outputs, StepMetrics, TokenLoss

Column = Callable[[Outputs[torch.Tensor]], torch.Tensor | None]


def score_tokens(engine: TrainEngine, batch: Batch, tokens_per_micro_batch: int, column: Column) -> FloatArray:
    """`column` of the engine's outputs, without gradient; float32 `[T]`, 0 outside `loss_mask`."""
    result = np.zeros(len(batch.response_ids), dtype=np.float32)
    for micro_batch in micro_batches(batch, np.arange(len(batch)), tokens_per_micro_batch):
        scored = column(engine.forward(micro_batch))
        assert scored is not None
        result[micro_batch.source] = scored.float().cpu().numpy()
    return result


def optimizer_step(
    engine: TrainEngine,
    batch: Batch,
    rows: IntArray,
    loss: TokenLoss[torch.Tensor],
    tokens_per_micro_batch: int,
    seen_logprobs: FloatArray | None = None,
) -> StepMetrics:
    """One optimizer step on `rows`; `batch.tokens` holds every column that the loss reads, weights included.

    Metrics are those of the loss, then `grad_norm` and `lr`. The log-probs of the forward pass are left in
    `seen_logprobs` `[T]`.
    """
    sums: dict[str, float] = defaultdict(float)
    for micro_batch in micro_batches(batch, rows, tokens_per_micro_batch):
        result = engine.forward_backward(micro_batch, loss)
        for name, value in result.metrics.items():
            sums[name] += value
        if seen_logprobs is not None and result.outputs.logprobs_S is not None:
            seen_logprobs[micro_batch.source] = result.outputs.logprobs_S.float().cpu().numpy()
    return {**sums, **engine.optimizer_step()}


def mean_metrics(steps: Sequence[StepMetrics], prefix: str) -> StepMetrics:
    """The mean of each metric over the optimizer steps of a training step; bare names get `prefix`."""
    named: dict[str, list[float]] = defaultdict(list)
    for metrics in steps:
        for name, value in metrics.items():
            named[name if "/" in name else f"{prefix}/{name}"].append(value)
    return {name: sum(values) / len(values) for name, values in named.items()}
