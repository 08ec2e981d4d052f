"""Rows that stay with a rank for a step: they come with the first call, later calls name them.

    PlacedPart --selection by selection--> Batch --method of a worker--> answer --keep--> answers for the controller

The workers of one process share them: actor, critic and reference see the same rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tandem.batching.packing import select_rows
from tandem.errors import WorkerError
from tandem.types import Batch, FloatArray, IntArray
from tandem.workers.registration import Returns

Column = np.ndarray[Any, Any]


@dataclass(frozen=True)  # no slots, which make pickling slow
class ByRow:
    """A token column of which each row's tokens in the loss mask have the same number, and others 0."""

    values_B: FloatArray

    def by_token(self, batch: Batch) -> FloatArray:
        """The column, of the rows of this batch."""
        values_B = self.values_B
        if len(values_B) and (values_B == values_B[0]).all():
            return batch.loss_mask * values_B[0]
        return np.repeat(values_B, np.diff(batch.response_offsets)) * batch.loss_mask


@dataclass(frozen=True)  # no slots, which make pickling slow
class RowSelection:
    """Some of the placed rows: what one call of the worker's method is about, as an optimizer step."""

    rows: IntArray | None = None
    """Ascending numbers, of the batch in the controller and of the rank's rows on the rank; None: all."""
    weights: FloatArray | ByRow | None = None
    """The column `loss_weights` of these rows."""
    trained_tokens: int = 0
    """Those of all ranks in this selection: `shares` is 1 / trained_tokens on each of them. Read with weights alone."""
    to_controller: bool = True
    """Whether columns by token are returned to the controller."""
    fills: tuple[str | None, ...] = ()
    """Of all rows: the column of the batch that each of the answer's columns by token becomes."""

    def of(self, batch: Batch) -> Batch:
        """These rows of the batch, with what their tokens weigh."""
        part = batch if self.rows is None else select_rows(batch, self.rows)
        if self.weights is None:
            return part
        weights = self.weights.by_token(part) if isinstance(self.weights, ByRow) else self.weights
        share = np.float32(1 / max(self.trained_tokens, 1))
        return _with(part, loss_weights=weights, shares=part.loss_mask * share)


@dataclass(frozen=True)  # no slots, which make pickling slow
class PlacedPart:
    """What a rank is sent in the place of a Batch. It answers with a list: what the
    method answers about each selection."""

    key: str
    """Of the step's batch on this rank."""
    name: str = "this call"
    """What the batch is of, for who reads of a failure."""
    new: Batch | None = None
    """The rank's rows, with the first call; `versions` has one number where those of all tokens are the same."""
    columns: Mapping[str, Column | str | None] = field(default_factory=dict[str, "Column | str | None"])
    """Token columns that have changed since the call before, of all the rank's rows; a name: the same as that one."""
    selections: Sequence[RowSelection] = (RowSelection(),)
    """The method is called about each of them, one after the other."""


class PlacedBatches:
    """What was placed in this process, by key, until it is forgotten."""

    def __init__(self, goes_on: Callable[[], None] = lambda: None) -> None:
        """`goes_on` is called between two selections of a call: the time of each is limited, not that of all."""
        self._batches: dict[str, Batch] = {}
        self._goes_on = goes_on

    def call(
        self, part: PlacedPart, returns: Returns | tuple[Returns, ...], method: Callable[[Batch], Any]
    ) -> list[Any]:
        """What the method answers about each of the part's selections, without the columns that nobody waits for.

        What it raises has a note where there are several selections: which one it was.
        """
        self._update(part)
        answers: list[Any] = []
        for number, selection in enumerate(part.selections, 1):
            if answers:
                self._goes_on()
            try:
                answer = method(selection.of(self._batches[part.key]))
            except Exception as error:
                if len(part.selections) > 1:
                    error.add_note(f"in optimizer step {number} of the {len(part.selections)} of {part.name}")
                raise
            answers.append(self._keep(part.key, selection, returns, answer))
        return answers

    def forget(self, key: str) -> None:
        """The step is over. Safe to repeat."""
        self._batches.pop(key, None)

    def _update(self, part: PlacedPart) -> None:
        """Keep what the part brings."""
        if part.new is not None:
            versions_T = np.broadcast_to(part.new.versions, part.new.response_ids.shape)
            self._batches[part.key] = replace(part.new, versions=versions_T)
        held = self._batches.get(part.key)
        if held is None:
            raise WorkerError(f"{part.key}: these rows were placed in another process than this, or are forgotten")
        if part.columns:
            columns = dict[str, Column | None]()
            for name, column in part.columns.items():
                same = isinstance(column, str)
                columns[name] = columns.get(column, getattr(held.tokens, column)) if same else column
            self._batches[part.key] = _with(held, **columns)

    def _keep(self, key: str, selection: RowSelection, returns: Returns | tuple[Returns, ...], answer: Any) -> Any:
        if not isinstance(returns, tuple):
            return self._keep(key, selection, (returns,), (answer,))[0]
        names = iter(selection.fills)
        kept: list[Any] = []
        for how, one in zip(returns, answer, strict=True):
            by_token = how is Returns.PER_TOKEN
            name = next(names, None) if by_token else None
            if name is not None:
                self._batches[key] = _with(self._batches[key], **{name: one})
            kept.append(None if by_token and not selection.to_controller else one)
        return tuple(kept)


def _with(batch: Batch, **columns: Column | None) -> Batch:
    return replace(batch, tokens=replace(batch.tokens, **columns))
