"""Packed rows as calls of a state mixer: the state after a segment is computed once and given to all that continue it.

Calls follow one another level by level: first the segments that continue nothing, then those that continue these, and
so on. A call is a rectangle of rows:

    rows whose final states nobody wants    padded on the right
    rows that begin                         padded on the left: a state of zeros stays one, so outputs and final states
                                            are exact but for rounding (decays are summed up over a chunk of tokens)
    rows that go on                         of one length: padding would decay their states

A segment of one token that goes on gives no state: the form of a mixer for one token overwrites the state before it,
which is no function to differentiate. What continues it computes that token again.

Suffixes: `_N` tokens of the pass, `_B` rows of a call, `_T` places of a row, `_R` places of all rows of a call.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.models.mixing.mixer import State, StateMixer, joined
from tandem.types import IntArray

_MAX_PADDING, _MAX_LEFT_PADDING = 0.5, 0.25
"""Of the width of a rectangle."""
_SHORTEST = 2
"""Tokens of a row that goes on, lest it takes the form for one token."""


class MixedRows:
    """The calls for segments head to tail, made once and used for every layer."""

    def __init__(
        self,
        offsets: IntArray,
        prefixes: IntArray,
        device: torch.device,
        computed: int = 0,
        *,
        keeps_states: bool = False,
    ) -> None:
        """`offsets`, `prefixes` and `computed` as in PackedRows; the states after the first `computed` are given.

        `keeps_states`: the states after all segments that are computed are wanted, and no gradients.
        """
        plan = _Plan(offsets, prefixes, computed, keeps_states)
        self._calls = [call.on(device) for call in plan.calls]
        order = np.concatenate([call.own_N for call in plan.calls])
        self._home_N = _inverse(order, device)
        kept = np.array([segment for call in plan.calls for segment in call.kept], dtype=np.int64)
        self._kept = _inverse(kept - computed, device) if keeps_states else None

    def run(self, mixer: StateMixer, hidden_N: Tensor, given: State | None = None) -> tuple[Tensor, State | None]:
        """Outputs `[N, hidden]`, and the states after each segment where they are wanted.

        `given`: after those that are computed already, in their order.
        """
        banks = [] if given is None else [given]
        first, outputs = len(banks), list[Tensor]()
        for call in self._calls:
            x_BT = hidden_N.index_select(0, call.token_R).unflatten(0, (call.rows, -1))
            before = joined([banks[bank] for bank in call.banks]).take(call.before_B) if call.banks else None
            y_BT, after = mixer(x_BT, before, call.real_BT)
            outputs.append(y_BT.flatten(0, 1).index_select(0, call.own_R))
            if call.keeps:
                banks.append(after)
        output_N = torch.cat(outputs).index_select(0, self._home_N)
        return output_N, None if self._kept is None else joined(banks[first:]).take(self._kept)


class _Call(NamedTuple):
    """A call on its device."""

    rows: int
    token_R: Tensor
    """Which token stands in each place; any in the padding."""
    real_BT: Tensor | None
    own_R: Tensor
    """The places whose outputs are the segments' own."""
    banks: tuple[int, ...]
    """Where the states before its rows are: the given ones, where there are any, and those after earlier calls."""
    before_B: Tensor
    """Which of all those each row goes on from."""
    keeps: bool


class _Planned(NamedTuple):
    """A call before it is on its device; numbers of segments in `kept`, of tokens of the pass in `own_N`."""

    token_BT: IntArray
    real_BT: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None"
    own_R: IntArray
    own_N: IntArray
    banks: tuple[int, ...]
    before_B: IntArray
    kept: tuple[int, ...]

    def on(self, device: torch.device) -> _Call:
        token_R, own_R, before_B = (
            torch.from_numpy(x).to(device) for x in (self.token_BT.ravel(), self.own_R, self.before_B)
        )
        real_BT = None if self.real_BT is None else torch.from_numpy(self.real_BT).to(device)
        return _Call(len(self.token_BT), token_R, real_BT, own_R, self.banks, before_B, bool(self.kept))


class _Plan:
    """Which rows are computed together, and in what order."""

    def __init__(self, offsets: IntArray, prefixes: IntArray, computed: int, keeps_states: bool) -> None:
        self._offsets, self._first = offsets, int(offsets[computed])
        self._prefixes, self._computed = prefixes.tolist(), computed
        self._lengths = np.diff(offsets).tolist()
        self._before: dict[int, int] = {}
        """By segment, the one whose state its row goes on from, or -1."""
        self._token_T: dict[int, IntArray] = {}
        """By segment, the tokens of its row: its own, after those of prefixes that give no state."""
        level: dict[int, int] = dict.fromkeys(range(computed), 0)
        segments = range(computed, len(self._lengths))
        for segment in segments:
            self._lay_out(segment)
            before = self._before[segment]
            level[segment] = 0 if before < 0 else level[before] + 1
        wanted = set(segments) if keeps_states else set(self._before.values())
        self._bank: dict[int, tuple[int, int]] = {segment: (0, segment) for segment in range(computed)}
        """By segment, where its state is: the bank, and the row in it."""
        self._banks = [computed] if computed else []
        """How many rows each has."""
        self.calls: list[_Planned] = []
        for at in range(max(level[segment] for segment in segments) + 1):
            here = [segment for segment in segments if level[segment] == at]
            alone = [segment for segment in here if segment not in wanted]
            begin = [segment for segment in here if segment in wanted and self._before[segment] < 0]
            going = [segment for segment in here if segment in wanted and self._before[segment] >= 0]
            for rows in self._similar(begin, _MAX_LEFT_PADDING):
                self._add(rows, left=True, keeps=True)
            for rows in self._similar(going, 0.0):
                self._add(rows, left=False, keeps=True)
            for begins in (True, False):
                of_kind = [segment for segment in alone if (self._before[segment] < 0) == begins]
                for rows in self._similar(of_kind, _MAX_PADDING):
                    self._add(rows, left=False, keeps=False)

    def _lay_out(self, segment: int) -> None:
        spans, before = [segment], self._prefixes[segment]
        while before >= 0 and not self._gives_state(before):
            spans.append(before)
            before = self._prefixes[before]
        self._before[segment] = before
        places = [np.arange(self._offsets[span], self._offsets[span + 1]) for span in reversed(spans)]
        self._token_T[segment] = np.concatenate(places) - self._first

    def _gives_state(self, segment: int) -> bool:
        return segment < self._computed or self._prefixes[segment] < 0 or self._lengths[segment] > 1

    def _similar(self, segments: Sequence[int], padding: float) -> Iterator[list[int]]:
        """Segments whose rows are at most this share shorter than the longest of them."""
        rest = sorted(segments, key=lambda segment: -len(self._token_T[segment]))
        while rest:
            least = len(self._token_T[rest[0]]) * (1 - padding)
            together = [segment for segment in rest if len(self._token_T[segment]) >= least]
            yield together
            rest = rest[len(together) :]

    def _add(self, rows: Sequence[int], *, left: bool, keeps: bool) -> None:
        lengths = np.array([len(self._token_T[segment]) for segment in rows])
        goes_on = self._before[rows[0]] >= 0
        width = max(int(lengths.max()), _SHORTEST if goes_on and not keeps else 1)
        token_BT = np.zeros((len(rows), width), dtype=np.int64)
        own_R: list[IntArray] = []
        own_N: list[IntArray] = []
        for row, segment in enumerate(rows):
            token_T, count = self._token_T[segment], self._lengths[segment]
            start = width - len(token_T) if left else 0
            token_BT[row] = token_T[0]
            token_BT[row, start : start + len(token_T)] = token_T
            end = row * width + start + len(token_T)
            own_R.append(np.arange(end - count, end))
            own_N.append(token_T[len(token_T) - count :])
        real_BT = np.arange(width) >= width - lengths[:, None] if left and lengths.min() < width else None
        banks, before_B = self._sources(rows) if goes_on else ((), np.zeros(0, dtype=np.int64))
        if keeps:
            self._bank |= {segment: (len(self._banks), row) for row, segment in enumerate(rows)}
            self._banks.append(len(rows))
        kept = tuple(rows) if keeps else ()
        self.calls.append(
            _Planned(token_BT, real_BT, np.concatenate(own_R), np.concatenate(own_N), banks, before_B, kept)
        )

    def _sources(self, rows: Sequence[int]) -> tuple[tuple[int, ...], IntArray]:
        """The banks of the states before the rows, and each row's place in them head to tail."""
        states = [self._bank[self._before[segment]] for segment in rows]
        banks = tuple(sorted({bank for bank, _ in states}))
        sizes = [self._banks[bank] for bank in banks]
        starts = dict(zip(banks, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        return banks, np.array([starts[bank] + row for bank, row in states], dtype=np.int64)


def _inverse(order: IntArray, device: torch.device) -> Tensor:
    inverse = np.empty(len(order), dtype=np.int64)
    inverse[order] = np.arange(len(order))
    return torch.from_numpy(inverse).to(device)
