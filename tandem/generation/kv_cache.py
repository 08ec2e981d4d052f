"""Keys and values of the rows that are being generated, and the attention plans that fill and read them.

Suffixes: `_N` tokens of one forward pass, `_B` rows; a row lives in a *slot* of the cache, live rows in the first ones.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
import torch

from tandem.models.attention import PackedRows
from tandem.types import IntArray


class KVCache:
    """Per layer, keys and values `[slots, kv_heads, head_dim, length]`: separate tensors, each made at its first use.

    The length comes last because the products of decoding then run along contiguous memory: on CPUs about half the time
    of scaled_dot_product_attention over the usual layout. Memory is kept between calls, since page faults are most of
    its cost, and is zeroed when it is made: attention multiplies what lies beyond a row's end by zero, which must not
    be NaN.
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
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (self._grown(keys), self._grown(values))

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer whose new ones are like `key` and `value`, `[1, kv_heads, N, head_dim]`."""
        if index not in self._layers:
            empty = (x.new_empty(0, x.shape[1], x.shape[3], 0) for x in (key, value))
            keys, values = (self._grown(x) for x in empty)
            self._layers[index] = (keys, values)
        return self._layers[index]

    def move(self, source: IntArray, target: IntArray, length: int) -> None:
        """Copy the first `length` tokens of the slots `source` to the slots `target`."""
        for layer in self._layers.values():
            for cache in layer:
                cache[target, ..., :length] = cache[source, ..., :length]

    def free(self) -> None:
        """Give all memory back."""
        self.slots = self.length = 0
        self._layers.clear()

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros(self.slots, *old.shape[1:3], self.length)
        new[: old.shape[0], ..., : old.shape[3]] = old
        return new


class Prefill:
    """The plan for whole prompts head to tail: causal attention, and each prompt's keys and values into its slots."""

    def __init__(
        self, cache: KVCache, offsets: IntArray, first_slot: int, samples: IntArray, device: torch.device
    ) -> None:
        """Prompt `i` is tokens `offsets[i] … offsets[i + 1]` and fills the next `samples[i]` slots."""
        self._cache = cache
        self._packed = PackedRows(offsets, device)
        self._runs: list[tuple[int, slice, slice]] = []
        """Neighbours of one length and number of samples, which are copied at once: prompts, their tokens and slots."""
        token, slot = 0, first_slot
        for (length, copies), run in groupby(zip(np.diff(offsets).tolist(), samples.tolist(), strict=True)):
            prompts = len(list(run))
            tokens, slots = slice(token, token + prompts * length), slice(slot, slot + prompts * copies)
            self._runs.append((prompts, tokens, slots))
            token, slot = tokens.stop, slots.stop

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        for cache, new in zip(self._cache.layer(layer, key, value), (key, value), strict=True):
            for prompts, tokens, slots in self._runs:
                rows = new[0, :, tokens].unflatten(1, (prompts, -1)).permute(1, 0, 3, 2)
                cache[slots].unflatten(0, (prompts, -1))[..., : rows.shape[-1]] = rows[:, None]
        return self._packed.attend(layer, query, key, value, scaling, window)


class Decode:
    """The plan for one new token in each of the first B slots."""

    def __init__(self, cache: KVCache, position_B: IntArray, device: torch.device) -> None:
        """`position_B` int64: where in its row the new token stands; the tokens before it are in the cache."""
        self._cache = cache
        self._position_B = torch.from_numpy(position_B).to(device)
        self._slot_B = torch.arange(len(position_B), device=device)
        self._shortest, self._longest = int(position_B.min()) + 1, int(position_B.max()) + 1
        self._masks: dict[tuple[int | None, int], tuple[int, torch.Tensor]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        caches = self._cache.layer(layer, key, value)
        for cache, new in zip(caches, (key, value), strict=True):
            cache[self._slot_B, :, :, self._position_B] = new[0].transpose(0, 1)
        _, heads, rows, head_dim = query.shape
        kv_heads = key.shape[1]
        if (window, kv_heads) not in self._masks:
            self._masks[window, kv_heads] = self._mask(window, kv_heads, query.dtype)
        start, mask = self._masks[window, kv_heads]
        keys, values = (cache[:rows, ..., start : self._longest].flatten(0, 1) for cache in caches)
        # The query heads of a key head attend like queries of one sequence: keys are read once and never repeated.
        queries = query[0].transpose(0, 1).reshape(rows * kv_heads, heads // kv_heads, head_dim)
        scores = torch.baddbmm(mask, queries, keys, alpha=scaling)
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        output = torch.bmm(values, weights.transpose(1, 2))
        return output.transpose(1, 2).reshape(1, rows, heads, -1)

    def _mask(self, window: int | None, kv_heads: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """First cached position that any row sees, and what to add to the scores of the positions from there on.

        The mask broadcasts to `[B * kv_heads, queries, positions]`.
        """
        start = 0 if window is None else max(0, self._shortest - window)
        device = self._position_B.device
        if self._shortest == self._longest:
            return start, torch.zeros(1, 1, 1, dtype=dtype, device=device)
        behind = self._position_B[:, None] - torch.arange(start, self._longest, device=device)
        hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        return start, mask.repeat_interleave(kv_heads, 0)[:, None]
