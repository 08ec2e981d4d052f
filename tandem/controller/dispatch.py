"""One call of the controller -> one call for each rank -> one answer: single controller outside, SPMD inside.

    group.call(method, *args) --distribute--> Calls by rank --> answers by rank --collect--> answer

Of a plain batch each rank is sent its own rows and no others; those of a training step are placed once (`placed.py`).
Sheng et al. 2024 (HybridFlow), section 4.1: transfer protocols.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import numpy as np

from tandem.batching.balance import balance_rows
from tandem.batching.packing import select_rows
from tandem.errors import WorkerError
from tandem.types import Batch, IntArray
from tandem.workers.registration import Arguments, Calls, Dispatch, Mesh, OwnDispatch, Registration, Returns

Collect = Callable[[dict[int, Any]], Any]
"""Makes one answer of those by rank, which come in the order of the calls. Raises WorkerError where a rank's is not
what the method is registered to return."""


@dataclass(frozen=True)
class Split:
    """Which rows of a whole each data-parallel group was given, so that their answers can be joined."""

    rows_by_dp_rank: Sequence[IntArray]
    """Counted in the whole, in the order in which the group has them."""
    size: int
    """Rows of the whole."""
    offsets: IntArray | None = None
    """Of the response tokens of the whole, where it is a Batch."""

    @cached_property
    def tokens_by_dp_rank(self) -> list[int]:
        """How many response tokens each group has."""
        return [int(self._lengths_B[rows].sum()) for rows in self.rows_by_dp_rank]

    @cached_property
    def runs(self) -> list[tuple[int, slice]]:
        """Where the response tokens of the whole stand in the groups' answers, first to last: a group, and a slice of
        its answer."""
        dp_rank_B = np.repeat(np.arange(len(self.rows_by_dp_rank)), [len(rows) for rows in self.rows_by_dp_rank])
        order_B = np.argsort(np.concatenate(self.rows_by_dp_rank))
        stops = [self._lengths_B[rows].cumsum() for rows in self.rows_by_dp_rank]
        dp_rank_B, stops_B = dp_rank_B[order_B], np.concatenate(stops)[order_B]
        starts_B = stops_B - self._lengths_B
        first, last = np.ones((2, len(order_B)), dtype=np.bool_)
        first[1:] = (dp_rank_B[1:] != dp_rank_B[:-1]) | (starts_B[1:] != stops_B[:-1])
        last[:-1] = first[1:]
        slices = map(slice, starts_B[first].tolist(), stops_B[last].tolist())
        return list(zip(dp_rank_B[first].tolist(), slices, strict=True))

    @cached_property
    def _lengths_B(self) -> IntArray:
        assert self.offsets is not None, "only a Batch has response tokens"
        return np.diff(self.offsets)


def distribute(registered: Registration, mesh: Mesh, arguments: Arguments) -> tuple[Calls, Collect]:
    """The calls of the ranks that are called, and how their answers become one."""
    match registered.dispatch:
        case OwnDispatch() as own:
            calls = own.distribute(mesh, arguments)
            return calls, partial(own.collect, mesh, calls)
        case Dispatch.RANK_ZERO:
            return {0: arguments}, lambda answers: answers[0]
        case Dispatch.DATA_PARALLEL:
            return _spread_rows(registered.returns, mesh, arguments)
        case Dispatch.EACH:
            by_group = mesh.group_of_answering_rank
            return _spread_entries(mesh, arguments), lambda answers: {by_group[k]: x for k, x in answers.items()}
        case Dispatch.REPLICATED:
            return dict.fromkeys(range(mesh.size), arguments), lambda answers: answers[0]
        case Dispatch.ALL:
            return dict.fromkeys(range(mesh.size), arguments), lambda answers: list(answers.values())


def _spread_entries(mesh: Mesh, arguments: Arguments) -> Calls:
    entries, *others = arguments.args
    ranks = mesh.answering_ranks
    calls: Calls = {}
    for group, entry in entries.items():
        if not 0 <= group < len(ranks):
            raise ValueError(f"an entry for data-parallel group {group}, where groups are 0 to {len(ranks) - 1}")
        calls[ranks[group]] = Arguments((entry, *others), arguments.kwargs)
    return calls


def _spread_rows(returns: Returns | tuple[Returns, ...], mesh: Mesh, arguments: Arguments) -> tuple[Calls, Collect]:
    groups, (whole, *others) = mesh.data_groups(), arguments.args
    size, offsets = len(whole), whole.response_offsets if isinstance(whole, Batch) else None
    if len(groups) == 1:
        split = Split([np.arange(size)], size, offsets)
        return dict.fromkeys(range(mesh.size), arguments), partial(join, returns, mesh, split)
    calls: Calls = {}
    if isinstance(whole, Batch):
        split = Split(balance_rows(whole, len(groups), mesh.cost), size, offsets)
        parts: list[Any] = [select_rows(whole, rows) for rows in split.rows_by_dp_rank]
    else:
        split = Split(np.array_split(np.arange(size), len(groups)), size)
        parts = [[whole[row] for row in rows] for rows in split.rows_by_dp_rank]
    for group, part in zip(groups, parts, strict=True):
        calls |= dict.fromkeys(group, Arguments((part, *others), arguments.kwargs))
    return calls, partial(join, returns, mesh, split)


def join(returns: Returns | tuple[Returns, ...], mesh: Mesh, split: Split, answers: Mapping[int, Any]) -> Any:
    """What a data-parallel method returned, for the whole; None where no group sends a column by token."""
    answered = [answers[rank] for rank in mesh.answering_ranks]
    if isinstance(returns, Returns):
        return _join(returns, split, answered)
    parts = zip(*cast("list[tuple[Any, ...]]", answered), strict=True)
    return tuple(_join(how, split, list(part)) for how, part in zip(returns, parts, strict=True))


def _join(returns: Returns, split: Split, answered: list[Any]) -> Any:
    match returns:
        case Returns.SAME:
            return answered[0]
        case Returns.PER_TOKEN:
            if answered[0] is None:
                return None
            _check_lengths(answered, split.tokens_by_dp_rank, "response tokens")
            if len(answered) == 1:
                return answered[0]
            return np.concatenate([answered[0][:0], *(answered[group][run] for group, run in split.runs)])
        case Returns.PER_ROW:
            _check_lengths(answered, [len(rows) for rows in split.rows_by_dp_rank], "rows")
            return _join_rows(split.size, split.rows_by_dp_rank, answered)


def _check_lengths(answered: list[Any], wanted: list[int], unit: str) -> None:
    for number, (answer, length) in enumerate(zip(answered, wanted, strict=True)):
        if len(answer) != length:
            raise WorkerError(f"data-parallel group {number} answered {len(answer)} entries for {length} {unit}")


def _join_rows(size: int, rows_by_dp_rank: Sequence[IntArray], answered: list[Any]) -> Any:
    if not isinstance(answered[0], list):
        column = np.empty((size, *answered[0].shape[1:]), answered[0].dtype)
        for rows, answer in zip(rows_by_dp_rank, answered, strict=True):
            column[rows] = answer
        return column
    entries: list[Any] = [None] * size
    for rows, answer in zip(rows_by_dp_rank, answered, strict=True):
        for row, entry in zip(rows, answer, strict=True):
            entries[row] = entry
    return entries
