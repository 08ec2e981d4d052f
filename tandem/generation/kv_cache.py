"""Keys and values of the rows that are being generated, and the attention plans that fill and read them.

Suffixes: `_N` tokens of one forward pass, `_B` rows; a row lives in a *slot* of the cache, live rows in the first ones.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from tandem.models.attention import PackedRows
from tandem.types import IntArray


class KVCache:
    """Per layer, keys and values `[slots, length, kv_heads, head_dim]`: separate tensors, each made at its first use.

    Memory is kept between calls, since page faults are most of its cost, and is zeroed when it is made: attention
    multiplies what lies beyond a row's end by zero, which must not be NaN.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.length = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, slots: int, length: int) -> None:
        """Make room for at least `slots` rows of `length` tokens; what is stored stays."""
        if slots <= self.slots and length <= self.length:
            return
        self.slots, self.length = max(slots, self.slots), max(length, self.length)
        for layer, stored in self._layers.items():
            grown = tuple(x.new_zeros(self.slots, self.length, *x.shape[2:]) for x in stored)
            for old, new in zip(stored, grown, strict=True):
                new[: old.shape[0], : old.shape[1]] = old
            self._layers[layer] = (grown[0], grown[1])

    def store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor, source: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write tokens of `[1, kv_heads, N, head_dim]`; returns the layer's whole cache.

        `places` int64: `slot * length + position` of each token to write; `source`: which of the N it is (None: all).
        """
        incoming = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        if layer not in self._layers:
            keys, values = (x.new_zeros(self.slots, self.length, *x.shape[1:]) for x in incoming)
            self._layers[layer] = (keys, values)
        for cache, x_N in zip(self._layers[layer], incoming, strict=True):
            cache.flatten(0, 1).index_copy_(0, places, x_N if source is None else x_N.index_select(0, source))
        return self._layers[layer]

    def move(self, source: IntArray, target: IntArray, length: int) -> None:
        """Copy the first `length` tokens of the slots `source` to the slots `target`."""
        for layer in self._layers.values():
            for cache in layer:
                cache[target, :length] = cache[source, :length]

    def free(self) -> None:
        """Give all memory back."""
        self.slots = self.length = 0
        self._layers.clear()


class Prefill:
    """The plan for whole prompts head to tail: causal attention, and each prompt's keys and values into its slots."""

    def __init__(
        self, cache: KVCache, offsets: IntArray, first_slot: int, samples: IntArray, device: torch.device
    ) -> None:
        """Prompt `i` is tokens `offsets[i] … offsets[i + 1]` and fills the next `samples[i]` slots."""
        self._cache = cache
        self._rows = PackedRows(offsets, device)
        prompt_B = np.repeat(np.arange(len(samples)), samples)
        length_B = np.diff(offsets)[prompt_B]
        ends_B = np.cumsum(length_B)
        position = np.arange(ends_B[-1]) - np.repeat(ends_B - length_B, length_B)
        slot = np.repeat(first_slot + np.arange(len(prompt_B)), length_B)
        self._places = torch.from_numpy(slot * cache.length + position).to(device)
        source = np.repeat(offsets[prompt_B], length_B) + position
        self._source = None if len(prompt_B) == len(samples) else torch.from_numpy(source).to(device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        self._cache.store(layer, key, value, self._places, self._source)
        return self._rows.attend(layer, query, key, value, scaling, window)


class Decode:
    """The plan for one new token in each of the first B slots."""

    def __init__(self, cache: KVCache, position_B: IntArray, device: torch.device) -> None:
        """`position_B` int64: where in its row the new token stands; the tokens before it are in the cache."""
        self._cache = cache
        self._position_B = torch.from_numpy(position_B).to(device)
        self._places = torch.from_numpy(np.arange(len(position_B)) * cache.length + position_B).to(device)
        self._shortest, self._longest = int(position_B.min()) + 1, int(position_B.max()) + 1
        self._visible: dict[int | None, tuple[int, torch.Tensor | None]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        cached = self._cache.store(layer, key, value, self._places, None)
        if window not in self._visible:
            self._visible[window] = self._see(window, query.dtype)
        start, mask = self._visible[window]
        rows, kv_heads = query.shape[2], key.shape[1]
        keys, values = (x[:rows, start : self._longest].transpose(1, 2) for x in cached)
        # All query heads of a key head attend as queries of one sequence: the keys are read once and never repeated.
        folded = query[0].unflatten(0, (kv_heads, -1)).permute(2, 0, 1, 3)
        output = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
        return output.flatten(1, 2).unsqueeze(0)

    def _see(self, window: int | None, dtype: torch.dtype) -> tuple[int, torch.Tensor | None]:
        """First cached position that any row sees, and the additive mask `[B, 1, 1, positions]` from there on."""
        start = 0 if window is None else max(0, self._shortest - window)
        if self._shortest == self._longest:
            return start, None
        behind = self._position_B[:, None] - torch.arange(start, self._longest, device=self._position_B.device)
        seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return start, mask[:, None, None]
