"""Which rows a step uses: each row once an epoch, in an order that a cursor resumes."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tandem.errors import UserError
from tandem.types import IntArray


class Sampler(Iterator[list[int]]):
    """Endless steps of `rows_per_step` row indices; a step may straddle two epochs, so no row is ever dropped.

    The order of epoch e depends on (seed, e) alone, so the cursor, a count of rows, is the whole state.
    """

    def __init__(self, length: int, rows_per_step: int, shuffle: bool, seed: int):
        self._length = length
        self._rows_per_step = rows_per_step
        self._shuffle = shuffle
        self._seed = seed
        self.drawn = 0
        """Rows that are behind: those of every step so far."""
        self._order = (0, self._order_of(0))

    def __next__(self) -> list[int]:
        rows = [self.row(self.drawn + i) for i in range(self._rows_per_step)]
        self.drawn += self._rows_per_step
        return rows

    def row(self, position: int) -> int:
        """The row at a position of the epochs' orders, head to tail."""
        epoch, index = divmod(position, self._length)
        if self._order[0] != epoch:
            self._order = (epoch, self._order_of(epoch))
        return int(self._order[1][index])

    @property
    def epoch(self) -> float:
        """Epochs gone through, the present one by its share."""
        return self.drawn / self._length

    def steps_for(self, epochs: int) -> int:
        """Steps until every row has been used `epochs` times."""
        return -(-self._length * epochs // self._rows_per_step)

    def state(self) -> dict[str, int | bool]:
        """What `load_state` needs; plain enough for JSON."""
        return {"drawn": self.drawn, "rows": self._length, "seed": self._seed, "shuffle": self._shuffle}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue after the last row drawn; `rows_per_step` may differ. Raises UserError if the order would change."""
        for key, now in self.state().items():
            if key != "drawn" and state[key] != now:
                raise UserError(f"cannot resume: data {key} was {state[key]}, is {now} now; put it back, or start anew")
        self.drawn = int(state["drawn"])

    def _order_of(self, epoch: int) -> IntArray:
        if not self._shuffle:
            return np.arange(self._length)
        # Raw bits, whose stream numpy never changes, where that of Generator.permutation may differ between versions.
        keys = np.random.Philox(np.random.SeedSequence([self._seed, epoch])).random_raw(self._length)
        return np.argsort(keys, kind="stable")
