"""Which of several engines should have the next piece of work, by how fast each has been and how much each has."""

import numpy as np
from numpy.typing import NDArray

_REMEMBERED = 512
"""Samples after which a measurement counts for a third."""
_ASSUMED = 16
"""Samples that every engine is taken to have made already, as fast as all are together: the first ones say little."""
_LOOKED_AT_AGAIN = 64
"""Of so many engines one may change without that the others are looked at again."""


class EngineThroughput:
    """Tokens a second of each engine, measured while it runs.

    Of an engine that has run n rows for t seconds and made T tokens that is T / t. Rows run out towards the end of a
    step, where the longest answer decides how long that takes; so seconds count by the rows that ran in them:
    T * sum(n * n * t) / sum(n * t)^2.
    """

    def __init__(self, engines: int) -> None:
        self._counted = np.zeros((4, engines))
        """Samples, tokens, row-seconds and row-row-seconds of each engine."""

    def worked(self, engine: int, rows: int, seconds: float) -> None:
        """It has run so many rows for so long."""
        self._counted[2:, engine] += rows * seconds, rows * rows * seconds

    def answered(self, engine: int, samples: int, tokens: int) -> None:
        """Samples of so many tokens in all have ended."""
        self._counted[:, engine] *= (1 - 1 / _REMEMBERED) ** samples
        self._counted[:2, engine] += samples, tokens

    def relative(self) -> NDArray[np.float64]:
        """Each engine's speed over that of all together; 1 for all, until samples have ended."""
        _, own_tokens, own_row_s, own_square_s = self._counted
        samples, tokens, row_s, square_s = self._counted.sum(1).tolist()
        if not row_s or not tokens:
            return np.ones(len(own_tokens))
        assumed = _ASSUMED * tokens / samples
        pace_s, rows = row_s / tokens, square_s / row_s
        speeds = (own_tokens + assumed) * (own_square_s + assumed * pace_s * rows) / (own_row_s + assumed * pace_s) ** 2
        return speeds * pace_s / rows


class Balance:
    """Says which of several engines should have the next of the samples that wait: each that would be through with them
    no later than any other, or before the others are with all that waits.

    To look at all engines takes a time that grows with their number, and engines ask as often as there are engines. So
    until when an engine has to be through is found for all of them and for all that waits together: it stays right
    while that is given out. It is found again once more than one of 64 engines has changed, or nothing runs whose end
    would change one. Below 64 engines that is with each change.

    `slots`, `[engines]`: how many samples each runs side by side; `room`: how many more it could begin, below 0 where
    some wait. `waiting`: samples that wait, of which `size` are given out together.
    """

    def __init__(self, engines: int) -> None:
        self.throughput = EngineThroughput(engines)
        self._speeds = self._latest_ends = np.zeros(0)
        """As they were when somebody looked last; empty: never."""
        self._changes = 0
        """Since then."""

    def changed(self) -> None:
        """An engine has begun or ended samples."""
        self._changes += 1

    def more_waits(self) -> None:
        """Samples have come."""
        self._latest_ends = np.zeros(0)

    def takes_next(
        self, engine: int, slots: NDArray[np.int64], room: NDArray[np.int64], waiting: int, size: int
    ) -> bool:
        """Whether the next samples are this engine's."""
        self._look(slots, room, waiting, size, if_more_than=len(slots) // _LOOKED_AT_AGAIN)
        load = int(slots[engine] - room[engine]) + size
        return (load + min(load, int(slots[engine]))) / float(self._speeds[engine]) <= float(self._latest_ends[engine])

    def takers(
        self,
        asking: NDArray[np.bool_],
        slots: NDArray[np.int64],
        room: NDArray[np.int64],
        waiting: int,
        size: int,
        something_runs: bool,
    ) -> NDArray[np.bool_]:
        """For each engine whether it asks and takes them. Some engine does where all ask and nothing runs."""
        most_changes = len(slots) // _LOOKED_AT_AGAIN if something_runs else 0
        self._look(slots, room, waiting, size, if_more_than=most_changes)
        return asking & (_work(slots - room + size, slots) / self._speeds <= self._latest_ends)

    def _look(
        self, slots: NDArray[np.int64], room: NDArray[np.int64], waiting: int, size: int, if_more_than: int
    ) -> None:
        if not len(self._latest_ends) or self._changes > if_more_than:
            self._speeds, self._changes = self.throughput.relative(), 0
            self._latest_ends = _latest_ends(slots - room, slots, self._speeds, waiting, size)


def _latest_ends(
    loads: NDArray[np.int64], slots: NDArray[np.int64], speeds: NDArray[np.float64], waiting: int, size: int
) -> NDArray[np.float64]:
    """When each engine has to be through with `size` samples more, to take them: when all that waits is, given out in
    lots of `size`, each to the engine that is through with it first; or when the others are through with all that
    waits, given out so that they end together.

    What has begun is not moved, so of those that end together an engine takes part that would be through sooner than
    those that end sooner still.
    """
    if len(loads) == 1:
        return np.full(1, np.inf)
    free = np.maximum(slots - loads, 0)
    wait = waiting + np.minimum(waiting, free.sum() - free)  # what runs counts twice
    work = _work(loads, slots)
    order = np.argsort(work / speeds, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    ends, work_until, speed_until = (work / speeds)[order], work[order].cumsum(), speeds[order].cumsum()

    def together(number: NDArray[np.int64]) -> NDArray[np.float64]:
        """When so many of the others of each engine, the first ones, and one more end."""
        with_itself = number >= rank
        last = number + with_itself
        return (wait + work_until[last] - with_itself * work) / (speed_until[last] - with_itself * speeds)

    low, high = np.zeros_like(rank), np.full_like(rank, len(rank) - 2)
    while (low < high).any():
        middle = (low + high) // 2
        following = ends[np.minimum(middle + 1 + (middle + 1 >= rank), len(ends) - 1)]
        enough = following >= together(middle)
        low, high = np.where(enough | (low >= high), low, middle + 1), np.where(enough & (low < high), middle, high)
    return np.maximum(_last_end(loads, slots, speeds, max(1, waiting // size), size), together(low))


def _last_end(
    loads: NDArray[np.int64], slots: NDArray[np.int64], speeds: NDArray[np.float64], lots: int, size: int
) -> float:
    """When the last of so many lots is through, each given to the engine that is through with it first. By halving: how
    many lots all engines together are through with at a time is counted at once."""
    ends = _work(loads + size, slots) / speeds
    low = float(ends.min())
    high = float((_work(loads + size * lots, slots) / speeds).min())
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        work = middle * speeds
        fitting = np.where(work <= 2 * slots, work / 2, work - slots)
        through = np.floor((fitting - loads) / size).clip(min=0).sum()
        low, high = (middle, high) if through < lots else (low, middle)
    return high * (1 + 1e-9)


def _work(loads: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """What so many samples are, in samples of the mean length. Those that run count twice: of answers of unequal
    lengths the long ones are left, and a slow engine has its last ones for the longer, so that it stops taking some
    sooner."""
    return loads + np.minimum(loads, slots)
