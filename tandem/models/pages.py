"""Keys and values in pages, as a GPU has them: what they take follows the tokens that there are.

A page holds `PAGE` tokens of a row that follow one another; a table says which pages a row has. Rows with the same
prompt share the pages that it fills. Where rows lie says nothing about where their pages do, so a row moves by moving a
line of the table, and one recording of a decoding step serves rows of all lengths. Kwon et al. 2023, arXiv:2309.06180.

Page 0 is nobody's: what fills a pass up to a recorded number of rows writes there.

Suffixes: `_N` tokens of a pass, `_B` rows, `_M` tokens that are written, in as many places as rows have them.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tandem.errors import UserError
from tandem.models.attention import PackedRows, Scoring
from tandem.models.kernels import decoding
from tandem.models.kv_cache import KeysValues, Prefix, behind_prefixes, states_of
from tandem.models.mixing import SlotStates, StateMixer
from tandem.types import IntArray

PAGE = 16
"""Tokens: a row wastes half of them on average, and kernels read pages of 16 as fast as pages of 64 (H200)."""
_KEPT_FREE = 0.1
"""The share of a GPU's free memory that pages leave to others."""


class PagedCache:
    """The pages of all layers, each `[pages, PAGE, kv_heads, head_dim]`, and which of them rows have."""

    def __init__(self, device: torch.device, limit: int | None = None, admitted: int = 0) -> None:
        """`limit`: the most pages that there may be; None: what the device's free memory has room for. `admitted`: the
        pages of the longest row that another cache of this engine has taken."""
        self.admitted = admitted
        """The most pages of a row that was let in. It may come back, to go on, when less memory is free."""
        self.length = 0
        """Tokens of the longest row since no row was stored."""
        self._device = device
        self._given, self._limit = limit, limit
        self._layers: dict[int, list[Tensor]] = {}
        self._uses = np.ones(1, dtype=np.int32)
        """By page, how many rows have it; page 0 counts one for ever."""
        self._free: list[int] = []
        self._table: Tensor = torch.zeros(0, 0, dtype=torch.int32)
        self._rows = np.zeros((0, 0), dtype=np.int32)
        """The host's table, `[slots, most]`: the memory of `_table`, which is pinned where there is a GPU."""
        self.table = self._table.to(device)
        """The device's."""
        self._count = np.zeros(0, dtype=np.int64)
        """By slot, the pages that its row has."""
        self._most = np.zeros(0, dtype=np.int64)
        """By slot, the pages that its row may come to have."""
        self._changed = False
        self.states = SlotStates()
        """Of state mixers, in the same slots: they take no pages."""

    @property
    def slots(self) -> int:
        return len(self._rows)

    @property
    def pages(self) -> int:
        """That there are, whoever has them."""
        return len(self._uses)

    @property
    def place(self) -> tuple[int, ...]:
        """Changes when memory moves that a recorded step reads."""
        return self.pages, *self._rows.shape

    @property
    def nbytes(self) -> int:
        return sum(pages.nbytes for both in self._layers.values() for pages in both)

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in all layers; 0 before any are stored, and where no layer attends."""
        return self.nbytes // (self.pages * PAGE)

    @property
    def used(self) -> int:
        """Pages that rows have."""
        return self.pages - 1 - len(self._free)

    @property
    def spoken_for(self) -> int:
        """Pages that rows have or may come to have."""
        return self.used + int((self._most - self._count).sum())

    def reserve(self, slots: int, length: int) -> None:
        """There is room in the table for `slots` rows of `length` tokens, and for more, up to twice as many: a step is
        recorded anew when the table grows."""
        self.length = max(length, self.length)
        most = -(-length // PAGE)
        most = 1 << (most - 1).bit_length() if most > self._rows.shape[1] else self._rows.shape[1]
        shape = max(slots, self.slots), most
        if shape == self._rows.shape:
            return
        grown = torch.zeros(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        grown[: self.slots, : self._rows.shape[1]] = self._table
        added = shape[0] - self.slots
        self._count, self._most = (np.append(x, np.zeros(added, np.int64)) for x in (self._count, self._most))
        self._table, self._rows, self._changed = grown, grown.numpy(), True
        self.table = torch.empty(shape, dtype=torch.int32, device=self._device)

    def samples_that_fit(self, prompt: int, longest: int, wanted: int, others: int) -> int:
        """How many rows of a prompt of `prompt` tokens, each of at most `longest` tokens, can start beside all others
        and `others` pages more. UserError where not even one could if it were alone."""
        if self._unmeasured:
            return 0 if self.used or others else 1
        shared, each = prompt // PAGE, -(-longest // PAGE)
        room = max(self._most_pages() - 1, self.admitted)
        if each > room:
            raise UserError(
                f"a row of {longest:,} tokens takes {each:,} pages of {PAGE} tokens of keys and values, and there is "
                f"room for {room:,}: lower generation.max_response_tokens, or leave more of the GPU's memory free"
            )
        left = room - self.spoken_for - others - shared
        return max(0, min(wanted, left // max(1, each - shared)))

    def tokens_left(self) -> int:
        """For which there is room beside all that rows have or may come to have."""
        return 0 if self._unmeasured else max(0, self._most_pages() - 1 - self.spoken_for) * PAGE

    def pages_of(self, prompt: int, longest: int, samples: int) -> int:
        """That rows of a prompt may come to have together."""
        return prompt // PAGE + samples * (-(-longest // PAGE) - prompt // PAGE)

    @property
    def _unmeasured(self) -> bool:
        """How large pages are is not known: a row must have some first."""
        known = self._layers or self.states.nbytes
        return self._limit is None and not known and self._device.type == "cuda"

    def _most_pages(self) -> int:
        if self._limit is None:
            if self._device.type != "cuda" or not self._layers:
                return np.iinfo(np.int32).max
            free, _ = torch.cuda.mem_get_info(self._device)
            free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            # Pages that grow are copied: old and new ones are there at once.
            self._limit = int((free * (1 - _KEPT_FREE)) // (self.nbytes // self.pages)) + self.pages
        return self._limit

    def start(self, first: int, prompts: Sequence[int], longest: Sequence[int], prompt_B: IntArray) -> None:
        """Give pages to the rows from slot `first` on, whose prompts are `prompt_B` of those of `prompts` tokens; they
        come to `longest` tokens at most. Those of a prompt stand side by side."""
        counts = np.bincount(prompt_B, minlength=len(prompts)).tolist()
        groups = list(zip(prompts, longest, counts, strict=True))
        wanted = sum(tokens // PAGE + (tokens % PAGE > 0) * count for tokens, _, count in groups)
        self._make_room(wanted, self.spoken_for + sum(self.pages_of(*group) for group in groups))
        for prompt, (tokens, most, _) in enumerate(groups):
            slots = first + np.flatnonzero(prompt_B == prompt)
            shared, whole = tokens // PAGE, -(-tokens // PAGE)
            pages = self._take(shared)
            self._rows[slots, :shared] = pages
            self._uses[pages] = len(slots)
            if whole > shared:
                self._rows[slots, shared] = self._take(len(slots))
            self._count[slots], self._most[slots] = whole, -(-most // PAGE)
        self.admitted = max(self.admitted, -(-max(longest) // PAGE))
        self._changed = True

    def grow(self, position_B: IntArray) -> None:
        """Row b of the first slots has room for a token at `position_B[b]`."""
        needed = position_B // PAGE + 1
        slots = np.flatnonzero(self._count[: len(needed)] < needed)
        if len(slots):
            self._make_room(len(slots), self.spoken_for)
            self._rows[slots, self._count[slots]] = self._take(len(slots))
            self._count[slots] += 1
            self._changed = True
        if self._changed:
            self.table.copy_(self._table, non_blocking=True)  # the host changes it after the pass has been waited for
            self._changed = False

    def _take(self, wanted: int) -> IntArray:
        taken = np.array([self._free.pop() for _ in range(wanted)], dtype=np.int64)
        self._uses[taken] = 1
        return taken

    def _make_room(self, wanted: int, spoken_for: int) -> None:
        """So many pages are free. Where they must be made, there are twice as many then, but no more than `spoken_for`,
        which rows have or may come to have, or a quarter more than there were."""
        if wanted <= len(self._free):
            return
        before = self.pages
        quarter = before + before // 4
        likely = max(min(2 * before, 1 + spoken_for), quarter if self._limit is None else min(quarter, self._limit))
        after = max(before + wanted - len(self._free), likely)
        self._uses = np.append(self._uses, np.zeros(after - before, np.int32))
        self._free += range(after - 1, before - 1, -1)
        for both in self._layers.values():
            for which, pages in enumerate(both):
                both[which] = pages.new_zeros(after, *pages.shape[1:])
                both[which][:before] = pages
                del pages

    def layer(self, index: int, key: Tensor, value: Tensor) -> list[Tensor]:
        """The pages of a layer whose keys and values end in `[kv_heads, head_dim]` as these do."""
        if index not in self._layers:
            self._layers[index] = [x.new_zeros(self.pages, PAGE, *x.shape[-2:]) for x in (key, value)]
        return self._layers[index]

    def release(self, slots: Sequence[int], source: Sequence[int], target: Sequence[int], length: int) -> None:
        """The rows in `slots` end; those in the slots `source` move to the slots `target`."""
        for slot in slots:
            pages = self._rows[slot, : self._count[slot]]
            self._uses[pages] -= 1
            self._free += pages[self._uses[pages] == 0].tolist()
        for array in (self._rows, self._count, self._most):
            array[list(slots)] = 0
            array[list(target)] = array[list(source)]
            array[[slot for slot in source if slot not in target]] = 0
        self._changed = True
        self.states.move(source, target)

    def forget_rows(self) -> None:
        """No row is stored any more; memory stays. How many pages there may be is asked anew."""
        self._limit, self.length = self._given, 0
        self._free = list(range(self.pages - 1, 0, -1))
        self._uses[1:] = 0
        for array in (self._rows, self._count, self._most):
            array[:] = 0
        self._changed = True

    def read(self, slot: int, start: int, stop: int) -> KeysValues:
        """A copy of what tokens `start … stop` of a slot have left here."""
        places = torch.from_numpy(self.places(slot, start, stop)).to(self._device)
        return {
            layer: [pages.flatten(0, 1).index_select(0, places).permute(1, 2, 0).contiguous() for pages in both]
            for layer, both in self._layers.items()
        }

    def places(self, slot: int, start: int, stop: int) -> IntArray:
        """Where tokens of a row are, of all pages as one list of tokens."""
        at = np.arange(start, stop)
        return self._rows[slot, at // PAGE].astype(np.int64) * PAGE + at % PAGE

    def written(self, first: int, prompt_B: IntArray, prompts: Sequence[int]) -> tuple[IntArray, IntArray]:
        """For prompts of so many tokens: the row's token, counted over all prompts head to tail, and its place, `[M]`
        each. What siblings share is written once."""
        starts = np.cumsum([0, *prompts])
        tokens, places = [], []
        for slot, prompt in enumerate(prompt_B, first):
            alone = slot == first or prompt_B[slot - first - 1] != prompt
            begin = 0 if alone else prompts[prompt] // PAGE * PAGE
            tokens.append(starts[prompt] + np.arange(begin, prompts[prompt]))
            places.append(self.places(slot, begin, prompts[prompt]))
        return np.concatenate(tokens), np.concatenate(places)

    def prefill(self, offsets: IntArray, first: int, prompt_B: IntArray, device: torch.device) -> "PagedPrefill":
        return PagedPrefill(self, offsets, first, prompt_B, device)

    def extend(
        self, prefixes: Sequence[Prefix | None], lengths: IntArray, first: int, prompt_B: IntArray, device: torch.device
    ) -> "PagedExtend":
        return PagedExtend(self, prefixes, lengths, first, prompt_B, device)

    def decode(self, position_N: Tensor) -> "PagedDecode":
        return PagedDecode(self, position_N)


class PagedPrefill:
    """The plan for whole prompts head to tail."""

    def __init__(
        self, cache: PagedCache, offsets: IntArray, first: int, prompt_B: IntArray, device: torch.device
    ) -> None:
        """Prompt `i` is tokens `offsets[i] … offsets[i + 1]`; `prompt_B` are the prompts of slot `first` and on."""
        self._cache = cache
        self._packed = PackedRows(offsets, device)
        self.position_N = self._packed.positions
        self._first, self._prompt_B = first, torch.from_numpy(prompt_B).to(device)
        written = cache.written(first, prompt_B, np.diff(offsets).tolist())
        self._token_M, self._place_M = (torch.from_numpy(x).to(device) for x in written)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        _store(self._cache, layer, key, value, self._token_M, self._place_M)
        return self._packed.attend(layer, query, key, value, scoring)

    def mix(self, mixer: StateMixer, hidden: Tensor) -> Tensor:
        output, after = self._packed.mix_and_keep(mixer, hidden)
        self._cache.states.write(mixer, self._first, after.take(self._prompt_B), self._cache.slots)
        return output


class PagedExtend:
    """The plan for prompts of which some begin with a prefix: it is copied into pages, and the rest is computed."""

    def __init__(
        self,
        cache: PagedCache,
        prefixes: Sequence[Prefix | None],
        lengths: IntArray,
        first: int,
        prompt_B: IntArray,
        device: torch.device,
    ) -> None:
        """`lengths`: of the prompts' tokens after their prefixes, which are the tokens of the pass, head to tail."""
        self._cache = cache
        self._prefixes = [prefix for prefix in prefixes if prefix is not None]
        self._packed, begins = behind_prefixes(prefixes, lengths, device)
        self.position_N = self._packed.positions
        self._first, self._prompt_B = first, torch.from_numpy(prompt_B).to(device)
        of_prefix, of_rest = np.split(begins, [len(self._prefixes)])
        row = [rest + np.arange(length) for rest, length in zip(of_rest, lengths, strict=True)]
        known = [index for index, prefix in enumerate(prefixes) if prefix is not None]
        for index, begin, prefix in zip(known, of_prefix, self._prefixes, strict=True):
            row[index] = np.concatenate((begin + np.arange(prefix.length), row[index]))
        tokens, places = cache.written(first, prompt_B, [len(own) for own in row])
        self._token_M = torch.from_numpy(np.concatenate(row)[tokens]).to(device)
        self._place_M = torch.from_numpy(places).to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        keys, values = (
            torch.cat([*(prefix.layer(layer, which).transpose(1, 2) for prefix in self._prefixes), new[0]], dim=1)[None]
            for which, new in enumerate((key, value))
        )
        _store(self._cache, layer, keys, values, self._token_M, self._place_M)
        return self._packed.attend(layer, query, keys, values, scoring)

    def mix(self, mixer: StateMixer, hidden: Tensor) -> Tensor:
        output, after = self._packed.mix_and_keep(mixer, hidden, states_of(self._prefixes, mixer))
        self._cache.states.write(mixer, self._first, after.take(self._prompt_B), self._cache.slots)
        return output


class PagedDecode:
    """The plan for one new token in each of the first slots."""

    def __init__(self, cache: PagedCache, position_N: Tensor) -> None:
        """`position_N` int64 `[N]`: where in its row the new token stands; its page is there (`PagedCache.grow`)."""
        self._cache = cache
        self.position_N = position_N
        self._table_N = cache.table[: len(position_N)]

    @cached_property
    def place_N(self) -> Tensor:
        """Where keys and values go, int64."""
        return decoding.places(self._table_N, self.position_N, PAGE)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        made = [x[0].transpose(0, 1) for x in (key, value)]
        both = self.pages(layer, *made)
        for pages, new in zip(both, made, strict=True):
            pages.flatten(0, 1).index_copy_(0, self.place_N, new)
        return self.attend_to(both, query[0].transpose(0, 1), scoring)[None]

    def mix(self, mixer: StateMixer, hidden: Tensor) -> Tensor:
        return self._cache.states.decode(mixer, hidden[0])[None]

    def pages(self, layer: int, key: Tensor, value: Tensor) -> list[Tensor]:
        """The layer's keys and values, which end as these do."""
        return self._cache.layer(layer, key, value)

    def attend_to(self, both: list[Tensor], query_N: Tensor, scoring: Scoring) -> Tensor:
        """`[N, heads, head_dim]` of `query_N` `[N, heads, head_dim]`, whose keys and values are in their pages."""
        how = scoring.scale, scoring.window, scoring.cap, scoring.sinks
        return decoding.attend_pages(query_N, *both, self._table_N, self.position_N, *how)


def _store(cache: PagedCache, layer: int, key: Tensor, value: Tensor, token_M: Tensor, place_M: Tensor) -> None:
    """Keys and values `[1, kv_heads, tokens, head_dim]` of the tokens `token_M` into their places."""
    made = [x[0].transpose(0, 1) for x in (key, value)]
    for pages, new in zip(cache.layer(layer, *made), made, strict=True):
        pages.flatten(0, 1).index_copy_(0, place_M, new.index_select(0, token_M))
