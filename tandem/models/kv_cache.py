"""Keys and values of the rows that are being generated, and the attention plans that fill and read them.

Suffixes: `_N` tokens of one forward pass, `_B` rows, `_L` places of a row, `_M` tokens that are written, in as many
places as rows have them; a row lives in a *slot* of the cache, live rows in the first ones.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tandem.models.attention import PackedRows, Scoring
from tandem.models.mixing import SlotStates, State, StateMixer
from tandem.models.mixing.slot_states import States, stacked
from tandem.types import IntArray

_LENGTHS = 16
"""Rows are attended to over a multiple of this many tokens: shorter vectors of a CPU's kernels take 2 to 9 times as
long (MKL's products up to 12 columns, PyTorch's softmax up to 15)."""


KeysValues = dict[int, list[Tensor]]
"""By layer, keys and values of tokens that follow one another, each `[kv_heads, head_dim, tokens]`."""


class KVCache:
    """Per layer, keys and values `[slots, kv_heads, head_dim, length]`: separate tensors, each made at its first use.

    The length comes last because the products of decoding then run along contiguous memory: on CPUs about half the time
    of scaled_dot_product_attention over the usual layout. Memory is kept, as page faults are most of its cost, and made
    zero: attention multiplies what lies beyond a row's end by zero, which must not be NaN.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.length = 0
        self._layers: dict[int, list[Tensor]] = {}
        self._together: dict[int, Tensor] = {}
        """By layer, keys and values as one tensor, `[2, slots, kv_heads, head_dim, length]`, where they are of a shape:
        what `_layers` has are views of it."""
        self._seen: dict[int, tuple[tuple[int, ...], Sequence[Tensor]]] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self.states = SlotStates()
        """Of state mixers, in the same slots."""

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for caches in self._layers.values() for cache in caches)

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in all layers; 0 before any are stored, and where no layer attends."""
        held = [cache for caches in self._layers.values() for cache in caches]
        return sum(cache.nbytes // (cache.shape[0] * cache.shape[-1]) for cache in held)

    def reserve(self, slots: int, length: int) -> None:
        """From the next use of a layer on there is room for `slots` rows of `length` tokens; what is stored stays."""
        self.slots, self.length = max(slots, self.slots), max(_rounded(length), self.length)

    def forget_rows(self) -> None:
        """No row is stored any more, and how many there were and how long changes nothing: memory alone stays."""
        self.slots = self.length = 0

    def layer(self, index: int, *new: Tensor) -> list[Tensor]:
        """The keys and values of a layer whose new ones are `new`, each `[1, kv_heads, N, head_dim]`."""
        caches = self._layers.get(index) or [x.new_empty(0, x.shape[1], x.shape[3], 0) for x in new]
        slots, _, _, length = caches[0].shape
        if slots < self.slots or length < self.length:
            size = max(slots, self.slots), max(length, self.length)
            shapes = [(size[0], *x.shape[1:3], size[1]) for x in caches]
            if shapes[0] == shapes[1]:
                self._together[index] = caches[0].new_zeros(2, *shapes[0])
                grown = list(self._together[index].unbind())
            else:
                grown = [x.new_zeros(shape) for x, shape in zip(caches, shapes, strict=True)]
            for old, cache in zip(caches, grown, strict=True):
                cache[:slots, ..., :length] = old
            self._layers[index] = caches = grown
            self._seen.pop(index, None)
        return caches

    def together(self, index: int, kv_heads: int, new: Tensor) -> Tensor:
        """Keys and values of a layer as one tensor, `[2, slots, kv_heads, head_dim, length]`, where both have the
        head_dim of `new`, `[..., head_dim]`."""
        together = self._together.get(index)
        if together is None or together.shape[1] < self.slots or together.shape[-1] < self.length:
            empty = new.new_empty(1, kv_heads, 0, new.shape[-1])
            self.layer(index, empty, empty)
            together = self._together[index]
        return together

    def seen(self, index: int, together: Tensor, rows: int, start: int, end: int) -> Sequence[Tensor]:
        """Keys and values of tokens `start … end` of the first rows, `[rows * kv_heads, head_dim, tokens]` each."""
        wanted = (rows, start, end)
        known = self._seen.get(index)
        if known is None or known[0] != wanted:
            known = wanted, together[:, :rows, ..., start:end].flatten(1, 2).unbind()
            self._seen[index] = known
        return known[1]

    def mask(self, end: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What is added to the products with keys of `end` positions for the query in the last of them, and then for
        nothing: queries in other places see the same, further left. `[2 * end - 1]`."""
        known = self._masks.get((window, dtype))
        if known is None or len(known) != 2 * end - 1:
            known = torch.full((2 * end - 1,), float("-inf"), dtype=dtype, device=device)
            known[max(0, end - (window or end)) : end] = 0
            self._masks[window, dtype] = known
        return known

    def samples_that_fit(self, prompt: int, longest: int, wanted: int, others: int) -> int:
        """All of them: nobody has asked how much memory a host has."""
        return wanted

    def pages_of(self, prompt: int, longest: int, samples: int) -> int:
        """None: rows have no pages."""
        return 0

    def tokens_left(self) -> int:
        """For which there is room: nobody has asked how much memory a host has."""
        return sys.maxsize

    def start(self, first: int, prompts: Sequence[int], longest: Sequence[int], prompt_B: IntArray) -> None:
        """Rows have room already: `reserve` gives it to all slots."""

    def release(self, slots: Sequence[int], source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the slots `source` to the slots `target`."""
        for caches in self._layers.values():
            for cache in caches:
                for old, new in zip(source, target, strict=True):  # on a CPU faster than by index
                    cache[new, ..., :length] = cache[old, ..., :length]
        self.states.move(source, target)

    def prefill(self, offsets: IntArray, first: int, prompt_B: IntArray, device: torch.device) -> "Prefill":
        return Prefill(self, offsets, first, prompt_B, device)

    def extend(
        self,
        prefixes: "Sequence[Prefix | None]",
        lengths: IntArray,
        first: int,
        prompt_B: IntArray,
        device: torch.device,
    ) -> "Extend":
        return Extend(self, prefixes, lengths, first, prompt_B, device)

    def read(self, slot: int, start: int, stop: int) -> KeysValues:
        """A copy of what tokens `start … stop` of a slot have left here."""
        layers = self._layers.items()
        return {layer: [cache[slot, ..., start:stop].clone() for cache in caches] for layer, caches in layers}


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a row, as an earlier pass has computed it."""

    length: int
    """Tokens."""
    parts: Sequence[tuple[KeysValues, int]]
    """Head to tail, each with the number of its first tokens that belong to the prefix."""
    states: States | None = None
    """After its last token, of a model with state mixers."""

    def layer(self, index: int, which: int) -> Tensor:
        """Keys (`which` 0) or values (1) of a layer: `[kv_heads, head_dim, length]`."""
        own = [part[index][which][..., :count] for part, count in self.parts]
        return own[0] if len(own) == 1 else torch.cat(own, dim=-1)


class Prefill:
    """The plan for whole prompts head to tail: causal attention, and each prompt's keys and values into its slots."""

    def __init__(self, cache: KVCache, offsets: IntArray, first: int, prompt_B: IntArray, device: torch.device) -> None:
        """Prompt `i` is tokens `offsets[i] … offsets[i + 1]`; `prompt_B` are the prompts of slot `first` and on."""
        self._cache = cache
        self._packed = PackedRows(offsets, device)
        self._slots = slice(first, first + len(prompt_B))
        self._prompt_B = torch.from_numpy(prompt_B).to(device)
        lengths = np.diff(offsets)
        self.position_N = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device)
        inside = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        self._token_BL = torch.from_numpy((offsets[:-1, None] + inside)[prompt_B]).to(device)
        """The token whose keys and values go to each place; beyond its end a row repeats its last one, unseen."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        for cache, new in zip(self._cache.layer(layer, key, value), (key, value), strict=True):
            rows = new[0].transpose(0, 1).index_select(0, self._token_BL.ravel()).unflatten(0, self._token_BL.shape)
            cache[self._slots, ..., : rows.shape[1]] = rows.permute(0, 2, 3, 1)
        return self._packed.attend(layer, query, key, value, scoring)

    def mix(self, mixer: StateMixer, hidden: Tensor) -> Tensor:
        output, after = self._packed.mix_and_keep(mixer, hidden)
        self._cache.states.write(mixer, self._slots.start, after.take(self._prompt_B), self._cache.slots)
        return output


def behind_prefixes(
    prefixes: Sequence[Prefix | None], lengths: IntArray, device: torch.device
) -> tuple[PackedRows, IntArray]:
    """The rows of a pass over what follows the prefixes, of so many tokens each, and where the rows begin: first the
    prefixes that there are, which are not computed, then what follows each, or a whole prompt."""
    known = np.array([prefix is not None for prefix in prefixes])
    counts = [prefix.length for prefix in prefixes if prefix is not None]
    offsets = np.concatenate(([0], np.cumsum([*counts, *lengths])))
    prefix_of = np.concatenate((np.full(len(counts), -1), np.where(known, np.cumsum(known) - 1, -1)))
    return PackedRows(offsets, device, prefix_of, computed=len(counts)), offsets[:-1]


def states_of(prefixes: Sequence[Prefix], mixer: StateMixer) -> State:
    """A mixer's states after the prefixes, which all have them."""
    return stacked([prefix.states for prefix in prefixes if prefix.states is not None], mixer)


class Extend:
    """The plan for prompts of which some begin with a prefix: it is copied into the slots, and the rest is computed."""

    def __init__(
        self,
        cache: KVCache,
        prefixes: Sequence[Prefix | None],
        lengths: IntArray,
        first: int,
        prompt_B: IntArray,
        device: torch.device,
    ) -> None:
        """`lengths`: of the prompts' tokens after their prefixes, which are the tokens of the pass, head to tail;
        `prompt_B` are the prompts of slot `first` and on, those of a prompt side by side."""
        self._cache = cache
        self._prefixes = [prefix for prefix in prefixes if prefix is not None]
        self._first, self._prompt_B = first, torch.from_numpy(prompt_B).to(device)
        self._packed, _ = behind_prefixes(prefixes, lengths, device)
        self.position_N = self._packed.positions
        known = np.array([prefix is not None for prefix in prefixes])
        before = np.array([prefix.length if prefix is not None else 0 for prefix in prefixes])
        ends = first + np.searchsorted(prompt_B, np.arange(len(lengths)), side="right")
        starts = np.concatenate(([first], ends[:-1]))
        self._slots = [slice(start, end) for start, end in zip(starts[known], ends[known], strict=True)]
        """The slots of each prefix."""
        count_B = lengths[prompt_B]
        inside = np.arange(count_B.sum()) - np.repeat(np.cumsum(count_B) - count_B, count_B)
        written = (
            np.repeat(first + np.arange(len(prompt_B)), count_B),
            np.repeat(before[prompt_B], count_B) + inside,
            np.repeat((np.cumsum(lengths) - lengths)[prompt_B], count_B) + inside,
        )
        self._slot_M, self._place_M, self._token_M = (torch.from_numpy(values).to(device) for values in written)
        """Each slot and place that a token of the pass goes to, and that token; siblings' slots get the same ones."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        caches = self._cache.layer(layer, key, value)
        keys, values = (self._store(layer, which, caches[which], new) for which, new in enumerate((key, value)))
        return self._packed.attend(layer, query, keys, values, scoring)

    def mix(self, mixer: StateMixer, hidden: Tensor) -> Tensor:
        output, after = self._packed.mix_and_keep(mixer, hidden, states_of(self._prefixes, mixer))
        self._cache.states.write(mixer, self._first, after.take(self._prompt_B), self._cache.slots)
        return output

    def _store(self, layer: int, which: int, cache: Tensor, new: Tensor) -> Tensor:
        """Fill the slots; returns all prefixes and then the new tokens, `[1, kv_heads, tokens, head_dim]`."""
        before = [prefix.layer(layer, which) for prefix in self._prefixes]
        for slots, kept in zip(self._slots, before, strict=True):
            cache[slots, ..., : kept.shape[-1]] = kept
        cache[self._slot_M, :, :, self._place_M] = new[0].transpose(0, 1)[self._token_M]
        return torch.cat([*(kept.transpose(1, 2) for kept in before), new[0]], dim=1)[None]


class Decode:
    """The plan for one new token in each of the first B slots."""

    def __init__(self, cache: KVCache, position_B: Tensor, shortest: int, longest: int) -> None:
        """`position_B` int64 `[B]`: where in its row the new token stands; the tokens before it are in the cache.

        `shortest`, `longest`: bounds of the rows' lengths, the new token included.
        """
        self._cache = cache
        self.position_N = self._position_B = position_B
        self._shared: tuple[Tensor, Tensor] | None = None
        self._shortest, self._longest = shortest, longest
        self._end = _rounded(longest)
        self._masks: dict[tuple[int | None, int], tuple[int, Tensor]] = {}

    def share(self, slot_N: Tensor, like_B: Tensor) -> None:
        """Slot b has the same tokens as slot `slot_N[like_B[b]]`, whose one row in the pass stands for all of them."""
        self.position_N, self._shared = self._position_B.index_select(0, slot_N), (slot_N, like_B)

    @cached_property
    def _slot_B(self) -> Tensor:
        return torch.arange(len(self._position_B), device=self._position_B.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        caches = self._cache.layer(layer, key, value)
        for cache, new in zip(caches, (key, value), strict=True):
            made = new[0].transpose(0, 1)
            made_B = made.index_select(0, self._shared[1]) if self._shared else made
            if self._shortest == self._longest:
                cache[: len(made_B), ..., self._longest - 1] = made_B
            else:
                cache[self._slot_B, :, :, self._position_B] = made_B
        rows, (start, mask) = query.shape[2], self._masked(scoring.window, key.shape[1], query.dtype)
        seen = (cache[..., start : self._end] for cache in caches)
        if self._shared:
            seen = [x.index_select(0, self._shared[0]) for x in seen]
        keys, values = (x[:rows].flatten(0, 1) for x in seen)
        return _attended(query[0].transpose(0, 1), keys, values, mask, scoring)[None]

    def mix(self, mixer: StateMixer, hidden: Tensor) -> Tensor:
        return self._cache.states.decode(mixer, hidden[0], self._shared)[None]

    def attend_packed(self, layer: int, packed_N: Tensor, kv_heads: int, scoring: Scoring) -> Tensor:
        """As `attend`, `[N, heads * head_dim]`, for queries, keys and values side by side:
        `[N, heads + 2 kv_heads, head_dim]`."""
        rows, heads, head_dim = packed_N.shape
        query_N, made_N = packed_N.split_with_sizes((heads - 2 * kv_heads, 2 * kv_heads), 1)
        made_B = made_N.index_select(0, self._shared[1]) if self._shared else made_N
        slots = made_B.shape[0]
        made_B = made_B.view(slots, 2, kv_heads, head_dim)
        together = self._cache.together(layer, kv_heads, packed_N)
        if self._shortest == self._longest:
            together.select(-1, self._longest - 1).narrow(1, 0, slots).copy_(made_B.transpose(0, 1))
        else:
            together[:, self._slot_B, ..., self._position_B] = made_B
        start, mask = self._masked(scoring.window, kv_heads, packed_N.dtype)
        if self._shared:
            keys, values = together[..., start : self._end].index_select(1, self._shared[0]).flatten(1, 2).unbind()
        else:
            keys, values = self._cache.seen(layer, together, rows, start, self._end)
        return _attended(query_N, keys, values, mask, scoring).view(rows, -1)

    def _masked(self, window: int | None, kv_heads: int, dtype: torch.dtype) -> tuple[int, Tensor]:
        if (window, kv_heads) not in self._masks:
            self._masks[window, kv_heads] = self._mask(window, kv_heads, dtype)
        return self._masks[window, kv_heads]

    def _mask(self, window: int | None, kv_heads: int, dtype: torch.dtype) -> tuple[int, Tensor]:
        """The first position that any row sees, and what to add from it on to `[B * kv_heads, queries, positions]`."""
        start = max(0, self._shortest - window) // _LENGTHS * _LENGTHS if window else 0
        seen, left = self._cache.mask(self._end, window, dtype, self.position_N.device), start + self._end - 1
        if self._shortest == self._longest:
            return start, seen.narrow(0, left - (self._longest - 1), self._end - start)[None, None]
        from_position = (left - self.position_N).repeat_interleave(kv_heads)
        return start, seen.unfold(0, self._end - start, 1).index_select(0, from_position)[:, None]


def _attended(query_N: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """`[N, heads, head_dim]`; keys and values `[N * kv_heads, head_dim, tokens]`. The query heads of a key head attend
    like queries of one sequence: keys are read once and never repeated."""
    rows, heads, head_dim = query_N.shape
    queries = query_N.reshape(keys.shape[0], -1, head_dim)
    if scoring.cap is None and not _widened(keys):
        scores = torch.baddbmm(mask, queries, keys, alpha=scoring.scale)
    else:
        products = torch.bmm(queries, keys, out_dtype=torch.float32) if _widened(keys) else torch.bmm(queries, keys)
        capped = products * scoring.scale if scoring.cap is None else _capped(products, scoring.scale, scoring.cap)
        scores = capped + mask
    weights = _weights(scores, scoring.sinks).to(values.dtype)
    return torch.bmm(weights, values.transpose(1, 2)).view(rows, heads, -1)


def _widened(keys: Tensor) -> bool:
    """Whether scores are float32 though keys are not: rounded to bfloat16, the larger they are, the more they change
    what is attended to, by far more than training's kernels do. CPUs have no such product."""
    return keys.is_cuda and keys.dtype != torch.float32


def _capped(products: Tensor, scale: float, cap: float) -> Tensor:
    return cap * (products * (scale / cap)).tanh()


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax in float32, `[B * kv_heads, queries, positions]`; sinks `[heads]` take a share of it."""
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    of_rows = sinks.unflatten(0, (-1, scores.shape[1])).repeat(len(scores) * scores.shape[1] // len(sinks), 1)
    with_sinks = torch.cat((scores, of_rows[..., None].to(scores.dtype)), dim=-1)
    return with_sinks.softmax(-1, dtype=torch.float32)[..., :-1]


def _rounded(length: int) -> int:
    return -(-length // _LENGTHS) * _LENGTHS
