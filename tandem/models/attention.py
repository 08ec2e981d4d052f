"""Attention over rows that are packed head to tail, for any transformers model, in training and generation alike.

A model loaded with `attn_implementation=ATTENTION` asks the plan that is passed to its forward
(`model(..., attention_plan=plan)`) to do each layer's attention. The plan knows which tokens form a row and, in
generation, where the row's keys and values are kept; the model knows neither, so nothing is padded outside attention.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tandem.types import IntArray

ATTENTION = "tandem"
"""The name of this attention among transformers' attention implementations."""
_MAX_PADDING = 0.25
"""Rows that go through one attention call are shorter than its longest by at most this share."""


class AttentionPlan(Protocol):
    """Does the attention of every layer of one forward pass."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Causal attention within rows: `[1, N, heads, head_dim]`.

        query `[1, heads, N, head_dim]`, key and value `[1, kv_heads, N, head_dim]`, positions already encoded; `window`
        is the number of latest tokens a query may see (None: all).
        """
        ...


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_plan: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if softcap is not None:
        raise NotImplementedError("attention logit soft-capping is not supported")
    layer: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_plan.attend(layer, query, key, value, scale, sliding_window), None


AttentionInterface.register(ATTENTION, _attend)


class PackedRows:
    """The plan for whole rows, no cache: rows of similar length, a *bucket*, go through one causal attention call.

    Rows are padded on the right inside a call only; causality keeps real queries from the padding keys.
    """

    def __init__(self, offsets: IntArray, device: torch.device | str = "cpu") -> None:
        """`offsets`: int64 `[rows + 1]`."""
        lengths = np.diff(offsets)
        self._shapes: list[tuple[int, int]] = []
        gather: list[IntArray] = []
        home = np.empty(int(offsets[-1]), dtype=np.int64)
        filled = 0
        for rows in _buckets(lengths):
            longest = int(lengths[rows].max())
            grid = offsets[rows][:, None] + np.arange(longest)
            real = np.arange(longest) < lengths[rows][:, None]
            home[grid[real]] = filled + np.flatnonzero(real)
            gather.append(np.where(real, grid, grid[:, :1]).ravel())
            self._shapes.append((len(rows), longest))
            filled += grid.size
        order = np.concatenate(gather)
        in_order = np.array_equal(order, np.arange(len(home)))
        self._gather = None if in_order else torch.from_numpy(order).to(device)
        self._home = None if in_order else torch.from_numpy(home).to(device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        inputs_N = [_take(x[0].transpose(0, 1), self._gather) for x in (query, key, value)]
        outputs: list[Tensor] = []
        start = 0
        for rows, longest in self._shapes:
            stop = start + rows * longest
            q, k, v = (x_N[start:stop].unflatten(0, (rows, longest)).transpose(1, 2) for x_N in inputs_N)
            outputs.append(_causal(q, k, v, scaling, window).transpose(1, 2).flatten(0, 1))
            start = stop
        output_N = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _take(output_N, self._home)[None]


def _take(x_N: Tensor, order: Tensor | None) -> Tensor:
    return x_N if order is None else x_N.index_select(0, order)


def _buckets(lengths: IntArray) -> list[IntArray]:
    """Row numbers of each bucket."""
    order = np.argsort(-lengths, kind="stable")
    shortest = lengths[order] * (1 - _MAX_PADDING)
    buckets: list[IntArray] = []
    start = 0
    while start < len(order):
        stop = int(np.searchsorted(-lengths[order], -shortest[start], side="right"))
        buckets.append(np.sort(order[start:stop]))
        start = stop
    return buckets


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    length = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if window is None or length <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return scaled_dot_product_attention(query, key, value, seen, scale=scaling, enable_gqa=grouped)
