"""A step's batch on the ranks: each rank gets its rows once, and later calls say which of them, and what is new.

    Placed.rows(…) --argument of a data-parallel method--> PlacedPart by rank --answers--> columns of the batch

The controller keeps the whole batch, for algorithms look at all of it. Which rows a rank has is decided once, by all
passes of the step (`tandem.batching.balance`), so that optimizer steps are cut by index: one call, about a list of
rows, brings all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self
from uuid import uuid4

import numpy as np

from tandem.batching.balance import BalancedPass, balance_rows
from tandem.batching.packing import runs_of, select_rows, take_rows, take_runs
from tandem.controller.dispatch import Collect, Split, join
from tandem.errors import WorkerError
from tandem.types import Batch, FloatArray, IntArray, TokenColumns
from tandem.workers.placed import ByRow, Column, PlacedPart, RowSelection
from tandem.workers.registration import Arguments, Calls, Mesh, Returns

Forget = Callable[[str], object]
"""Tells ranks that a batch of this key is not needed any more; does not wait."""


@dataclass(slots=True)
class Holder:
    """Ranks that have the batch, as one mesh of them."""

    key: str
    """What they know the batch by."""
    whole: Split
    """All rows of the batch. Each group has its own in the order of the step's passes: what an optimizer step of the
    first epoch is about stands together there, and needs no copy."""
    runs_by_dp_rank: list[list[slice]]
    """Where the response tokens of each group's rows stand in the batch."""
    forget: Forget
    columns: dict[str, Column | None] = field(default_factory=dict[str, "Column | None"])
    """The token columns that they have."""
    placed: bool = False


class Placed:
    """A batch that stays on the ranks that were asked about it, until the end of the `with` block.

    Its columns may be filled and replaced meanwhile; its rows and their tokens may not change. An exception ends the
    ranks, or is about to: nothing is called after it.
    """

    def __init__(self, batch: Batch, passes: Sequence[BalancedPass] = (), name: str = "this call") -> None:
        """`passes`: those of the step, for which rows are balanced; default: every pass is about all rows. `name`: what
        a failure says that the batch is of."""
        self.batch = batch
        self.name = name
        self.trained_tokens_B = batch.tokens_by_row(batch.loss_mask)
        self._passes = passes
        self._key = uuid4().hex
        self._holders: dict[tuple[object, tuple[tuple[str, int], ...]], Holder] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        holders, self._holders = self._holders, {}
        if kind is None:
            for holder in holders.values():
                holder.forget(holder.key)

    def rows(
        self,
        rows: IntArray | None = None,
        *,
        weights: FloatArray | None = None,
        fills: Sequence[str | None] = (),
        to_controller: bool = True,
    ) -> "PlacedRows":
        """Some rows, ascending, default: all; with what their tokens weigh in one optimizer step, of which little
        travels where the trained tokens of each row weigh the same.

        `fills`: of all rows, the column of the batch that each of the answer's columns by token becomes, here and on
        the ranks. `to_controller`: whether columns by token are returned to the controller; else they are None.
        """
        if weights is None:
            return PlacedRows(self, RowSelection(rows, to_controller=to_controller, fills=tuple(fills)))
        trained = self.trained_tokens_B if rows is None else self.trained_tokens_B[rows]
        weighed = RowSelection(rows, self._by_row(rows, weights), int(trained.sum()), to_controller, tuple(fills))
        return PlacedRows(self, weighed)

    def _by_row(self, rows: IntArray | None, weights: FloatArray) -> FloatArray | ByRow:
        """A number a row where the trained tokens of each row weigh the same, and others nothing."""
        batch, lengths_B = self.batch, np.diff(self.batch.response_offsets)
        lengths_R, trained_R = (each if rows is None else each[rows] for each in (lengths_B, self.trained_tokens_B))
        if len(weights) and (trained_R == lengths_R).all() and (weights == weights[0]).all():
            return ByRow(np.full(len(lengths_R), weights[0]))  # the usual case, without a look at the mask
        mask = batch.loss_mask if rows is None else take_rows(batch.loss_mask, batch.response_offsets, rows)
        if len(weights) and np.array_equal(weights[0] * mask, weights):
            return ByRow(np.full(len(lengths_R), weights[0]))
        weights_R = np.zeros(len(lengths_R), dtype=np.float32)
        if len(weights):
            begins_R = lengths_R.cumsum() - lengths_R
            weights_R[lengths_R > 0] = np.maximum.reduceat(weights, begins_R[lengths_R > 0])
        return ByRow(weights_R) if np.array_equal(np.repeat(weights_R, lengths_R) * mask, weights) else weights

    def news(self, holder: Holder) -> list[tuple[Batch | None, dict[str, Column | str | None]]]:
        """For each data-parallel group what it lacks of the batch: its rows, once, and columns of theirs."""
        batch = self.batch
        bare = None if holder.placed else _bare(batch)
        changed = _changed(batch.tokens, holder.columns)
        holder.placed = True
        news: list[tuple[Batch | None, dict[str, Column | str | None]]] = []
        for rows, runs in zip(holder.whole.rows_by_dp_rank, holder.runs_by_dp_rank, strict=True):
            columns = {
                name: take_runs(column, runs) if isinstance(column, np.ndarray) else column
                for name, column in changed.items()
            }
            news.append((None if bare is None else _with_short_versions(select_rows(bare, rows)), columns))
        return news

    def fill(
        self,
        names: Sequence[str | None],
        returns: Returns | tuple[Returns, ...],
        answer: Any,
        holder: Holder | None = None,
    ) -> None:
        """Columns by token of an answer about all rows become those of the batch; the ranks of `holder` have them,
        too."""
        kinds, parts = (returns, answer) if isinstance(returns, tuple) else ((returns,), (answer,))
        by_token = [part for kind, part in zip(kinds, parts, strict=True) if kind is Returns.PER_TOKEN]
        for name, column in zip(names, by_token, strict=False):
            if name is not None:
                setattr(self.batch.tokens, name, column)
                if holder is not None:
                    holder.columns[name] = column

    def holder(self, ranks: object, mesh: Mesh, forget: Forget) -> Holder:
        """What these ranks have of the batch; in the beginning nothing."""
        shape = tuple(mesh.shape.items())
        if (ranks, shape) not in self._holders:
            key, offsets = f"{self._key} {dict(shape)}", self.batch.response_offsets
            rows_by_dp_rank = balance_rows(self.batch, len(mesh.data_groups()), mesh.cost, self._passes)
            if len(rows_by_dp_rank) > 1:
                rows_by_dp_rank = [self._in_order_of_passes(rows) for rows in rows_by_dp_rank]
            runs_by_dp_rank = [runs_of(offsets, rows) for rows in rows_by_dp_rank]
            split = Split(rows_by_dp_rank, len(self.batch), offsets)
            self._holders[ranks, shape] = Holder(key, split, runs_by_dp_rank, forget)
        return self._holders[ranks, shape]

    def _in_order_of_passes(self, rows: IntArray) -> IntArray:
        """First those of the first pass that is about some rows only."""
        turn_B = np.full(len(self.batch), len(self._passes))
        for turn, one in reversed([*enumerate(self._passes)]):
            if len(one.rows) < len(self.batch):
                turn_B[one.rows] = turn
        return rows[np.argsort(turn_B[rows], kind="stable")]


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows of a placed batch: the first argument of a data-parallel method, in the place of a Batch.

    In the place of one there may be a list of them, as the optimizer steps of a training step: about each the method is
    called on the ranks, one after the other, and the answer is the list of its answers.
    """

    placed: Placed
    selection: RowSelection

    def whole(self) -> Batch:
        """The rows as a batch of its own: what a single rank sees."""
        return self.selection.of(self.placed.batch)

    def fill(self, returns: Returns | tuple[Returns, ...], answer: Any) -> Any:
        """The answer of a rank that was given `whole`, whose columns by token the batch has then. Raises WorkerError
        where one of these has another length than the batch's tokens."""
        kinds, parts = (returns, answer) if isinstance(returns, tuple) else ((returns,), (answer,))
        tokens = len(self.placed.batch.response_ids)
        for part in (part for kind, part in zip(kinds, parts, strict=True) if kind is Returns.PER_TOKEN):
            shape = getattr(part, "shape", ())
            if shape[:1] != (tokens,):
                what = f"{shape[0]} entries" if shape else f"a {type(part).__name__}"
                raise WorkerError(f"{self.placed.name}: a column by token was answered with {what} for {tokens} tokens")
        self.placed.fill(self.selection.fills, returns, answer)
        return answer


def distribute_rows(
    steps: Sequence[PlacedRows],
    ranks: object,
    forget: Forget,
    mesh: Mesh,
    returns: Returns | tuple[Returns, ...],
    others: Arguments,
) -> tuple[Calls, Collect]:
    """The calls of a data-parallel method about rows of one batch, one after the other, each with `others` as further
    arguments; how its answers become one list, of an answer about each."""
    placed = steps[0].placed
    assert all(rows.placed is placed for rows in steps), "rows of several batches in one call"
    holder = placed.holder(ranks, mesh, forget)
    splits, selections_by_dp_rank = zip(*(_split(placed.batch, holder, rows.selection) for rows in steps), strict=True)
    calls: Calls = {}
    for group, (new, columns), own in zip(
        mesh.data_groups(), placed.news(holder), zip(*selections_by_dp_rank, strict=True), strict=True
    ):
        part = PlacedPart(holder.key, placed.name, new, columns, own)
        calls |= dict.fromkeys(group, Arguments((part, *others.args), others.kwargs))

    def collect(answers: Mapping[int, Any]) -> list[Any]:
        joined: list[Any] = []
        for number, (rows, split) in enumerate(zip(steps, splits, strict=True)):
            by_rank = {rank: answers[rank][number] for rank in mesh.answering_ranks}
            joined.append(join(returns, mesh, split, by_rank))
            placed.fill(rows.selection.fills, returns, joined[-1], holder)
        return joined

    return calls, collect


def _bare(batch: Batch) -> Batch:
    """Without token columns; versions that are all the same take no memory."""
    versions_T = batch.versions
    if len(versions_T) and versions_T.min() == versions_T.max():
        versions_T = np.broadcast_to(versions_T[:1], versions_T.shape)
    return replace(batch, versions=versions_T, tokens=TokenColumns())


def _with_short_versions(batch: Batch) -> Batch:
    """As `PlacedPart.new`."""
    return batch if any(batch.versions.strides) else replace(batch, versions=batch.versions[:1])


def _split(batch: Batch, holder: Holder, selection: RowSelection) -> tuple[Split, list[RowSelection]]:
    """Which rows of a selection each data-parallel group has, and the selection as each group is sent it."""
    split, rows_by_dp_rank = holder.whole, [None] * len(holder.whole.rows_by_dp_rank)
    if selection.rows is not None:
        place_B = np.full(len(batch), -1)
        place_B[selection.rows] = np.arange(len(selection.rows))
        places_by_dp_rank = [place_B[held] for held in holder.whole.rows_by_dp_rank]
        rows_by_dp_rank = [np.flatnonzero(places >= 0) for places in places_by_dp_rank]
        offsets = np.r_[0, np.diff(batch.response_offsets)[selection.rows].cumsum()]
        split = Split([places[places >= 0] for places in places_by_dp_rank], len(selection.rows), offsets)
    return split, [
        replace(selection, rows=rows, weights=_of_places(selection.weights, split, places))
        for rows, places in zip(rows_by_dp_rank, split.rows_by_dp_rank, strict=True)
    ]


def _of_places(weights: FloatArray | ByRow | None, split: Split, places: IntArray) -> FloatArray | ByRow | None:
    """The weights of some rows of a selection."""
    if isinstance(weights, ByRow):
        return ByRow(weights.values_B[places])
    if weights is None:
        return None
    assert split.offsets is not None
    return take_rows(weights, split.offsets, places)


def _changed(tokens: TokenColumns[Column], known: dict[str, Column | None]) -> dict[str, Column | str | None]:
    """What to send of the columns: those that are not as the ranks know them, which they then do. A column that is the
    same as another one goes by its name."""
    changed: dict[str, Column | str | None] = {}
    for name in (one.name for one in fields(tokens)):
        column: Column | None = getattr(tokens, name)
        if column is known.get(name):
            continue
        changed[name] = next((other for other, have in known.items() if have is column), column)
        known[name] = column
    return changed
