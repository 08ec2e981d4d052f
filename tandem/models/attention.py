"""Attention over rows that are packed head to tail, for any transformers model, in training and generation alike.

A model loaded with `attn_implementation=ATTENTION` asks the plan that is passed to its forward
(`model(..., attention_plan=plan)`) to do each layer's attention. The plan knows which tokens form a row and, in
generation, where the row's keys and values are kept; the model knows nothing of either, so nothing is padded outside
attention.

Suffixes: `_N` tokens of all rows head to tail.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tandem.types import IntArray

ATTENTION = "tandem"
"""The name of this attention among transformers' attention implementations."""


class AttentionPlan(Protocol):
    """Does the attention of every layer of one forward pass."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention within rows.

        query `[1, heads, N, head_dim]`, key and value `[1, kv_heads, N, head_dim]`, positions already encoded; `window`
        is the number of latest tokens a query may see (None: all). Returns `[1, N, heads, head_dim]`.
        """
        ...


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_plan: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if softcap is not None:
        raise NotImplementedError("attention logit soft-capping is not supported")
    layer: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_plan.attend(layer, query, key, value, scale, sliding_window), None


AttentionInterface.register(ATTENTION, _attend)


class PackedRows:
    """The plan for whole rows, no cache: rows of similar length go through one causal attention call.

    Rows are padded on the right inside a call only; causality keeps real queries from the padding keys.
    """

    def __init__(self, offsets: IntArray, device: torch.device | str = "cpu", max_padding: float = 0.25) -> None:
        """`offsets` int64 `[rows + 1]`; a call pads its rows by at most the share `max_padding` of its longest row."""
        lengths = np.diff(offsets)
        self.shapes: list[tuple[int, int]] = []
        gather: list[IntArray] = []
        home = np.empty(int(offsets[-1]), dtype=np.int64)
        filled = 0
        for rows in _buckets(lengths, max_padding):
            longest = int(lengths[rows].max())
            grid = offsets[rows][:, None] + np.arange(longest)[None, :]
            real = np.arange(longest)[None, :] < lengths[rows][:, None]
            home[grid[real]] = filled + np.flatnonzero(real)
            gather.append(np.where(real, grid, offsets[rows][:, None]).ravel())
            self.shapes.append((len(rows), longest))
            filled += grid.size
        order = np.concatenate(gather)
        in_order = len(order) == len(home) and bool((order == np.arange(len(order))).all())
        self._gather = None if in_order else torch.from_numpy(order).to(device)
        self._home = None if in_order else torch.from_numpy(home).to(device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        query_N, key_N, value_N = (self._to_buckets(x) for x in (query, key, value))
        outputs: list[torch.Tensor] = []
        start = 0
        for rows, longest in self.shapes:
            stop = start + rows * longest
            q, k, v = (x[start:stop].unflatten(0, (rows, longest)).transpose(1, 2) for x in (query_N, key_N, value_N))
            out = _causal(q, k, v, scaling, window)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            start = stop
        output_N = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return (output_N if self._home is None else output_N.index_select(0, self._home)).unsqueeze(0)

    def _to_buckets(self, x: torch.Tensor) -> torch.Tensor:
        """`[1, heads, N, head_dim]` -> `[bucketed tokens, heads, head_dim]`."""
        x_N = x[0].transpose(0, 1)
        return x_N if self._gather is None else x_N.index_select(0, self._gather)


def _buckets(lengths: IntArray, max_padding: float) -> list[IntArray]:
    """Row numbers, grouped so that no row is shorter than (1 - max_padding) of its group's longest."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[IntArray] = []
    start = 0
    while start < len(order):
        shortest = lengths[order[start]] * (1 - max_padding)
        stop = start + int(np.searchsorted(-lengths[order[start:]], -shortest, side="right"))
        groups.append(np.sort(order[start:stop]))
        start = stop
    return groups


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    length = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if window is None or length <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=grouped)
