"""The plan of one of several ranks that share the tokens of a micro-batch: heads are exchanged for tokens."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from tandem.models.attention.packed_attention import PackedRows
from tandem.models.attention.pieces import Scoring
from tandem.models.mixing import StateMixer


class ScatteredRows:
    """The plan of one of several ranks that hold equal parts of the tokens, one after another.

    Heads are exchanged for tokens, so that every rank attends with its share of the heads over all of them, and back
    (Ulysses: Jacobs et al. 2023, arXiv:2309.14509).
    """

    def __init__(self, rows: PackedRows, group: ProcessGroup) -> None:
        """`rows`: of all tokens; their number and that of the heads are multiples of the group's size."""
        self._rows = rows
        self._group = group
        self.positions = rows.positions.chunk(group.size())[group.rank()]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        copies = math.lcm(key.shape[1], self._group.size()) // key.shape[1]
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        query, key, value = (self._exchange(x) for x in (query, key, value))
        if scoring.sinks is not None:
            scoring = replace(scoring, sinks=scoring.sinks.chunk(self._group.size())[self._group.rank()])
        return self._exchange(self._rows.attend(layer, query, key, value, scoring))

    def mix(self, mixer: StateMixer, hidden: Tensor) -> Tensor:
        raise NotImplementedError(f"{mixer.name} with the tokens of a row on several ranks")

    def _exchange(self, x: Tensor) -> Tensor:
        """`[1, a, b, head_dim]` to `[1, a / ranks, b * ranks, head_dim]`: heads for tokens, tokens for heads."""
        parts: Any = _Exchange.apply(x[0].unflatten(0, (self._group.size(), -1)).contiguous(), self._group)
        return parts.transpose(0, 1).flatten(1, 2)[None]


class _Exchange(Function):
    """Part i of every rank goes to rank i, as part number of its sender; so does, the other way, the gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, gradients[0].contiguous(), group=ctx.group)
        return received, None
