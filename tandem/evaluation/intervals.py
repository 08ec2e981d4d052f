"""Values of prompts -> an interval for their mean over all prompts that there might be.

Prompts are what is drawn at random, and the answers to one are alike: so it is prompts that vary, each with all its
answers, never answers one by one. Every metric is a mean over prompts, of which resampling whole prompts would estimate
the variance s^2 / P that is taken here as it is.
"""

from collections.abc import Callable
from math import log, log1p, pi, sqrt, tan
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
CONFIDENCE = 0.95
_TAIL = (1 - CONFIDENCE) / 2


class Interval(NamedTuple):
    low: float
    high: float


UNBOUNDED = Interval(-np.inf, np.inf)


def bounds_of(values_P: Values) -> Interval:
    """The bounds that values between 0 and 1, or -1 and 1, are taken to have by their nature; others have none."""
    low, high = float(values_P.min()), float(values_P.max())
    return next((Interval(least, 1.0) for least in (0.0, -1.0) if least <= low and high <= 1), UNBOUNDED)


def mean_interval(values_P: Values, bounds: Interval = UNBOUNDED) -> Interval | None:
    """Of values with `bounds` Wilson's interval (1927), of others Student's. None where nothing shows how prompts vary:
    there is one alone, or all have the same value between the bounds.

    Wilson's has the variance of the mean m fall towards the bounds, as m (1 - m) / n between 0 and 1; here n is as many
    independent 0 and 1 as would vary as the prompts do, P m (1 - m) / s^2. Both have a quantile of Student's: where few
    prompts carry the variation, s says less than P - 1 degrees of freedom do. Verdicts, which are one bound or the
    other, vary as their mean says: theirs is Clopper and Pearson's (1934) with mid-P (Lancaster 1961).
    """
    count = len(values_P)
    if count == 1:
        return None
    low, high = bounds
    if ((values_P == low) | (values_P == high)).all():
        shares = _of_verdicts(int((values_P == high).sum()), count)
        return Interval(*(low + (high - low) * share for share in shares))
    if np.ptp(values_P) < 1e-12:
        return None
    mean, variance = float(values_P.mean()), float(values_P.var(ddof=1))
    quantile = student(1 - _TAIL, _freedom(values_P))
    if not np.isfinite(high - low):
        half = quantile * sqrt(variance / count)
        return Interval(mean - half, mean + half)
    share, width = (mean - low) / (high - low), high - low
    excess = quantile**2 * variance / (width**2 * count * share * (1 - share))  # quantile^2 / n
    center = (share + excess / 2) / (1 + excess)
    half = sqrt(excess * share * (1 - share) + excess**2 / 4) / (1 + excess)
    return Interval(low + width * max(center - half, 0.0), low + width * min(center + half, 1.0))


def student(share: float, freedom: float) -> float:
    """A quantile of Student's t: of 1 and 2 degrees of freedom exactly, of more by its expansion in 1 / freedom
    (Abramowitz and Stegun 26.7.5)."""
    if freedom == 1:
        return tan(pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) / sqrt(2 * share * (1 - share))
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _freedom(values_P: Values) -> float:
    """Degrees of freedom of the chi-squared distribution whose mean and variance s^2 has (Satterthwaite 1946).

    The variance of s^2 is sigma^4 (kurtosis - (P - 3) / (P - 1)) / P: P - 1 for normal values, 2 where a single prompt
    differs from all others.
    """
    count = len(values_P)
    squares_P = (values_P - values_P.mean()) ** 2
    kurtosis = float((squares_P**2).mean() / squares_P.mean() ** 2)
    spread = kurtosis - (count - 3) / (count - 1)
    return min(max(2 * count / spread, 2.0), count - 1) if spread > 0 else count - 1


def _of_verdicts(right: int, count: int) -> Interval:
    """The mid-P interval of Clopper and Pearson for the share of right ones: were the lower bound the true share, as
    many right ones or more would come with a chance of 2.5%, the same number counted half; the upper bound likewise."""
    logs = np.log(np.arange(1, count + 1)).cumsum()
    factorials = np.concatenate(([0.0], logs))
    found = np.arange(right + 1)
    ways = factorials[count] - factorials[found] - factorials[count - found]

    def chance_of_fewer(share: float) -> float:
        chances = np.exp(ways + found * log(share) + (count - found) * log1p(-share))
        return float(chances[:-1].sum() + chances[-1] / 2)

    low = _where(chance_of_fewer, 1 - _TAIL) if right else 0.0
    high = _where(chance_of_fewer, _TAIL) if right < count else 1.0
    return Interval(low, high)


def _where(falling: Callable[[float], float], value: float) -> float:
    """Where between 0 and 1 a function has a value."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return (low + high) / 2
