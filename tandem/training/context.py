"""Context parallelism: the ranks of a group get the same micro-batches, share their tokens, and answer alike.

    MicroBatch --local_part--> this rank's tokens --> hidden states --> its predicted tokens --gather--> those of all

Rank layout: `rank = data * context_parallel + context`.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from tandem.errors import UserError
from tandem.models.attention import PackedRows, ScatteredRows
from tandem.training.base import LossResult
from tandem.training.head import Columns, ValueHead, VocabularyHead, differentiate
from tandem.training.tiled_head import TiledVocabularyHead
from tandem.types import IntArray, MicroBatch, Outputs, TokenColumns, TokenLoss

Head = VocabularyHead | TiledVocabularyHead | ValueHead


@dataclass(frozen=True, slots=True)
class LocalMicroBatch:
    """A rank's part of a micro-batch. `_S` here: the predicted tokens that are this rank's."""

    token_ids: IntArray
    plan: PackedRows | ScatteredRows
    predicted_at: Tensor
    """int64 `[S]`: places among the part's tokens."""
    targets: Tensor
    """int64 `[S]`."""
    mine: Tensor
    """int64 `[S]`: places among the micro-batch's predicted tokens."""
    columns: Columns
    """The columns of all the micro-batch's predicted tokens."""
    size: int
    """How many predicted tokens the whole micro-batch has."""
    whole: MicroBatch
    """Of all ranks: where pictures stand is told by its segments."""


class ContextParallel:
    """The context-parallel group of this rank."""

    def __init__(self, ranks: int, model: PreTrainedConfig) -> None:
        """Every rank of torch.distributed calls it together."""
        self._ranks = ranks
        self._rank = 0
        self._group = None
        if ranks == 1:
            return
        heads = model.get_text_config().num_attention_heads
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world % ranks or heads % ranks:
            raise UserError(
                f"training.context_parallel: groups of {ranks} cannot share {world} ranks or {heads} attention heads "
                "evenly; use a divisor of both"
            )
        groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        self._rank = dist.get_rank() % ranks
        self._group: Any = groups[dist.get_rank() // ranks]

    def local_part(self, micro_batch: MicroBatch, device: torch.device) -> LocalMicroBatch:
        """Equal numbers of tokens; what is missing for that stands at the end, as a segment of its own."""
        tokens, offsets, prefixes = micro_batch.token_ids, micro_batch.offsets, micro_batch.prefixes
        if padding := -len(tokens) % self._ranks:
            tokens = np.pad(tokens, (0, padding))
            offsets, prefixes = np.append(offsets, len(tokens)), np.append(prefixes, -1)
        rows, share = PackedRows(offsets, device, prefixes), len(tokens) // self._ranks
        start = share * self._rank
        mine = np.flatnonzero((micro_batch.predicted_at >= start) & (micro_batch.predicted_at < start + share))

        def on_device(array: np.ndarray[Any, Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        return LocalMicroBatch(
            token_ids=tokens[start : start + share],
            plan=rows if self._group is None else ScatteredRows(rows, self._group),
            predicted_at=on_device(micro_batch.predicted_at[mine] - start),
            targets=on_device(micro_batch.targets[mine].astype(np.int64)),
            mine=on_device(mine),
            columns=micro_batch.columns.map(on_device),
            size=len(micro_batch.predicted_at),
            whole=micro_batch,
        )

    def gather(self, part: LocalMicroBatch, outputs: Outputs[Tensor]) -> Outputs[Tensor]:
        """The outputs for all of the micro-batch's predicted tokens, from those for this rank's."""
        if self._group is None:
            return outputs

        def whole(column: Tensor) -> Tensor:
            everyones = column.new_zeros(part.size, *column.shape[1:]).index_copy(0, part.mine, column)
            dist.all_reduce(everyones, group=self._group)
            return everyones

        return outputs.map(whole)

    def backward(
        self, head: Head, part: LocalMicroBatch, hidden_S: Tensor, targets_S: Tensor, loss: TokenLoss[Tensor]
    ) -> LossResult:
        """The head's `backward`; each token's loss and metrics are counted by one rank of the group."""
        if self._group is None:
            return head.backward(hidden_S, targets_S, part.columns, loss)
        columns = part.columns.map(lambda column: column[part.mine])
        if loss.token_local or part.size == 0:  # no loss is asked about no tokens
            result = head.backward(hidden_S, targets_S, columns, loss)
            return replace(result, outputs=self.gather(part, result.outputs))
        with torch.no_grad():
            outputs = self.gather(part, head.forward(hidden_S, targets_S))
        outputs.squared_probs_S = None  # no loss reads it
        value, metrics, gradients = differentiate(loss, outputs, part.columns)
        own_gradients = gradients.map(lambda column: column[part.mine])
        head.backward(hidden_S, targets_S, _gradient_columns(own_gradients), _LinearLoss())
        return LossResult.of([(value, metrics)] if self._rank == 0 else [], outputs)


def _gradient_columns(gradients: Outputs[Tensor]) -> Columns:
    return TokenColumns(loss_weights=gradients.logprobs_S, shares=gradients.entropy_S, values=gradients.values_S)


class _LinearLoss:
    """gradient * output, summed: the loss that has the derivatives of another one, given by `_gradient_columns`."""

    token_local = True

    def __call__(self, outputs: Outputs[Tensor], columns: Columns) -> tuple[Tensor, dict[str, Tensor]]:
        gradients = (columns.loss_weights, columns.shares, columns.values)
        values = (outputs.logprobs_S, outputs.entropy_S, outputs.values_S)
        terms = [
            (gradient * value).sum()
            for gradient, value in zip(gradients, values, strict=True)
            if gradient is not None and value is not None
        ]
        return torch.stack(terms).sum(), {}
