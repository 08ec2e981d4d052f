"""Keys and values of the rows that are being generated, and the attention plans that fill and read them.

Suffixes: `_N` tokens of one forward pass, `_B` rows; a row lives in a *slot* of the cache, live rows in the first ones.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

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
        self._slots = 0
        self._length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, slots: int, length: int) -> None:
        """Make room for at least `slots` rows of `length` tokens; what is stored stays."""
        if slots <= self._slots and length <= self._length:
            return
        self._slots, self._length = max(slots, self._slots), max(length, self._length)
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (self._grown(keys), self._grown(values))

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer whose new ones are like `key` and `value`, `[1, kv_heads, N, head_dim]`."""
        if index not in self._layers:
            keys, values = (self._grown(x.new_empty(0, x.shape[1], x.shape[3], 0)) for x in (key, value))
            self._layers[index] = (keys, values)
        return self._layers[index]

    def move(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the slots `source` to the slots `target`."""
        for layer in self._layers.values():
            for cache in layer:
                cache[target, ..., :length] = cache[source, ..., :length]

    def free(self) -> None:
        """Give all memory back."""
        self._slots = self._length = 0
        self._layers.clear()

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self._slots, *old.shape[1:3], self._length)
        new[: old.shape[0], ..., : old.shape[3]] = old
        return new


class Prefill:
    """The plan for whole prompts head to tail: causal attention, and each prompt's keys and values into its slots."""

    def __init__(
        self, cache: KVCache, offsets: IntArray, first_slot: int, prompt_B: IntArray, device: torch.device
    ) -> None:
        """Prompt `i` is tokens `offsets[i] … offsets[i + 1]`; `prompt_B` are the slots' prompts, from the first on."""
        self._cache = cache
        self._packed = PackedRows(offsets, device)
        self._slots = slice(first_slot, first_slot + len(prompt_B))
        lengths = np.diff(offsets)
        inside = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        self._token_BL = torch.from_numpy((offsets[:-1, None] + inside)[prompt_B]).to(device)
        """The token whose keys and values go to each place; beyond its end a row repeats its last one, unseen."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        for cache, new in zip(self._cache.layer(layer, key, value), (key, value), strict=True):
            cache[self._slots, ..., : self._token_BL.shape[1]] = new[0][:, self._token_BL].permute(1, 0, 3, 2)
        return self._packed.attend(layer, query, key, value, scaling, window)


class Decode:
    """The plan for one new token in each of the first B slots."""

    def __init__(self, cache: KVCache, position_B: IntArray, device: torch.device) -> None:
        """`position_B` int64: where in its row the new token stands; the tokens before it are in the cache."""
        self._cache = cache
        self._position_B = torch.from_numpy(position_B).to(device)
        self._slot_B = torch.arange(len(position_B), device=device)
        self._shortest, self._longest = int(position_B.min()) + 1, int(position_B.max()) + 1
        self._masks: dict[tuple[int | None, int], tuple[int, Tensor]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
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

    def _mask(self, window: int | None, kv_heads: int, dtype: torch.dtype) -> tuple[int, Tensor]:
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
