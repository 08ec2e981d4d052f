"""Which rows a step uses, in an order that a cursor resumes: each row of a set once before any comes again."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from tandem.config.mixture import whole_weights
from tandem.data.shares import order_of_shares
from tandem.errors import UserError
from tandem.types import IntArray, StepMetrics


class Sampler(Iterator[list[int]]):
    """Endless steps of `rows_per_step` row indices; a step may straddle two epochs, so no row is ever dropped.

    The order of epoch e depends on (seed, e) alone, so the cursor, a count of rows, is the whole state.
    """

    def __init__(self, length: int, rows_per_step: int, shuffle: bool, seed: int):
        self._length = length
        self._rows_per_step = rows_per_step
        self._shuffle = shuffle
        self._seed = seed
        self.cursor = 0
        """Rows that are behind: those of every step so far."""
        self._orders = [_Order(length, shuffle, (seed,))]

    def __next__(self) -> list[int]:
        rows = [self.row(self.cursor + i) for i in range(self._rows_per_step)]
        self.cursor += self._rows_per_step
        return rows

    def row(self, position: int) -> int:
        """The row at a position of the epochs' orders, head to tail."""
        return self._orders[0].row(position)

    @property
    def epoch(self) -> float:
        """Epochs gone through, the present one by its share."""
        return self.cursor / self._length

    @property
    def epochs(self) -> Mapping[str, float]:
        """`epoch` of each named set; empty without sets."""
        return {}

    def metrics(self) -> StepMetrics:
        """What it tells of a step."""
        sets = {f"mixture/{name}/epoch": epoch for name, epoch in self.epochs.items()}
        return {"data/epoch": self.epoch, **sets}

    def set_of(self, row: int) -> str | None:
        """The named set that a row is of."""
        return None

    def steps_for(self, epochs: int) -> int:
        """Steps until every row has been used `epochs` times."""
        return -(-self._length * epochs // self._rows_per_step)

    def state(self) -> dict[str, Any]:
        """What `load_state` needs; plain enough for JSON."""
        return {"drawn": self.cursor, "rows": self._length, "seed": self._seed, "shuffle": self._shuffle}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue after the last row drawn; `rows_per_step` may differ. Raises UserError if the order would change."""
        for key, now in self.state().items():
            if key != "drawn" and state.get(key) != now:
                before = state.get(key)
                raise UserError(f"cannot resume: data {key} was {before}, is {now} now; put it back, or start anew")
        self.cursor = int(state["drawn"])


class MixtureSampler(Sampler):
    """Draws from several sets, whose rows lie one set after another, in the proportion of their weights.

    Whose turn it is repeats with a period, the sum of the weights as whole numbers, so any so many draws in a row hold
    each set exactly as often as its weight says, and fewer are less than one row off (`order_of_shares`). Within a set
    rows come as in a Sampler of it alone. So the cursor is again the whole state.
    """

    def __init__(self, sets: Mapping[str, int], weights: Sequence[float], rows_per_step: int, shuffle: bool, seed: int):
        """`sets`: how many rows each has; `weights` in their order."""
        super().__init__(sum(sets.values()), rows_per_step, shuffle, seed)
        self._names, self._lengths = list(sets), list(sets.values())
        self._firsts = [0, *accumulate(self._lengths)]
        self._weights = whole_weights(list(weights))
        self._period = sum(self._weights)
        self._turns = order_of_shares(self._weights)
        counts = np.cumsum(self._turns[:, None] == np.arange(len(sets)), axis=0)
        self._before = np.vstack([np.zeros(len(sets), int), counts])
        """`[period + 1, sets]`: draws of each set before each turn of a period."""
        self._orders = [_Order(length, shuffle, (seed, 1 + place)) for place, length in enumerate(self._lengths)]

    def row(self, position: int) -> int:
        """The row of draw `position`."""
        place = int(self._turns[position % self._period])
        return self._firsts[place] + self._orders[place].row(self._draws_of(place, position))

    def _draws_of(self, place: int, drawn: int) -> int:
        """How many of the first `drawn` draws are of a set."""
        periods, turn = divmod(drawn, self._period)
        return periods * self._weights[place] + int(self._before[turn, place])

    @property
    def epoch(self) -> float:
        """That of the set which is farthest behind."""
        return min(self.epochs.values())

    @property
    def epochs(self) -> Mapping[str, float]:
        return {
            name: self._draws_of(place, self.cursor) / self._lengths[place] for place, name in enumerate(self._names)
        }

    def set_of(self, row: int) -> str | None:
        return self._names[int(np.searchsorted(self._firsts, row, side="right")) - 1]

    def steps_for(self, epochs: int) -> int:
        """Steps until every row of every set has been used `epochs` times."""
        return -(-max(self._draws_for(place, epochs) for place in range(len(self._names))) // self._rows_per_step)

    def _draws_for(self, place: int, epochs: int) -> int:
        """The first draws that hold all rows of a set `epochs` times."""
        periods, rest = divmod(self._lengths[place] * epochs - 1, self._weights[place])
        return periods * self._period + int(np.searchsorted(self._before[:, place], rest + 1))

    def state(self) -> dict[str, Any]:
        mixture = [*map(list, zip(self._names, self._lengths, self._weights, strict=True))]
        return {**super().state(), "mixture": mixture}


class _Order:
    """The rows of one set, epoch after epoch, each in an order of its own."""

    def __init__(self, length: int, shuffle: bool, seed: tuple[int, ...]):
        self._length = length
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = -1
        self._shuffled: _ShuffledRows | None = None

    def row(self, position: int) -> int:
        epoch, index = divmod(position, self._length)
        if not self._shuffle:
            return index
        if self._shuffled is None or self._epoch != epoch:
            self._epoch, self._shuffled = epoch, _ShuffledRows(self._length, (*self._seed, epoch))
        return self._shuffled.row(index)


class _ShuffledRows:
    """Rows by rising random keys, equal keys by row. Only a window of them is sorted at a time, that of the index asked
    for last, so that a large set starts at once; to find a window's rows all keys are compared, not sorted."""

    _WINDOW = 1 << 18

    def __init__(self, length: int, seed: tuple[int, ...]):
        # Raw bits, whose stream numpy never changes, where that of Generator.permutation may differ between versions.
        self._keys = np.random.Philox(np.random.SeedSequence([*seed])).random_raw(length)
        self._shift = 64 - min(max(length.bit_length() - 10, 1), 16)
        """Keys that are equal without these last bits are one bucket, of about a thousand, and more beyond 2^26 rows; a
        window is whole ones."""
        self._until = np.zeros(1 << (64 - self._shift), dtype=np.int64)
        """By bucket: how many rows it and those before it hold."""
        for first in range(0, length, 1 << 20):
            buckets = (self._keys[first : first + (1 << 20)] >> np.uint64(self._shift)).astype(np.int64)
            self._until += np.bincount(buckets, minlength=len(self._until))
        np.cumsum(self._until, out=self._until)
        self._first = 0
        self._window: IntArray = np.zeros(0, dtype=np.int64)

    def row(self, index: int) -> int:
        if not 0 <= index - self._first < len(self._window):
            self._sort_window(index)
        return int(self._window[index - self._first])

    def _sort_window(self, index: int) -> None:
        """Of the bucket that holds the index and those that follow."""
        bucket = int(np.searchsorted(self._until, index, side="right"))
        self._first = int(self._until[bucket - 1]) if bucket else 0
        last = min(int(np.searchsorted(self._until, self._first + self._WINDOW)), len(self._until) - 1)
        least, most = np.uint64(bucket << self._shift), np.uint64(((last + 1) << self._shift) - 1)
        rows = np.flatnonzero((self._keys >= least) & (self._keys <= most))
        self._window = rows[np.argsort(self._keys[rows], kind="stable")]
