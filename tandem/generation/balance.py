"""Which of several engines should have the next piece of work, by how fast each has been and how much each has."""

from collections.abc import Sequence

_REMEMBERED = 512
"""Samples after which a measurement counts for a third."""
_ASSUMED = 16
"""Samples that every engine is taken to have made already, as fast as all are together: the first ones say little."""


class Speeds:
    """Tokens a second of each engine, measured while it runs.

    Of an engine that has run n rows for t seconds and made T tokens that is T / t. Rows run out towards the end of a
    step, where the longest answer decides how long that takes; so seconds count by the rows that ran in them:
    T * sum(n * n * t) / sum(n * t)^2.
    """

    def __init__(self, engines: int) -> None:
        self._samples = [0.0] * engines
        self._tokens = [0.0] * engines
        self._row_s = [0.0] * engines
        self._square_s = [0.0] * engines

    def worked(self, engine: int, rows: int, seconds: float) -> None:
        """It has run so many rows for so long."""
        self._row_s[engine] += rows * seconds
        self._square_s[engine] += rows * rows * seconds

    def answered(self, engine: int, samples: int, tokens: int) -> None:
        """Samples of so many tokens in all have ended."""
        kept = (1 - 1 / _REMEMBERED) ** samples
        for column in (self._samples, self._tokens, self._row_s, self._square_s):
            column[engine] *= kept
        self._samples[engine] += samples
        self._tokens[engine] += tokens

    def relative(self) -> list[float]:
        """Each engine's speed over that of all together; 1 for all, until samples have ended."""
        row_s, tokens = sum(self._row_s), sum(self._tokens)
        if not row_s or not tokens:
            return [1.0] * len(self._tokens)
        assumed = _ASSUMED * tokens / sum(self._samples)
        pace_s, rows = row_s / tokens, sum(self._square_s) / row_s
        speeds = [
            (own_tokens + assumed) * (own_square_s + assumed * pace_s * rows) / (own_row_s + assumed * pace_s) ** 2
            for own_tokens, own_row_s, own_square_s in zip(self._tokens, self._row_s, self._square_s, strict=True)
        ]
        return [speed * pace_s / rows for speed in speeds]


def takes_next(
    engine: int, loads: Sequence[int], slots: Sequence[int], speeds: Sequence[float], waiting: int, size: int
) -> bool:
    """Whether the next `size` samples of those that wait are this engine's: no other would be through with them sooner,
    or it would be through before the others are with all that waits.

    `loads`: the samples that each engine has; `slots`: how many it runs side by side.
    """
    ends = [_work(load + size, own) / speed for load, own, speed in zip(loads, slots, speeds, strict=True)]
    others = [one for one in range(len(loads)) if one != engine]
    started = min(waiting, sum(max(slots[one] - loads[one], 0) for one in others))
    return all(ends[engine] <= ends[one] for one in others) or ends[engine] <= _all_done(
        [_work(loads[one], slots[one]) for one in others], [speeds[one] for one in others], waiting + started
    )


def _work(load: int, slots: int) -> int:
    """What so many samples are, in samples of the mean length. Those that run count twice: of answers of unequal
    lengths the long ones are left, and a slow engine has its last ones for the longer, so that it stops taking some
    sooner."""
    return load + min(load, slots)


def _all_done(loads: Sequence[float], speeds: Sequence[float], waiting: float) -> float:
    """When engines are through with what they have and what waits, given out so that they end together: what has begun
    is not moved."""
    load, speed = waiting, 0.0
    for own_end, own_load, own_speed in sorted(
        (load / speed, load, speed) for load, speed in zip(loads, speeds, strict=True)
    ):
        if speed and own_end >= load / speed:
            break
        load, speed = load + own_load, speed + own_speed
    return load / speed
