"""The kernel that computes pieces on a GPU, and the one that all others are held to.

Flash       aten's `_flash_attention_forward` and `_backward`: FlashAttention 2, or 3 and 4 where torch is told to use
            them (`torch.nn.attention.activate_flash_attention_impl`); CUDA, bfloat16 and float16.
Reference   a segment at a time, as the equations say it.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.models.attention.pieces import Part, Piece, on_device
from tandem.types import IntArray


class Flash:
    """A call of `_flash_attention_forward`, in which causal attention ends in the lower right corner."""

    def __init__(self, piece: Piece, device: torch.device) -> None:
        self.queries = on_device(piece.queries, device)
        self._keys = on_device(piece.keys, device)
        bounds = (np.append(0, lengths.cumsum()) for lengths in (piece.query_lengths, piece.key_lengths))
        starts = [torch.from_numpy(bound.astype(np.int32)).to(device) for bound in bounds]
        self._bounds = (*starts, int(piece.query_lengths.max()), int(piece.key_lengths.max()))
        self._causal = piece.causal and piece.window is None
        left = -1 if piece.window is None else piece.window - 1
        self._window = {"window_size_left": left, "window_size_right": 0 if piece.causal else -1}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        operator: Any = torch.ops.aten._flash_attention_forward
        sides = query[self.queries], key[self._keys], value[self._keys]
        output, lse, *_ = operator(*sides, *self._bounds, 0.0, self._causal, False, scale=scale, **self._window)
        return output, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float
    ) -> tuple[Part, Part, Part]:
        operator: Any = torch.ops.aten._flash_attention_backward
        at, seen = self.queries, self._keys
        no_dropout = torch.empty(2, dtype=torch.uint64, device=query.device)
        gradients = operator(
            grad[at],
            query[at],
            key[seen],
            value[seen],
            output[at],
            lse[:, at].contiguous(),
            *self._bounds,
            0.0,
            self._causal,
            no_dropout,
            no_dropout[:0],
            scale=scale,
            **self._window,
        )
        return (at, gradients[0]), (seen, gradients[1]), (seen, gradients[2])


class ReferenceKernel:
    """Scores and sums in float32 at least."""

    def __init__(self, piece: Piece, device: torch.device) -> None:
        self.queries = on_device(piece.queries, device)
        self._keys = on_device(piece.keys, device)
        self._piece = piece
        self._spans = list(zip(_spans(piece.query_lengths), _spans(piece.key_lengths), strict=True))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        query, key, value = query[self.queries], key[self._keys], value[self._keys]
        exact = torch.promote_types(query.dtype, torch.float32)
        output = torch.empty_like(query)
        lse = query.new_empty(query.shape[1], query.shape[0], dtype=exact)
        for i, j in self._spans:
            scores = self._scores(query[i], key[j], scale)
            lse[:, i] = scores.logsumexp(-1).flatten(0, 1)
            mixed = torch.einsum("kgij,jkd->ikgd", scores.softmax(-1), value[j].to(exact))
            output[i] = mixed.flatten(1, 2).to(query.dtype)
        return output, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float
    ) -> tuple[Part, Part, Part]:
        at, seen = self.queries, self._keys
        grad, query, output, lse = grad[at], query[at], output[at], lse[:, at]
        key, value = key[seen], value[seen]
        exact = torch.promote_types(query.dtype, torch.float32)
        of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
        delta = (grad.to(exact) * output.to(exact)).sum(-1).t()
        for i, j in self._spans:
            heads = (key.shape[1], -1)
            p = (self._scores(query[i], key[j], scale) - lse[:, i].unflatten(0, heads)[..., None]).exp()
            grad_i, query_i = (x[i].to(exact).unflatten(1, heads) for x in (grad, query))
            dp = torch.einsum("ikgd,jkd->kgij", grad_i, value[j].to(exact))
            ds = p * (dp - delta[:, i].unflatten(0, heads)[..., None]) * scale
            of_value[j] = torch.einsum("kgij,ikgd->jkd", p, grad_i).to(value.dtype)
            of_query[i] = torch.einsum("kgij,jkd->ikgd", ds, key[j].to(exact)).flatten(1, 2).to(query.dtype)
            of_key[j] = torch.einsum("kgij,ikgd->jkd", ds, query_i).to(key.dtype)
        return (at, of_query), (seen, of_key), (seen, of_value)

    def _scores(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """`[kv_heads, queries of each, i, j]`."""
        exact = torch.promote_types(query.dtype, torch.float32)
        grouped = query.to(exact).unflatten(1, (key.shape[1], -1))
        scores = torch.einsum("ikgd,jkd->kgij", grouped, key.to(exact)) * scale
        if not self._piece.causal:
            return scores
        places = torch.arange(len(key), device=query.device)
        behind = places[len(key) - len(query) :, None] - places
        return scores.masked_fill((behind < 0) | (behind >= (self._piece.window or len(key))), -torch.inf)


def _spans(lengths: IntArray) -> Iterator[slice]:
    return (slice(*ends) for ends in pairwise([0, *lengths.cumsum().tolist()]))
