"""Keys and values of rows that have ended, found again by their tokens: a request that goes on computes only the rest.

    a row ends --keep--> tree of runs of tokens --longest--> Prefix --> Extend (tandem/models/kv_cache.py)

Rows share what they begin with: a run is stored once, up to where rows part. So the prompt of siblings is, and all the
turns that forks of a conversation have in common.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.models.kv_cache import KeysValues, Prefix
from tandem.types import IntArray

Read = Callable[[int, int], KeysValues]
"""A copy of the keys and values of tokens `start … stop` of a row."""


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

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


class PrefixCache:
    """The beginnings of rows, up to a number of tokens; what was used longest ago goes first."""

    def __init__(self) -> None:
        self.tokens = 0
        """How many there are keys and values of."""
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
        return Prefix(length, [(run.kept, min(run.stop, length) - run.start) for run in path]) if path else None

    def keep(self, token_ids: IntArray, read: Read, room: int) -> None:
        """Keep a row, of which `read` copies what is new; others go where they would be more than `room` tokens."""
        path, length = self._walk(token_ids)
        new = len(token_ids) - length
        if new == 0 or len(token_ids) > room:
            self._touch(path)
            return
        if path and length < path[-1].stop:
            path[-1] = self._split(path[-1], length)
        self._touch(path)
        while self.tokens + new > room:  # the row's own runs are the last in order, and it fits
            self._drop_oldest()
        if path and not path[-1].children:
            end = path[-1]  # grows, so that a conversation of many turns stays one run
            end.token_ids, end.kept = token_ids[end.start :].copy(), read(end.start, len(token_ids))
        else:
            parent = path[-1] if path else self._root
            end = _Run(parent, length, token_ids[length:].copy(), read(length, len(token_ids)))
            self._link(end)
            self._touch([*path, end])
        self.tokens += new

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
        self.tokens -= len(run.token_ids)


def _cut(kept: KeysValues, tokens: slice) -> KeysValues:
    """A copy of some of the tokens: a view would hold the memory of them all."""
    return {layer: [x[..., tokens].clone() for x in both] for layer, both in kept.items()}
