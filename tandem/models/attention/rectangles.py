"""Kernels of pieces that compute rectangles: segments of similar length share a call and are padded on the right.

Cpu     aten's flash kernel for CPUs, which takes and gives log-sum-exps and knows groups of heads. Its causal attention
        ends in the upper left corner, so where segments see tokens before themselves, a mask says which.
Plain   two products and a softmax, on every device and in every dtype; the only one that caps scores.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.models.attention.pieces import Part, Piece, Place, on_device
from tandem.types import BoolArray, IntArray

_MAX_PADDING = 0.25
"""How much shorter than its longest the segments of one rectangle are at most, as a share."""
_MAX_KEY_PADDING = 0.5
"""How much shorter than the longest their keys are."""
_SCORES = 2**28
"""Scores that `Plain` holds at once, where a segment has no more: a GiB in float32."""


class _Rectangles(ABC):
    """A piece as rectangles `[segments, heads, tokens, ...]`, which `_forward` and `_backward` compute."""

    def __init__(self, piece: Piece, device: torch.device) -> None:
        self.queries = on_device(piece.queries, device)
        rows = list(_similar(piece.query_lengths, piece.key_lengths, square=piece.causal))
        self._of_queries = _Padded(piece.queries, piece.query_lengths, rows, device)
        self._of_keys = _Padded(piece.keys, piece.key_lengths, rows, device)
        self._rectangles = [_Rectangle(piece, numbers, device) for numbers in rows]

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, at: "_Rectangle", scale: float) -> tuple[Tensor, Tensor]:
        """Output, and log-sum-exp `[segments, heads, queries]`."""

    @abstractmethod
    def _backward(
        self, of_queries: list[Tensor], k: Tensor, v: Tensor, at: "_Rectangle", scale: float
    ) -> Sequence[Tensor]:
        """Gradients of queries, keys and values. `of_queries`: the output's gradient, queries, output, log-sum-exp."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        outputs: list[Tensor] = []
        lses: list[Tensor] = []
        for at, (q, k, v) in self._padded([query], [key, value]):
            output, lse = self._forward(q, k, v, at, scale)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
            lses.append(lse.transpose(1, 2).flatten(0, 1))
        return self._of_queries.cut(outputs), self._of_queries.cut(lses).t()

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float
    ) -> tuple[Part, Part, Part]:
        found: list[list[Tensor]] = [[], [], []]
        for at, (*of_queries, k, v) in self._padded([grad, query, output, lse.t()[..., None]], [key, value]):
            for own, part in zip(found, self._backward(of_queries, k, v, at, scale), strict=True):
                own.append(part.transpose(1, 2).flatten(0, 1))
        of_query, of_key, of_value = (torch.cat(own) if len(own) > 1 else own[0] for own in found)
        keys = self._of_keys.places
        return (self.queries, self._of_queries.cut([of_query])), (keys, of_key), (keys, of_value)

    def _padded(self, of_queries: list[Tensor], of_keys: list[Tensor]) -> Iterator[tuple["_Rectangle", list[Tensor]]]:
        """Each rectangle with its part of the tensors. What stands for no query is 0, so are then its gradients."""
        parts = [self._of_queries.pad(x, zeros=True) for x in of_queries] + [self._of_keys.pad(x) for x in of_keys]
        for at, *own in zip(self._rectangles, *parts, strict=True):
            yield at, [x.unflatten(0, (at.segments, -1)).transpose(1, 2) for x in own]


class Cpu(_Rectangles):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Of a piece that is all there is, for autograd, which keeps rectangles rather than making them again."""
        parts = [self._of_queries.pad(query), self._of_keys.pad(key), self._of_keys.pad(value)]
        outputs: list[Tensor] = []
        for at, *own in zip(self._rectangles, *parts, strict=True):
            q, k, v = (x.unflatten(0, (at.segments, -1)).transpose(1, 2) for x in own)
            mask = at.mask(q.dtype)
            found = scaled_dot_product_attention(q, k, v, mask, is_causal=at.causal, scale=scale, enable_gqa=True)
            outputs.append(found.transpose(1, 2).flatten(0, 1))
        return self._of_queries.cut(outputs)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, at: "_Rectangle", scale: float) -> tuple[Tensor, Tensor]:
        operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return operator(q, k, v, 0.0, at.causal, attn_mask=at.mask(q.dtype), scale=scale)

    def _backward(
        self, of_queries: list[Tensor], k: Tensor, v: Tensor, at: "_Rectangle", scale: float
    ) -> Sequence[Tensor]:
        operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad, q, output, lse = of_queries
        return operator(
            grad, q, k, v, output, lse[..., 0], 0.0, at.causal, attn_mask=at.mask(q.dtype), scale=scale
        )  # fmt: skip


class Plain(_Rectangles):
    """Scores in float32 at least; `cap` as in Scoring."""

    def __init__(self, piece: Piece, device: torch.device, cap: float | None = None) -> None:
        super().__init__(piece, device)
        self._cap = cap

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, at: "_Rectangle", scale: float) -> tuple[Tensor, Tensor]:
        parts = [self._attend(*own, scale=scale) for own in self._in_parts(at, q, k, v)]
        return torch.cat([output for output, _ in parts]), torch.cat([lse for _, lse in parts])

    def _backward(
        self, of_queries: list[Tensor], k: Tensor, v: Tensor, at: "_Rectangle", scale: float
    ) -> Sequence[Tensor]:
        grad, q, output, lse = of_queries
        parts = [self._differentiate(*own, scale=scale) for own in self._in_parts(at, q, k, v, grad, output, lse)]
        return [torch.cat(gradients) for gradients in zip(*parts, strict=True)]

    def _in_parts(self, at: "_Rectangle", q: Tensor, k: Tensor, *others: Tensor) -> Iterator[Any]:
        """Of as few segments as keep the scores small: the mask, then the tensors."""
        mask = at.mask(torch.promote_types(q.dtype, torch.float32), causal=True)
        seen = q.new_zeros(len(q), 1, 1, 1) if mask is None else mask.expand(len(q), -1, -1, -1)
        count = max(1, _SCORES // (q.shape[1] * q.shape[2] * k.shape[2]))
        yield from zip(*(x.split(count) for x in (seen, q, k, *others)), strict=True)

    def _attend(self, mask: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        scores, _ = self._scores(mask, q, k, scale)
        lse = scores.logsumexp(-1)
        mixed = (scores - lse[..., None]).exp_() @ v.to(scores.dtype)[:, :, None]
        return mixed.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def _differentiate(
        self, mask: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, output: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `pieces` has it, with p = exp(s - L) and D = <dO, O>."""
        scores, slope = self._scores(mask, q, k, scale)
        grouped = [x.unflatten(1, (k.shape[1], -1)).to(scores.dtype) for x in (q, grad, output, lse)]
        q_g, grad_g, output_g, lse_g = grouped
        p = scores.sub_(lse_g).exp_()
        dp = grad_g @ v.to(p.dtype)[:, :, None].mT
        ds = dp.sub_((grad_g * output_g).sum(-1, keepdim=True)).mul_(p).mul_(slope)
        of_q = (ds @ k.to(p.dtype)[:, :, None]).flatten(1, 2)
        of_k, of_v = (ds.mT @ q_g).sum(2), (p.mT @ grad_g).sum(2)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)

    def _scores(self, mask: Tensor, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor | float]:
        """`[segments, kv_heads, queries of each, i, j]`, and their derivatives by the products of queries and keys."""
        exact = torch.promote_types(q.dtype, torch.float32)
        scores = q.unflatten(1, (k.shape[1], -1)).to(exact) @ k.to(exact)[:, :, None].mT * scale
        slope: Tensor | float = scale
        if self._cap is not None:
            bent = scores.div_(self._cap).tanh_()
            slope = bent.square().neg_().add_(1).mul_(scale)
            scores = bent.mul_(self._cap)
        return scores + mask[:, :, None], slope


class _Padded:
    """The tokens of one side of the piece as rectangles, head to tail."""

    def __init__(self, tokens: Place, lengths: IntArray, rows: list[IntArray], device: torch.device) -> None:
        starts = np.cumsum(lengths) - lengths
        longest = [int(lengths[numbers].max()) for numbers in rows]
        self._sizes = [len(numbers) * width for numbers, width in zip(rows, longest, strict=True)]
        sources: list[IntArray] = []
        reals: list[BoolArray] = []
        for numbers, width in zip(rows, longest, strict=True):
            real = np.arange(width) < lengths[numbers][:, None]
            sources.append((starts[numbers][:, None] + np.where(real, np.arange(width), 0)).ravel())
            reals.append(real.ravel())
        source, real = np.concatenate(sources), np.concatenate(reals)
        home = np.empty(int(lengths.sum()), dtype=np.int64)
        home[source[real]] = np.flatnonzero(real)
        first = tokens.start if isinstance(tokens, slice) else 0
        places = source + first if isinstance(tokens, slice) else tokens[source]
        in_order = len(places) == len(home) and bool((places == np.arange(first, first + len(places))).all())
        self.places = slice(first, first + len(places)) if in_order else torch.from_numpy(places).to(device)
        """Of all tokens, those that the rectangles hold; in the padding, the first one of the segment."""
        self._padding = None if real.all() else torch.from_numpy(np.flatnonzero(~real)).to(device)
        self._home = None if np.array_equal(home, np.arange(len(real))) else torch.from_numpy(home).to(device)

    def pad(self, x: Tensor, zeros: bool = False) -> Sequence[Tensor]:
        """`[segments * longest, ...]` of each rectangle; `zeros` in the padding."""
        padded = x[self.places] if isinstance(self.places, slice) else x.index_select(0, self.places)
        if zeros and self._padding is not None:
            padded.index_fill_(0, self._padding, 0)
        return padded.split(self._sizes)

    def cut(self, parts: list[Tensor]) -> Tensor:
        """The piece's tokens, from those of the rectangles."""
        padded = parts[0] if len(parts) == 1 else torch.cat(parts)
        return padded if self._home is None else padded.index_select(0, self._home)


class _Rectangle:
    """One call of the kernel."""

    def __init__(self, piece: Piece, numbers: IntArray, device: torch.device) -> None:
        self.segments = len(numbers)
        self._piece, self._device = piece, device
        self._queries, self._keys = piece.query_lengths[numbers], piece.key_lengths[numbers]
        self.causal = piece.causal and piece.window is None and np.array_equal(self._queries, self._keys)
        """As the kernel does it, without a mask."""
        self._all_seen = self.causal or (not piece.causal and bool((self._keys == self._keys[0]).all()))
        self._masks: dict[torch.dtype, Tensor] = {}

    def mask(self, dtype: torch.dtype, causal: bool = False) -> Tensor | None:
        """0 where a query sees a key, -inf elsewhere: `[segments, 1, queries or 1, keys]`; None: all are seen.

        `causal`: also of what the kernel would do without a mask.
        """
        if self._all_seen and not (causal and self.causal):
            return None
        if dtype not in self._masks:
            seen = self._seen()[:, None]
            self._masks[dtype] = torch.zeros(seen.shape, dtype=dtype, device=self._device).masked_fill_(
                ~seen, -torch.inf
            )
        return self._masks[dtype]

    def _seen(self) -> Tensor:
        queries, keys = (torch.from_numpy(lengths).to(self._device) for lengths in (self._queries, self._keys))
        places = torch.arange(int(self._keys.max()), device=self._device)
        seen = (places < keys[:, None])[:, None]
        if not self._piece.causal:
            return seen
        latest = (keys - queries)[:, None, None] + torch.arange(int(self._queries.max()), device=self._device)[:, None]
        seen = seen & (places <= latest)
        return seen if self._piece.window is None else seen & (places > latest - self._piece.window)


def _similar(query_lengths: IntArray, key_lengths: IntArray, square: bool) -> Iterator[IntArray]:
    """Numbers of the segments of each. `square`: those that see themselves alone are apart from the others."""
    numbers = np.arange(len(query_lengths))
    alone = query_lengths == key_lengths if square else np.zeros(len(numbers), dtype=np.bool_)
    for rest in (numbers[alone], numbers[~alone]):
        while len(rest):
            similar = query_lengths[rest] >= query_lengths[rest].max() * (1 - _MAX_PADDING)
            similar &= key_lengths[rest] >= key_lengths[rest[similar]].max() * (1 - _MAX_KEY_PADDING)
            yield rest[similar]
            rest = rest[~similar]
