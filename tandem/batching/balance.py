"""Rows -> ranks: each pass over the rows ends when its slowest rank does, so that ranks get rows of equal cost."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem.models.cost import TOKENS_ALONE, Floats, RowCost
from tandem.types import Batch, IntArray


class BalancedPass(NamedTuple):
    """Rows that the ranks compute together: they wait for one another at its end."""

    rows: IntArray
    weight: float = 1.0
    """In forward passes: with its backward pass it is 3."""


def balance_rows(
    batch: Batch, parts: int, cost: RowCost = TOKENS_ALONE, passes: Sequence[BalancedPass] = ()
) -> list[IntArray]:
    """The rows of each of `parts` data-parallel groups, called ranks here, ascending; the branches of a trajectory are
    on one.

    The sum over `passes` (default: one over all rows) of what the busiest rank computes is kept small, greedily: the
    groups, the most costly first, go where the passes that they are in have computed the least so far. Where it makes
    that sum smaller, trajectories are given out instead, whose prompt is then computed on several ranks.
    """
    if parts == 1:
        return [np.arange(len(batch))]
    passes = passes or [BalancedPass(np.arange(len(batch)))]
    busiest, rows = np.inf, list[IntArray]()
    for units_B in (batch.groups, batch.trajectories):
        unit_of_row_B = np.unique(units_B, return_inverse=True)[1]
        costs_B = row_costs(batch, units_B, cost)
        if sum(one.weight * costs_B[one.rows].sum() for one in passes) / parts < busiest:  # else it cannot be better
            spread = _spread(unit_of_row_B, costs_B, parts, passes)
            busiest, rows = min((busiest, rows), spread, key=lambda candidate: candidate[0])
    return rows


def _spread(
    unit_of_row_B: IntArray, costs_B: Floats, parts: int, passes: Sequence[BalancedPass]
) -> tuple[float, list[IntArray]]:
    """The sum over the passes of the busiest rank's cost, and each rank's rows: those with the same unit together."""
    units = int(unit_of_row_B.max(initial=-1)) + 1
    costs = np.array(
        [weight * np.bincount(unit_of_row_B[rows], costs_B[rows], minlength=units) for rows, weight in passes]
    )
    loads, part_of_unit = np.zeros((parts, len(passes))), [0] * units
    loads_of_parts, costs_of_units = list(loads), list(np.ascontiguousarray(costs.T))  # views: no slicing in the loop
    for unit in np.argsort(-costs.sum(0), kind="stable").tolist():
        own = costs_of_units[unit]
        part_of_unit[unit] = part = int(loads.dot(own).argmin())  # where the squares of the loads grow least
        loads_of_parts[part] += own
    part_of_row_B = np.array(part_of_unit, dtype=np.int64)[unit_of_row_B]
    return float(loads.max(0).sum()), [np.flatnonzero(part_of_row_B == part) for part in range(parts)]


def row_costs(batch: Batch, units_B: IntArray, cost: RowCost) -> Floats:
    """`[B]`: what each row costs. A prompt counts in the first of the rows of a unit that have it."""
    prompts, answers = np.diff(batch.prompt_offsets), np.maximum(np.diff(batch.response_offsets) - 1, 0)
    unit_and_prompt_B = units_B.astype(np.int64) << 32 | batch.prompts
    first_B = np.zeros(len(batch), dtype=np.bool_)
    first_B[np.unique(unit_and_prompt_B, return_index=True)[1]] = True
    of_prompts = cost.of_tokens(np.zeros_like(prompts), prompts) * first_B
    return (
        of_prompts + cost.of_tokens(prompts, prompts + answers) + cost.predicted * batch.tokens_by_row(batch.loss_mask)
    )
