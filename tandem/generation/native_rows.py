"""The rows that the native engine decodes, in slots: what changes with each token is in arrays, so that a step's Python
does not grow with the rows.

Suffixes: `_B` rows, `_U` groups of rows with the same tokens so far.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tandem.generation.native_sample import NativeSample
from tandem.generation.sampling import CHOICE, Array, streams
from tandem.types import BoolArray, IntArray, Status

_NO_TOKEN = -1
_ALIKE = 3
"""Rows with the same tokens so far are decoded once where they are this many on average: their keys are copied for it,
which must cost less than reading those of every row."""
_FIELDS = ("max_tokens", "watched", "streamed", "top_logprobs", "keep", "last", "position", "lag", "history")
_ROW = np.dtype([*CHOICE.descr, *((name, "i8") for name in _FIELDS)])
"""A row's state: how its next token is chosen, when it ends (`watched`: a stop string may end it), whether its caller
gets each token at once (`streamed`), how many of the most probable tokens that caller wants, whether its keys and
values are kept when it ends (`keep`), its last token, where in the KV cache that token will go, by how much the
position that is encoded differs from that (`lag`: pictures take fewer positions than tokens), and a number for the
tokens before it, the same in rows that share them."""
_MADE = np.dtype([("token", "i4"), ("logprob", "f4"), ("version", "i4")])


class DecodeBatch(NamedTuple):
    """Rows that get their next tokens together, and what is looked up about them once: as long as none of them comes or
    goes it stays as it is."""

    slots: IntArray
    state: Array
    """Of these slots, as it changes."""
    stops: IntArray
    """The tokens that end each row, `[B, most]`."""
    watched: IntArray
    """Which of these rows a stop string may end."""
    streamed: IntArray
    """Those whose callers get each token at once."""
    top: IntArray
    """Those whose callers want the most probable tokens."""


class DecodeSlots:
    """The samples that decode, in the first slots, and the state of each."""

    def __init__(self, slots: int) -> None:
        self.samples: list[NativeSample] = []
        """By slot."""
        self.state = np.zeros(slots, dtype=_ROW)
        self.made = np.zeros((slots, 0), dtype=_MADE)
        """The tokens that each row has got."""
        self._stops = np.zeros((slots, 0), dtype=np.int64)
        self._histories = slots
        """The next number for a history: those of all rows are below it."""
        self._all_differ = False
        """No two rows have the same tokens so far: nor will they, until others start."""
        self._may_be_alike = True
        """Groups of rows with the same tokens may be worth it; else one that comes or goes must change it."""
        self._unseen = 0
        """The latest tokens that histories do not know of, of every row as many."""
        self._whole: DecodeBatch | None = None
        """All rows, from one that comes or goes to the next."""

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def slots(self) -> int:
        return len(self.state)

    def start(self, groups: Sequence[list[NativeSample]]) -> None:
        """Take up the samples of these requests, those of one side by side, before their first tokens."""
        first = len(self)
        self.samples.extend(sample for group in groups for sample in group)  # first: who fails must know of them
        if self._unseen and first and not self._all_differ:
            self.state["history"][:first] = self._settled(first)[1]
        self._unseen = 0
        self._whole, self._all_differ, self._may_be_alike = None, False, True
        started, state = self.samples[first:], self.state[first : len(self)]
        requests, counts = [group[0].request for group in groups], [len(group) for group in groups]
        samplings = [request.sampling for request in requests]
        state["stream"] = streams(
            [sample.request.seeds[sample.index] for sample in started], [sample.request.made for sample in started]
        )
        state["made"], state["lag"] = 0, 0
        values = {
            **{name: [getattr(s, name) for s in samplings] for name in ("temperature", "top_k", "top_p", "max_tokens")},
            "watched": [len(sampling.stop_strings) for sampling in samplings],
            "streamed": [group[0].streamed for group in groups],
            "keep": [request.keep for request in requests],
            "top_logprobs": [request.top_logprobs for request in requests],
            "position": [len(request.token_ids) - 1 for request in requests],
            "history": self._histories + np.arange(len(groups)),
        }
        for name, of_groups in values.items():
            state[name] = np.repeat(of_groups, counts)
        self._histories += len(groups)
        stops = [sampling.stop_token_ids for sampling in samplings]
        self.made = _widened(self.made, max(values["max_tokens"]), np.zeros((), _MADE))
        self._stops = _widened(self._stops, max(map(len, stops)), _NO_TOKEN)
        padded = [(*own, *[_NO_TOKEN] * (self._stops.shape[1] - len(own))) for own in stops]
        self._stops[first : len(self)] = np.repeat(np.array(padded, dtype=np.int64), counts, axis=0)

    def batch(self, first: int) -> DecodeBatch:
        """The rows from slot `first` on."""
        if first == 0 and self._whole is not None:
            return self._whole
        own = slice(first, len(self))
        state = self.state[own]
        marked = (np.flatnonzero(state[name]) for name in ("watched", "streamed", "top_logprobs"))
        batch = DecodeBatch(np.arange(first, len(self)), state, self._stops[own], *marked)
        if first == 0:
            self._whole = batch
        return batch

    def take(self, batch: DecodeBatch, token_B: IntArray, logprob_B: Array, version: int) -> None:
        """Note the next token of each row."""
        state = batch.state
        made = state["made"]
        for name, values in (("token", token_B), ("logprob", logprob_B), ("version", version)):
            self.made[name][batch.slots, made] = values
        made += 1
        state["last"] = token_B
        state["position"] += 1

    def stopped(self, batch: DecodeBatch, tokenizer: Any) -> BoolArray:
        """Which rows their last token ends."""
        stopped_B = (batch.stops == batch.state["last"][:, None]).any(axis=1)
        for i in batch.watched.tolist():
            slot = int(batch.slots[i])
            stopped_B[i] |= self.samples[slot].ends_in_stop_string(self.of(slot)["token"], tokenizer)
        return stopped_B

    def of(self, slot: int) -> Array:
        """The tokens that a row has got."""
        return self.made[slot, : self.state["made"][slot]]

    def stream(self, batch: DecodeBatch, ended_B: BoolArray) -> None:
        """Deliver the last token of those that go on to callers that get each at once."""
        for slot in batch.slots[batch.streamed[~ended_B[batch.streamed]]].tolist():
            made = self.of(slot)
            self.samples[slot].deliver(made["token"], made["logprob"], made["version"], None)

    def deliver(self, slots: IntArray, statuses: Sequence[Status]) -> None:
        """Deliver what rows have made; rows that end in one step get views of the same arrays."""
        lengths = self.state["made"][slots].tolist()
        columns = [self.made[name][slots, : max(lengths, default=0)] for name in ("token", "logprob", "version")]
        for slot, length, status, *made in zip(slots.tolist(), lengths, statuses, *columns, strict=True):
            token_ids, logprobs, versions = (values[:length] for values in made)
            self.samples[slot].deliver(token_ids, logprobs, versions, status)

    def remove(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """Drop rows and move the last live ones into the holes: live rows stay the first slots. Returns from where to
        where they move, for what else there is of them."""
        count = len(self) - len(slots)
        holes = [slot for slot in slots if slot < count]
        movers = sorted(set(range(count, len(self))).difference(slots))
        if holes:
            for array in (self.state, self.made, self._stops):
                array[holes] = array[movers]
        for hole, mover in zip(holes, movers, strict=True):
            self.samples[hole] = self.samples[mover]
        del self.samples[count:]
        self._whole, self._may_be_alike = None, True
        return movers, holes

    def clear(self) -> None:
        """Drop all of them."""
        self.samples.clear()
        self._whole, self._unseen = None, 0

    def alike(self) -> tuple[IntArray, IntArray] | None:
        """`[U]`, a slot of each group of rows with the same tokens, and `[B]`, the group of each row; None: it is not
        worth it, which until a row comes or goes it will not be: groups only ever fall apart."""
        if self._all_differ or not self._may_be_alike:
            self._unseen += 1
            return None
        state = self.state[: len(self)]
        if self._unseen:
            slot_U, like_B = self._settled(len(self))
        else:
            words = int(state["last"].max()) + 1
            known = state["history"] * words + state["last"]
            _, slot_U, like_B = np.unique(known, return_index=True, return_inverse=True)
        self._unseen = 0
        state["history"] = like_B
        self._all_differ = len(slot_U) == len(state)
        self._may_be_alike = _ALIKE * len(slot_U) <= len(state)
        return (slot_U, like_B) if self._may_be_alike else None

    def _settled(self, rows: int) -> tuple[IntArray, IntArray]:
        """The groups of the first rows after tokens that histories do not know of, of all rows the same number."""
        state = self.state[:rows]
        places = state["made"][:, None] - np.arange(1, self._unseen + 2)
        tokens = np.take_along_axis(self.made["token"][:rows], places, axis=1)
        known = np.concatenate((state["history"][:, None], tokens), axis=1)
        _, slot_U, like_B = np.unique(known, axis=0, return_index=True, return_inverse=True)
        return slot_U, like_B.reshape(-1)  # a column in numpy 2.0


def _widened(array: Array, columns: int, fill: Any) -> Array:
    """`[slots, columns]` at least, new columns holding `fill`."""
    missing = max(0, columns - array.shape[1])
    return np.concatenate((array, np.full((len(array), missing), fill, array.dtype)), axis=1) if missing else array
