"""Rows that stay with a rank for a step: they come with the first call, later calls name them.

    PlacedPart --take--> Batch --method of a worker--> answer --keep--> answer for the controller

The workers of one process share them: actor, critic and reference see the same rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tandem.batching.packing import select_rows
from tandem.errors import WorkerError
from tandem.types import Batch, FloatArray, IntArray
from tandem.workers.registration import Returns

Column = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """What a rank is sent in the place of a Batch."""

    key: str
    """Of the step's batch on this rank."""
    new: Batch | None = None
    """The rank's rows, with the first call."""
    columns: Mapping[str, Column | str | None] = field(default_factory=dict[str, "Column | str | None"])
    """Token columns that have changed since the call before, of all the rank's rows; a name: the same as that one."""
    rows: IntArray | None = None
    """The rows that this call is about, counted among the rank's; None: all."""
    weights: FloatArray | None = None
    """The column `weights` of these rows."""
    weights_by_row: bool = False
    """`weights` is a number a row, which its trained tokens all weigh. Rows may be empty: lengths do not tell."""
    trained_tokens: int = 0
    """Those of all ranks in this call: `shares` is 1 / trained_tokens on each of them."""
    fills: tuple[str | None, ...] = ()
    """The column that each of the answer's columns by token becomes here; without rows."""
    answers: bool = True
    """Whether columns by token go to the controller."""


class PlacedBatches:
    """What was placed in this process, by key, until it is forgotten."""

    def __init__(self) -> None:
        self._batches: dict[str, Batch] = {}

    def call(self, part: PlacedPart, returns: Returns | tuple[Returns, ...], method: Callable[[Batch], Any]) -> Any:
        """What the method answers about the part's rows, without the columns that nobody waits for."""
        answer = method(self._take(part))
        if isinstance(returns, tuple):
            return tuple(self._keep(part, list(zip(returns, answer, strict=True))))
        return self._keep(part, [(returns, answer)])[0]

    def forget(self, key: str) -> None:
        """The step is over. Safe to repeat."""
        self._batches.pop(key, None)

    def _take(self, part: PlacedPart) -> Batch:
        if part.new is not None:
            self._batches[part.key] = part.new
        held = self._batches.get(part.key)
        if held is None:
            raise WorkerError(f"{part.key}: these rows were placed in another process than this, or are forgotten")
        for name, column in part.columns.items():
            held = _with(held, name, getattr(held.tokens, column) if isinstance(column, str) else column)
        self._batches[part.key] = held
        batch = held if part.rows is None else select_rows(held, part.rows)
        if part.weights is None:
            return batch
        share, weights = np.float32(1 / max(part.trained_tokens, 1)), part.weights
        if part.weights_by_row:
            weights = np.repeat(weights, np.diff(batch.response_offsets)) * batch.loss_mask
        return _with(_with(batch, "weights", weights), "shares", batch.loss_mask * share)

    def _keep(self, part: PlacedPart, answers: list[tuple[Returns, Any]]) -> list[Any]:
        names = iter(part.fills)
        kept: list[Any] = []
        for how, answer in answers:
            by_token = how is Returns.PER_TOKEN
            name = next(names, None) if by_token else None
            if name is not None:
                self._batches[part.key] = _with(self._batches[part.key], name, answer)
            kept.append(None if by_token and not part.answers else answer)
        return kept


def _with(batch: Batch, name: str, column: Column | None) -> Batch:
    return replace(batch, tokens=replace(batch.tokens, **{name: column}))
