"""One call of the controller -> one call for each rank -> one answer: single controller outside, SPMD inside.

    group.call(method, *args) --distribute--> Calls by rank --> answers by rank --collect--> answer

Sheng et al. 2024 (HybridFlow), section 4.1: transfer protocols.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from tandem.batching.packing import balance_rows
from tandem.errors import WorkerError
from tandem.types import Batch, IntArray
from tandem.workers.registration import Arguments, Calls, Dispatch, Mesh, OwnDispatch, Registration, Returns

Rows = Batch | Sequence[Any]
"""What a data-parallel method gets as its first argument."""


def distribute(registered: Registration, mesh: Mesh, arguments: Arguments) -> Calls:
    """The calls of the ranks that are called."""
    match registered.dispatch:
        case OwnDispatch() as own:
            return own.distribute(mesh, arguments)
        case Dispatch.RANK_ZERO:
            return {0: arguments}
        case Dispatch.DATA_PARALLEL:
            return _spread_rows(mesh, arguments)
        case Dispatch.EACH:
            return _spread_entries(mesh, arguments)
        case Dispatch.ALL | Dispatch.REPLICATED:
            return dict.fromkeys(range(mesh.size), arguments)


def collect(registered: Registration, mesh: Mesh, calls: Calls, answers: dict[int, Any]) -> Any:
    """The one answer; `answers` come in the order of the calls.

    Raises WorkerError where a rank's is not what the method is registered to return.
    """
    match registered.dispatch:
        case OwnDispatch() as own:
            return own.collect(mesh, calls, answers)
        case Dispatch.ALL:
            return list(answers.values())
        case Dispatch.RANK_ZERO | Dispatch.REPLICATED:
            return answers[0]
        case Dispatch.DATA_PARALLEL:
            return _join_groups(registered.returns, mesh, calls, answers)
        case Dispatch.EACH:
            return {mesh.group_of_answering_rank[rank]: answer for rank, answer in answers.items()}


def _spread_entries(mesh: Mesh, arguments: Arguments) -> Calls:
    entries, *others = arguments.args
    ranks = mesh.answering_ranks
    calls: Calls = {}
    for group, entry in entries.items():
        if not 0 <= group < len(ranks):
            raise ValueError(f"an entry for data-parallel group {group}, where groups are 0 to {len(ranks) - 1}")
        calls[ranks[group]] = Arguments((entry, *others), arguments.kwargs)
    return calls


def _spread_rows(mesh: Mesh, arguments: Arguments) -> Calls:
    groups = mesh.data_groups()
    if len(groups) == 1:
        return dict.fromkeys(range(mesh.size), arguments)
    whole: Rows = arguments.args[0]
    rows_of_groups = (
        balance_rows(whole, len(groups))
        if isinstance(whole, Batch)
        else np.array_split(np.arange(len(whole)), len(groups))
    )
    spread = zip(groups, rows_of_groups, strict=True)
    return {rank: replace(arguments, rows=rows) for ranks, rows in spread for rank in ranks}


def _join_groups(returns: Returns | tuple[Returns, ...], mesh: Mesh, calls: Calls, answers: dict[int, Any]) -> Any:
    answering_ranks = mesh.answering_ranks
    called = [calls[rank] for rank in answering_ranks]
    whole: Rows = called[0].args[0]
    everything = np.arange(len(whole))
    rows_of_groups = [everything if arguments.rows is None else arguments.rows for arguments in called]
    answered = [answers[rank] for rank in answering_ranks]
    if isinstance(returns, Returns):
        return _join(returns, whole, rows_of_groups, answered)
    parts = zip(*cast("list[tuple[Any, ...]]", answered), strict=True)
    return tuple(_join(how, whole, rows_of_groups, list(part)) for how, part in zip(returns, parts, strict=True))


def _join(returns: Returns, whole: Rows, rows_of_groups: list[IntArray], answered: list[Any]) -> Any:
    match returns:
        case Returns.SAME:
            return answered[0]
        case Returns.PER_TOKEN:
            assert isinstance(whole, Batch), "only a Batch has response tokens"
            lengths_B = np.diff(whole.response_offsets)
            _check_lengths(answered, [int(lengths_B[rows].sum()) for rows in rows_of_groups], "response tokens")
            return _join_tokens(whole.response_offsets, rows_of_groups, answered)
        case Returns.PER_ROW:
            _check_lengths(answered, [len(rows) for rows in rows_of_groups], "rows")
            return _join_rows(len(whole), rows_of_groups, answered)


def _check_lengths(answered: list[Any], wanted: list[int], unit: str) -> None:
    for number, (answer, length) in enumerate(zip(answered, wanted, strict=True)):
        if len(answer) != length:
            raise WorkerError(f"data-parallel group {number} answered {len(answer)} entries for {length} {unit}")


def _join_rows(size: int, rows_of_groups: list[IntArray], answered: list[Any]) -> Any:
    if not isinstance(answered[0], list):
        column = np.empty((size, *answered[0].shape[1:]), answered[0].dtype)
        for rows, answer in zip(rows_of_groups, answered, strict=True):
            column[rows] = answer
        return column
    entries: list[Any] = [None] * size
    for rows, answer in zip(rows_of_groups, answered, strict=True):
        for row, entry in zip(rows, answer, strict=True):
            entries[row] = entry
    return entries


def _join_tokens(offsets: IntArray, rows_of_groups: list[IntArray], answered: list[Any]) -> Any:
    if len(answered) == 1:
        return answered[0]
    column = np.empty((int(offsets[-1]), *answered[0].shape[1:]), answered[0].dtype)
    for rows, answer in zip(rows_of_groups, answered, strict=True):
        starts, ends = offsets[rows], offsets[rows + 1]
        stops = (ends - starts).cumsum()  # of the rows' tokens in this group's answer
        for start, end, stop in zip(starts, ends, stops, strict=True):
            column[start:end] = answer[stop - (end - start) : stop]
    return column
