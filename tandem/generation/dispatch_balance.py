"""Which of several engines should have the next piece of work, by how fast each has been and how much each has."""

import numpy as np
from numpy.typing import NDArray

_REMEMBERED = 512
"""Samples after which a measurement counts for a third."""
_ASSUMED = 16
"""Samples that every engine is taken to have made already, as fast as all are together: the first ones say little."""


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


def takes_next(
    engine: int,
    loads: NDArray[np.int64],
    slots: NDArray[np.int64],
    speeds: NDArray[np.float64],
    waiting: int,
    size: int,
) -> bool:
    """Whether the next `size` samples of those that wait are this engine's: no other would be through with them sooner,
    or it would be through before the others are with all that waits.

    `loads`: the samples that each engine has; `slots`: how many it runs side by side. All arrays are `[engines]`.
    """
    ends = _work(loads + size, slots) / speeds
    if ends[engine] <= ends.min():
        return True
    free = np.maximum(slots - loads, 0)
    started = min(waiting, int(free.sum() - free[engine]))
    has, others = _work(loads, slots), np.arange(len(loads)) != engine
    return bool(ends[engine] <= _all_done(has[others], speeds[others], waiting + started))


def _work(loads: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """What so many samples are, in samples of the mean length. Those that run count twice: of answers of unequal
    lengths the long ones are left, and a slow engine has its last ones for the longer, so that it stops taking some
    sooner."""
    return loads + np.minimum(loads, slots)


def _all_done(loads: NDArray[np.int64], speeds: NDArray[np.float64], waiting: float) -> float:
    """When engines are through with what they have and what waits, given out so that they end together: what has begun
    is not moved, so an engine takes part that would be through sooner than those that end sooner still."""
    order = np.argsort(loads / speeds)
    own_ends = (loads / speeds)[order]
    together = (waiting + np.cumsum(loads[order])) / np.cumsum(speeds[order])
    late = np.flatnonzero(own_ends[1:] >= together[:-1])
    return float(together[late[0] if len(late) else -1])
