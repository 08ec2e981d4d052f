"""Which of several comes next, so that each has its share in the proportion of whole weights."""

from collections.abc import Sequence

import numpy as np

from tandem.types import IntArray


def order_of_shares(weights: Sequence[int]) -> IntArray:
    """`[sum of weights]`: whose each turn of one period is, n of them with weights w.

    After t turns each has had its share w t / sum(w) but for at most 1 - 1 / (2n - 2): Tijdeman, The chairman
    assignment problem, Discrete Mathematics 32 (1980). The next turn is of the one that would exceed this soonest,
    among those who may have one already. In whole numbers, all of it times 2 (n - 1) sum(w).
    """
    period, n = sum(weights), len(weights)
    if n == 1:
        return np.zeros(period, np.int64)
    share, had = np.array(weights, np.int64), np.zeros(n, np.int64)
    made = np.empty(period, np.int64)
    for turn in range(period):
        # behind[s] = 2 (n - 1) (w_s (turn + 1) - had_s sum(w)); a turn needs at least sum(w).
        behind = 2 * (n - 1) * (share * (turn + 1) - had * period)
        slack = ((2 * n - 3) * period - behind) / share
        made[turn] = chosen = int(np.argmin(np.where(behind >= period, slack, np.inf)))
        had[chosen] += 1
    return made
