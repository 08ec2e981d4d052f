"""Samplers that choose rows by what became of earlier ones, resumed to the row.

    draw n --RowSampler.draw, once and in order--> its row, kept until training is through with it
    a step's outcomes --RowSampler.update--> later draws

Prompts are drawn ahead of training (`trainer.max_staleness`), and dropped ones are replaced; so the rows of draws that
training has not taken yet are a part of the state. Where a run does not depend on time (docs/async.md), neither do the
draws between two updates, and a resumed run has the same ones.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, Protocol

from tandem.data.classes import sampler_class
from tandem.data.sampler import Sampler
from tandem.errors import UserError
from tandem.files import users_traceback
from tandem.types import StepMetrics


class Outcome(NamedTuple):
    """What became of a draw, whether it was trained on or dropped."""

    row: int
    rewards: tuple[float, ...]
    """Of the answers that have one."""
    accuracies: tuple[float, ...]
    """`acc` of the same answers; empty where the reward function does not report it."""


class RowSampler(Protocol):
    """Says which row is drawn next. Made as `Class(rows, rows_per_step, seed, **arguments)`."""

    def draw(self) -> int:
        """A row, from 0 to `rows` - 1. It follows from the arguments, the updates so far and the draws so far alone."""
        ...

    def update(self, outcomes: Sequence[Outcome]) -> None:
        """Take in what became of the draws of a step, in their order. Some draws may have been made since."""
        ...

    def state(self) -> dict[str, Any]:
        """What `load_state` of a new object needs to go on alike; plain enough for JSON."""
        ...

    def load_state(self, state: dict[str, Any], /) -> None:
        """Go on as the object whose `state` that was."""
        ...


def load_sampler(
    reference: str, arguments: Mapping[str, Any], rows: int, rows_per_step: int, seed: int
) -> "LearningSampler":
    """A user's class. Raises UserError where it cannot be made, or lacks a method."""
    what = f"data.sampler.sampler: {reference}"
    kind = sampler_class(reference)
    try:
        made: RowSampler = kind(rows, rows_per_step, seed, **arguments)
    except Exception as error:  # the user's code may raise anything
        told = users_traceback(error, __file__)
        raise UserError(f"{what} cannot be made as Class(rows, rows_per_step, seed, **arguments):\n{told}") from error
    return LearningSampler(made, what, {"sampler": reference, "arguments": dict(arguments)}, rows, rows_per_step, seed)


class LearningSampler(Sampler):
    """Draws by a RowSampler, of which each draw is asked for once, in order."""

    def __init__(
        self,
        rows: RowSampler,
        name: str,
        described: Mapping[str, Any],
        length: int,
        rows_per_step: int,
        seed: int,
        tells: Callable[[], StepMetrics] = dict,
    ) -> None:
        """`name` begins messages about it; `described` is the same in a resumed run; `tells`: metrics of its own."""
        super().__init__(length, rows_per_step, False, seed)
        self._rows, self._name, self._described, self._tells = rows, name, dict(described), tells
        self._next = 0
        """The first draw that was not asked for yet."""
        self._assigned: dict[int, int] = {}
        """The row of each draw that training has not behind it."""

    def row(self, position: int) -> int:
        while self._next <= position:
            self._assigned[self._next] = self._checked(self._call("draw"))
            self._next += 1
        return self._assigned[position]

    def update(self, outcomes: Sequence[Outcome]) -> None:
        """What became of a step's draws, in their order; `cursor` says already that they are behind."""
        self._call("update", list(outcomes))
        self._assigned = {draw: row for draw, row in self._assigned.items() if draw >= self.cursor}

    def metrics(self) -> StepMetrics:
        return {**super().metrics(), **self._tells()}

    def state(self) -> dict[str, Any]:
        own = self._call("state")
        try:
            same = json.loads(json.dumps(own)) == own
        except (TypeError, ValueError):
            same = False
        if not same:
            raise UserError(f"{self._name}: JSON changes what state() gives; use text keys, lists, numbers and text")
        assigned = [[draw, row] for draw, row in self._assigned.items()]
        return {**self._fixed(), "drawn": self.cursor, "next": self._next, "assigned": assigned, "own": own}

    def load_state(self, state: dict[str, Any]) -> None:
        for key, now in self._fixed().items():
            if state.get(key) != now:
                before = state.get(key)
                raise UserError(f"cannot resume: data {key} was {before}, is {now} now; put it back, or start anew")
        self.cursor, self._next = int(state["drawn"]), int(state["next"])
        self._assigned = {int(draw): int(row) for draw, row in state["assigned"]}
        self._call("load_state", state["own"])

    def _fixed(self) -> dict[str, Any]:
        return {"rows": self._length, "seed": self._seed, "sampler": self._described}

    def _checked(self, row: Any) -> int:
        try:
            place = index(row)
        except TypeError:
            place = -1
        if not 0 <= place < self._length:
            raise UserError(f"{self._name}: draw() gave {row!r}, which is no row of 0 to {self._length - 1}")
        return place

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._rows, method)(*arguments)
        except Exception as error:  # the user's code may raise anything
            told = users_traceback(error, __file__)
            raise UserError(f"{self._name}: {method} failed:\n{told}") from error
