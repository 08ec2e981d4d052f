"""Values of prompts -> an interval for their mean over all prompts that there might be.

Prompts are what is drawn at random, and the answers to one are alike: so prompts are resampled, each with its answers,
never answers one by one.
"""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
CONFIDENCE = 0.95
RESAMPLES = 10_000
_AT_ONCE = 1_000_000
"""Values that are drawn at once: 8 MB."""
_NORMAL = NormalDist()


class Interval(NamedTuple):
    low: float
    high: float


UNBOUNDED = Interval(-np.inf, np.inf)


def resampled_means(values_P: Values, resamples: int, rng: np.random.Generator) -> Values:
    """`[resamples]`: means of as many values, drawn with replacement."""
    count, rows = len(values_P), max(1, _AT_ONCE // len(values_P))
    parts = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    return np.concatenate([values_P[rng.integers(count, size=(part, count))].mean(1) for part in parts])


def mean_interval(values_P: Values, seed: int, *, resamples: int = RESAMPLES, bounds: Interval = UNBOUNDED) -> Interval:
    """The bias-corrected and accelerated bootstrap (BCa, Efron 1987) of the mean.

    Where all values are the same no resample differs, and at one of the `bounds` that values have by their nature the
    interval is that of the binomial: what share of other prompts there may be, if none among so many was drawn.
    There must be two prompts at least: one says nothing about others.
    """
    count = len(values_P)
    assert count > 1
    mean, tail = float(values_P.mean()), (1 - CONFIDENCE) / 2
    if np.ptp(values_P) < 1e-12:
        return _without_variation(mean, count, tail, bounds)
    means = np.sort(resampled_means(values_P, resamples, np.random.default_rng(seed)))
    close = 1e-9 * float(np.ptp(values_P))
    below = (np.searchsorted(means, mean - close) + np.searchsorted(means, mean + close)) / 2  # ties: half of them
    bias = _NORMAL.inv_cdf(min(max(below, 0.5), resamples - 0.5) / resamples)
    deviations_P = values_P - mean
    acceleration = float((deviations_P**3).sum() / (6 * (deviations_P**2).sum() ** 1.5))

    def quantile(share: float) -> float:
        z = bias + _NORMAL.inv_cdf(share)
        return float(np.quantile(means, _NORMAL.cdf(bias + z / (1 - acceleration * z))))

    return Interval(quantile(tail), quantile(1 - tail))


def _without_variation(mean: float, count: int, tail: float, bounds: Interval) -> Interval:
    """Clopper and Pearson's bound for 0 of `count`, between a bound and the other."""
    share, (low, high) = 1 - tail ** (1 / count), bounds
    if np.isfinite(low) and np.isfinite(high):
        if abs(mean - low) < 1e-9:
            return Interval(low, low + share * (high - low))
        if abs(mean - high) < 1e-9:
            return Interval(high - share * (high - low), high)
    return Interval(mean, mean)
