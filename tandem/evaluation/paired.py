"""Two models over the same prompts: by how much they differ, and whether that may be chance."""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from tandem.evaluation.intervals import CONFIDENCE, Values, mean_interval, student

POWER = 0.8
EXCHANGES = 10_000
_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of the mean over prompts."""

    difference: float
    """The first model's mean less the second one's."""
    low: float | None
    """As `high` and `detectable` None where all prompts differ by as much, or not at all: of how they vary that says
    nothing."""
    high: float | None
    p_value: float
    detectable: float | None
    """The smallest true difference that a test of as many prompts finds in 80% of evaluations (`POWER`)."""
    prompts: int


def compare(differences_P: Values, seed: int) -> Comparison:
    """Of two or more prompts: the first model's value less the second one's."""
    mean, count, chance = float(differences_P.mean()), len(differences_P), p_value(differences_P, seed)
    interval = mean_interval(differences_P)
    if interval is None:
        return Comparison(mean, None, None, chance, None, count)
    return Comparison(mean, interval.low, interval.high, chance, detectable(differences_P), count)


def p_value(differences_P: Values, seed: int, exchanges: int = EXCHANGES) -> float:
    """Two-sided, of the permutation test that exchanges the models prompt by prompt, all answers to a prompt together.

    Were the models equally good, each prompt's difference would be as likely with the other sign. Of random exchanges,
    the one that was seen among them, it is the share whose mean is at least as far from 0.
    """
    rng, count = np.random.default_rng(seed), len(differences_P)
    seen, rows = abs(float(differences_P.sum())), max(1, _AT_ONCE // count)
    seen -= 1e-9 * float(np.abs(differences_P).sum())  # sums in another order differ in their last bits
    as_far = 0
    for start in range(0, exchanges, rows):
        signs = rng.integers(0, 2, size=(min(rows, exchanges - start), count), dtype=np.int8) * 2 - 1
        as_far += int((np.abs(signs @ differences_P) >= seen).sum())
    return (1 + as_far) / (1 + exchanges)


def detectable(differences_P: Values) -> float:
    """The true difference d that the test finds with a probability of `POWER`, prompts differing as they do here.

    d = (t(1 - alpha / 2) + t(power)) s / sqrt(P), with Student's quantiles for P - 1 degrees of freedom.
    """
    count = len(differences_P)
    spread = float(differences_P.std(ddof=1)) / sqrt(count)
    return (student((1 + CONFIDENCE) / 2, count - 1) + student(POWER, count - 1)) * spread
