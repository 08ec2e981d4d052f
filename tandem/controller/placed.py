"""A step's batch on the ranks: each rank gets its rows once, and later calls say which of them, and what is new.

    Placed.rows(…) --argument of a data-parallel method--> PlacedPart by rank --answers--> columns of the batch

The controller keeps the whole batch, for algorithms look at all of it. Which rows a rank has is decided once, by all
passes of the step (`tandem.batching.balance`), so that optimizer steps are cut by index.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Self
from uuid import uuid4

import numpy as np

from tandem.batching.balance import Pass, balance_rows
from tandem.batching.packing import select_rows, take_rows, token_shares
from tandem.controller.dispatch import Collect, Split, join
from tandem.types import Batch, FloatArray, IntArray, TokenColumns
from tandem.workers.placed import Column, PlacedPart
from tandem.workers.registration import Arguments, Calls, Mesh, Returns

Forget = Callable[[str], object]
"""Tells ranks that a batch of this key is not needed any more; does not wait."""


@dataclass(slots=True)
class Holder:
    """Ranks that have the batch, as one mesh of them."""

    key: str
    """What they know the batch by."""
    rows_of_groups: list[IntArray]
    forget: Forget
    columns: dict[str, Column | None] = field(default_factory=dict[str, "Column | None"])
    """The token columns that they have."""
    placed: bool = False


class Placed:
    """A batch that stays on the ranks that were asked about it, until the end of the `with` block.

    Its columns may be filled and replaced meanwhile; its rows and their tokens may not change. An exception ends the
    ranks, or is about to: nothing is called after it.
    """

    def __init__(self, batch: Batch, passes: Sequence[Pass] = ()) -> None:
        """`passes`: those of the step, for which rows are balanced; default: every pass is about all rows."""
        self.batch = batch
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
        answers: bool = True,
    ) -> "PlacedRows":
        """Some rows, ascending, default: all; with what their tokens weigh in one optimizer step.

        `fills`: of a call about all rows, the column of the batch that each of the answer's columns by token becomes,
        here and on the ranks. `answers`: whether columns by token come to the controller; else they are None.
        """
        return PlacedRows(self, rows, weights, tuple(fills), answers)

    def news(self, holder: Holder) -> list[tuple[Batch | None, dict[str, Column | str | None]]]:
        """For each data-parallel group what it lacks of the batch: its rows, once, and columns of theirs."""
        batch, offsets = self.batch, self.batch.response_offsets
        bare = None if holder.placed else replace(batch, tokens=TokenColumns())
        changed = _changed(batch.tokens, holder.columns)
        holder.placed = True
        return [
            (
                None if bare is None else select_rows(bare, rows),
                {
                    name: take_rows(column, offsets, rows) if isinstance(column, np.ndarray) else column
                    for name, column in changed.items()
                },
            )
            for rows in holder.rows_of_groups
        ]

    def holder(self, ranks: object, mesh: Mesh, forget: Forget) -> Holder:
        """What these ranks have of the batch; in the beginning nothing."""
        shape = tuple(mesh.shape.items())
        if (ranks, shape) not in self._holders:
            rows_of_groups = balance_rows(self.batch, len(mesh.data_groups()), mesh.cost, self._passes)
            self._holders[ranks, shape] = Holder(f"{self._key} {dict(shape)}", rows_of_groups, forget)
        return self._holders[ranks, shape]


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows of a placed batch: the first argument of a data-parallel method, in the place of a Batch."""

    placed: Placed
    rows: IntArray | None
    weights: FloatArray | None
    fills: tuple[str | None, ...]
    answers: bool

    def whole(self) -> Batch:
        """The rows as a batch of its own: what a single rank sees."""
        batch = self.placed.batch
        part = batch if self.rows is None else select_rows(batch, self.rows)
        if self.weights is None:
            return part
        return replace(part, tokens=replace(part.tokens, weights=self.weights, shares=token_shares(part.loss_mask)))

    def distribute(
        self, ranks: object, forget: Forget, mesh: Mesh, returns: Returns | tuple[Returns, ...], others: Arguments
    ) -> tuple[Calls, Collect]:
        """The calls of a method that takes these rows and, after them, `others`; how its answers become one."""
        placed = self.placed
        holder = placed.holder(ranks, mesh, forget)
        rows_R = np.arange(len(placed.batch)) if self.rows is None else self.rows
        offsets = np.r_[0, np.diff(placed.batch.response_offsets)[rows_R].cumsum()]
        wanted_B = np.zeros(len(placed.batch), dtype=np.bool_)
        wanted_B[rows_R] = True
        rows_of_groups = [held[wanted_B[held]] for held in holder.rows_of_groups]
        split = Split([np.searchsorted(rows_R, rows) for rows in rows_of_groups], len(rows_R), offsets)
        calls: Calls = {}
        news, by_row = placed.news(holder), self._weights_by_row(rows_R, offsets)
        weights = self.weights if by_row is None else by_row
        for group, held, places, (new, columns) in zip(
            mesh.data_groups(), holder.rows_of_groups, split.rows_of_groups, news, strict=True
        ):
            part = PlacedPart(
                key=holder.key,
                new=new,
                columns=columns,
                rows=None if self.rows is None else np.searchsorted(held, rows_R[places]),
                weights=_of_places(weights, None if by_row is not None else offsets, places),
                weights_by_row=by_row is not None,
                trained_tokens=int(placed.trained_tokens_B[rows_R].sum()),
                fills=self.fills,
                answers=self.answers,
            )
            calls |= dict.fromkeys(group, Arguments((part, *others.args), others.kwargs))
        return calls, partial(self._collect, holder, mesh, returns, split)

    def _weights_by_row(self, rows_R: IntArray, offsets: IntArray) -> FloatArray | None:
        """A number a row where the trained tokens of each row weigh the same, and others nothing; else None."""
        if self.weights is None:
            return None
        batch = self.placed.batch
        mask = take_rows(batch.loss_mask, batch.response_offsets, rows_R)
        lengths = np.diff(offsets)
        weights_R = np.zeros(len(rows_R), dtype=np.float32)
        if len(self.weights):
            weights_R[lengths > 0] = np.maximum.reduceat(self.weights, offsets[:-1][lengths > 0])
        return weights_R if np.array_equal(np.repeat(weights_R, lengths) * mask, self.weights) else None

    def _collect(
        self,
        holder: Holder,
        mesh: Mesh,
        returns: Returns | tuple[Returns, ...],
        split: Split,
        answers: Mapping[int, Any],
    ) -> Any:
        """The one answer, of which the columns that are to fill the batch's do so."""
        answer = join(returns, mesh, split, answers)
        kinds, parts = (returns, answer) if isinstance(returns, tuple) else ((returns,), (answer,))
        by_token = [part for kind, part in zip(kinds, parts, strict=True) if kind is Returns.PER_TOKEN]
        for name, column in zip(self.fills, by_token, strict=False):
            if name is not None:
                setattr(self.placed.batch.tokens, name, column)
                holder.columns[name] = column
        return answer


def _of_places(weights: FloatArray | None, offsets: IntArray | None, places: IntArray) -> FloatArray | None:
    """The weights of some rows: by token, with the `offsets` of all, or by row."""
    if weights is None or offsets is None:
        return None if weights is None else weights[places]
    return take_rows(weights, offsets, places)


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
