"""Attention over rows that are packed head to tail, for any transformers model, in training and generation alike.

A model loaded with `attn_implementation=ATTENTION` asks the plan that is passed to its forward
(`model(..., attention_plan=plan)`) to do each layer's attention. The plan knows which tokens form a row and, in
generation, where the row's keys and values are kept; the model knows neither, so nothing is padded outside attention.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tandem.types import IntArray

ATTENTION = "tandem"
"""The name of this attention among transformers' attention implementations."""
_MAX_PADDING = 0.25  # how much shorter than its longest the rows in one attention call are at most, as a share
_MAX_PREFIX_PADDING = 0.5  # how much shorter than the longest their prefixes are


class AttentionPlan(Protocol):
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Causal attention within rows: `[1, N, heads, head_dim]`.

        query `[1, heads, N, head_dim]`, key and value `[1, kv_heads, N, head_dim]`, positions already encoded; `window`
        is the number of latest tokens a query may see (None: all).
        """
        ...


HARMLESS = {
    "position_ids": "queries and keys have their positions already, and the plan knows the order within a row",
    "use_cache": "the plan keeps keys and values, transformers' cache is never made",
    "return_dict": "it is about what the model returns, not about attention",
    "logits_to_keep": "it is about the output layer",
    "output_router_logits": "it is about the experts",
    "output_attentions": "weights are never returned, which the model says where it needs them",
}
"""Arguments that models hand down to attention although attention does not depend on them, each with the reason."""


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_plan: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' layers call. NotImplementedError for an argument that would change what attention computes."""
    refuse_arguments({"attention_mask": attention_mask, **others})
    if dropout or is_causal is False:
        raise NotImplementedError(f"attention with dropout {dropout}, is_causal {is_causal} is not what ours computes")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_plan.attend(module.layer_idx, query, key, value, scale, sliding_window), None


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """NotImplementedError where one is neither None nor harmless: leaving it out would give wrong numbers."""
    if unknown := [name for name, value in arguments.items() if value is not None and name not in HARMLESS]:
        raise NotImplementedError(f"attention with {', '.join(unknown)} is not what ours computes")


AttentionInterface.register(ATTENTION, _attend)


class PackedRows:
    """The plan for segments head to tail, no cache: those of similar length go through one attention call.

    A segment may continue another, its prefix, whose keys stand before its own. Inside a call prefixes are padded on
    the left and segments on the right; causality keeps queries from the padding on the right, a mask from the rest.
    """

    def __init__(
        self, offsets: IntArray, device: torch.device | str = "cpu", prefixes: IntArray | None = None, computed: int = 0
    ) -> None:
        """`offsets`: int64 `[segments + 1]`; `prefixes`: int64 `[segments]`, as in MicroBatch (None: no prefixes).

        `computed`: the first so many segments are prefixes that an earlier pass has computed. They are tokens of key
        and value alone: queries and positions are of the segments after them.
        """
        starts, lengths = offsets[:-1], np.diff(offsets)
        first = int(offsets[computed])
        prefixes = np.full(len(lengths), -1) if prefixes is None else prefixes
        before = np.where(prefixes < 0, 0, lengths[prefixes])
        positions = np.arange(offsets[-1]) - np.repeat(starts - before, lengths)
        self.positions = torch.from_numpy(positions[first:]).to(device)
        """int64 `[N]`: how many tokens each sees before itself."""
        home = np.empty(int(offsets[-1]) - first, dtype=np.int64)
        queries: list[IntArray] = []
        keys: list[IntArray] = []
        self._calls: list[_Call] = []
        filled = 0
        for rows in _buckets(lengths, before, computed):
            longest, seen = int(lengths[rows].max()), int(before[rows].max())
            real = np.arange(longest) < lengths[rows][:, None]
            own = starts[rows][:, None] + np.where(real, np.arange(longest), 0)
            home[own[real] - first] = filled + np.flatnonzero(real)
            filled += own.size
            gap = seen - before[rows]
            earlier = starts[prefixes[rows]][:, None] + np.maximum(np.arange(seen) - gap[:, None], 0)
            queries.append(own.ravel() - first)
            keys.append(np.concatenate((earlier, own), axis=1).ravel())
            self._calls.append(_Call(len(rows), longest, seen, torch.from_numpy(gap).to(device)))
        orders = (np.concatenate(queries), np.concatenate(keys), home)
        self._queries, self._keys, self._home = (torch.from_numpy(order).to(device) for order in orders)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        query_N = query[0].transpose(0, 1).index_select(0, self._queries)
        key_N, value_N = (x[0].transpose(0, 1).index_select(0, self._keys) for x in (key, value))
        own = [call.rows * call.longest for call in self._calls]
        all_seen = [call.rows * (call.seen + call.longest) for call in self._calls]
        parts = zip(self._calls, query_N.split(own), key_N.split(all_seen), value_N.split(all_seen), strict=True)
        outputs = [call.attend(q, k, v, scaling, window) for call, q, k, v in parts]
        return torch.cat(outputs).index_select(0, self._home)[None]


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

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        copies = math.lcm(key.shape[1], self._group.size()) // key.shape[1]
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        query, key, value = (self._exchange(x) for x in (query, key, value))
        return self._exchange(self._rows.attend(layer, query, key, value, scaling, window))

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


@dataclass(slots=True)
class _Call:
    """One attention call: `rows` segments of at most `longest` tokens that see up to `seen` tokens before them."""

    rows: int
    longest: int
    seen: int
    gap: Tensor
    """int64 `[rows]`: by how many tokens a prefix is shorter than `seen`."""
    masks: dict[int | None, Tensor] = field(default_factory=dict[int | None, Tensor])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (query, key, value))
        causal = self.seen == 0 and (window is None or self.longest <= window)
        mask = None if causal else self._mask(window)
        output = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        """bool `[rows, 1, longest, seen + longest]`: which keys each query sees."""
        if window not in self.masks:
            places = torch.arange(self.seen + self.longest, device=self.gap.device)
            behind = places[self.seen :, None] - places
            seen = (behind >= 0) & (behind < window) if window is not None else behind >= 0
            self.masks[window] = (seen & (places >= self.gap[:, None])[:, None])[:, None]
        return self.masks[window]


def _buckets(lengths: IntArray, before: IntArray, computed: int) -> Iterator[IntArray]:
    """Numbers of the segments of each call: of similar length, and either all with a prefix or all without.

    Those that were computed have no queries; where there are any, prefixes that go together are of similar length too,
    for they are the most of a conversation's tokens.
    """
    numbers = np.arange(computed, len(lengths))
    for rest in (numbers[before[computed:] == 0], numbers[before[computed:] > 0]):
        while len(rest):
            similar = lengths[rest] >= lengths[rest].max() * (1 - _MAX_PADDING)
            if computed:
                similar &= before[rest] >= before[rest[similar]].max() * (1 - _MAX_PREFIX_PADDING)
            yield rest[similar]
            rest = rest[~similar]
