"""Keys and values of rows that have ended, found again by their tokens: a request that goes on computes only the rest.

    a row ends --keep--> tree of runs of tokens --longest--> Prefix --> Extend (tandem/models/kv_cache.py)

Rows share what they begin with: a run is stored once, up to where rows part. So the prompt of siblings is, and all the
turns that forks of a conversation have in common.

A model with state mixers goes on only from where their states are kept: at the ends of rows, in snapshots. A row that
goes on from another takes its place, so a fork from an earlier turn is computed anew.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tandem.models.kv_cache import KeysValues, Prefix
from tandem.models.mixing.slot_states import States
from tandem.types import IntArray

Read = Callable[[int, int], KeysValues]
"""A copy of the keys and values of tokens `start … stop` of a row."""


class Snapshot(NamedTuple):
    """The states of mixers after a row."""

    states: States
    tokens: int
    """How many tokens have keys and values of as many bytes."""


@dataclass(eq=False, slots=True)
class _Run:
    """Tokens that stand after those of `parent`, up to where rows part."""

    parent: "_Run | None"
    start: int
    """How many tokens stand before it."""
    token_ids: IntArray
    kept: KeysValues
    children: dict[int, "_Run"] = field(default_factory=dict[int, "_Run"])
    """By their first token."""
    snapshot: Snapshot | None = None
    """After its last token."""

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def size(self) -> int:
        """In tokens."""
        return len(self.token_ids) + _size(self.snapshot)


class PrefixCache:
    """The beginnings of rows, up to a number of tokens; what was used longest ago goes first."""

    def __init__(self, with_states: bool = False) -> None:
        """`with_states`: of a model with state mixers, whose rows are all kept with a snapshot."""
        self.tokens = 0
        """How many there are keys and values of; a snapshot counts as those that take its memory."""
        self._with_states = with_states
        self._root = _Run(None, 0, np.zeros(0, dtype=np.int32), {})
        self._by_use: OrderedDict[_Run, None] = OrderedDict()
        """The one used longest ago first, and each before its parent: so the first one has no children."""

    def clear(self) -> None:
        self.tokens = 0
        self._root.children.clear()
        self._by_use.clear()

    def longest(self, token_ids: IntArray) -> Prefix | None:
        """What is known of the tokens but the last one, which is always computed: logits follow from it."""
        path, length = self._walk(token_ids[:-1])
        self._touch(path)
        if self._with_states:
            while path and (path[-1].snapshot is None or path[-1].stop > length):
                path.pop()
            length = path[-1].stop if path else 0
        if not path:
            return None
        parts = [(run.kept, min(run.stop, length) - run.start) for run in path]
        snapshot = path[-1].snapshot
        return Prefix(length, parts, None if snapshot is None else snapshot.states)

    def keep(self, token_ids: IntArray, read: Read, room: int, snapshot: Snapshot | None = None) -> None:
        """Keep a row, of which `read` copies what is new; others go where they would be more than `room` tokens."""
        path, length = self._walk(token_ids)
        known = length == len(token_ids) and (snapshot is None or self._has_snapshot(path, length))
        if known or len(token_ids) + _size(snapshot) > room:
            self._touch(path)
            return
        if path and length < path[-1].stop:
            path[-1] = self._split(path[-1], length)
        self._touch(path)
        grows = bool(path) and (length == len(token_ids) or not path[-1].children)
        if grows:  # so that a conversation of many turns stays one run; its snapshot gives way to the new one
            self.tokens -= _size(path[-1].snapshot)
            path[-1].snapshot = None
        self._make_room(path, len(token_ids) - length + _size(snapshot), room)
        if grows:
            end = path[-1]
            self.tokens -= end.size
            if length < len(token_ids):
                end.token_ids, end.kept = token_ids[end.start :].copy(), read(end.start, len(token_ids))
        else:
            parent = path[-1] if path else self._root
            end = _Run(parent, length, token_ids[length:].copy(), read(length, len(token_ids)))
            self._link(end)
            self._touch([*path, end])
        end.snapshot = snapshot
        self.tokens += end.size

    def _has_snapshot(self, path: Sequence[_Run], length: int) -> bool:
        """Whether there is one after so many tokens."""
        return bool(path) and path[-1].stop == length and path[-1].snapshot is not None

    def _make_room(self, path: Sequence[_Run], new: int, room: int) -> None:
        """For so many tokens more, after the runs of `path`, which stay: but for snapshots where they do not fit."""
        for run in path:
            if sum(one.size for one in path) + new > room:
                self.tokens -= _size(run.snapshot)
                run.snapshot = None
        while self.tokens + new > room:  # the row's own runs are the last in order, and it fits
            self._drop_oldest()

    def _walk(self, token_ids: IntArray) -> tuple[list[_Run], int]:
        """The runs that the tokens pass through, into the last one perhaps not all the way, and how many they share."""
        run, path, length = self._root, list[_Run](), 0
        while length == run.stop and length < len(token_ids) and int(token_ids[length]) in run.children:
            run = run.children[int(token_ids[length])]
            path.append(run)
            rest = token_ids[length : length + len(run.token_ids)]
            differ = np.flatnonzero(run.token_ids[: len(rest)] != rest)
            length += int(differ[0]) if len(differ) else len(rest)
        return path, length

    def _touch(self, path: Sequence[_Run]) -> None:
        for run in reversed(path):
            self._by_use[run] = None
            self._by_use.move_to_end(run)

    def _split(self, run: _Run, place: int) -> _Run:
        """Cut a run where `place` tokens stand before the cut; returns the first part, which is new."""
        assert run.parent is not None
        cut = place - run.start
        head = _Run(run.parent, run.start, run.token_ids[:cut], _cut(run.kept, slice(cut)))
        run.parent, run.start = head, place
        run.token_ids, run.kept = run.token_ids[cut:], _cut(run.kept, slice(cut, None))
        self._link(head)
        self._link(run)
        return head

    def _link(self, run: _Run) -> None:
        assert run.parent is not None
        run.parent.children[int(run.token_ids[0])] = run

    def _drop_oldest(self) -> None:
        run, _ = self._by_use.popitem(last=False)
        assert run.parent is not None and not run.children
        del run.parent.children[int(run.token_ids[0])]
        self.tokens -= run.size


def _size(snapshot: Snapshot | None) -> int:
    return snapshot.tokens if snapshot else 0


def _cut(kept: KeysValues, tokens: slice) -> KeysValues:
    """A copy of some of the tokens: a view would hold the memory of them all."""
    return {layer: [x[..., tokens].clone() for x in both] for layer, both in kept.items()}
