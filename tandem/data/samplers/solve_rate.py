"""A curriculum by solve rates: rows are drawn in proportion to what a group of answers can be expected to teach.

Of a row that an answer solves with probability p, rewards of 0 and 1 have the variance p (1 - p), and that is what
policy gradients with a baseline learn from: it is the mean squared advantage. What is known of p is a Beta
distribution, uniform at first, of s solved and f other answers: the expectation of p (1 - p) is

    w = a b / ((a + b) (a + b + 1)),    a = 1 + s, b = 1 + f

1/6 for a row that was never drawn, up to 1/4 for one that is solved half the time, and towards 0 for one that is solved
always or never, but never 0: what the policy has learned since comes to light. Before each update of a row s and f are
multiplied by a discount, for they are of an earlier policy. (Foster et al., Learning to Reason at the Frontier of
Learnability, 2025, draw by p (1 - p), too.)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from tandem.config.base import PositiveFloat
from tandem.config.sampler import SamplerKind
from tandem.data.learning_sampler import LearningSampler, Outcome
from tandem.types import IntArray, StepMetrics

if TYPE_CHECKING:
    from tandem.config.data import DataConfig
    from tandem.data.dataset import RLHFDataset


class SolveRateSamplerConfig(SamplerKind):
    """Rows that are solved neither always nor never come more often (docs/data.md)."""

    type: Literal["solve_rate"]
    discount: Annotated[PositiveFloat, Field(le=1)] = 0.5
    """What is known of a row counts so much less each time that it is drawn again, for the policy has changed."""

    def make(self, config: "DataConfig", dataset: "RLHFDataset", seed: int) -> LearningSampler:
        rows, size = len(dataset), config.prompts_per_step
        by_rate = SolveRateSampler(rows, size, seed, self.discount)
        return LearningSampler(by_rate, "data.sampler", self.model_dump(), rows, size, seed, by_rate.metrics)


class SolveRateSampler:
    """Draws `rows_per_step` different rows at a time, by the weights of that moment (`RowSampler`)."""

    def __init__(self, rows: int, rows_per_step: int, seed: int, discount: float) -> None:
        self._seed, self._discount = seed, discount
        self._block = min(rows, rows_per_step)
        self._solved, self._failed = np.zeros(rows), np.zeros(rows)
        self._blocks = 0
        self._waiting: list[int] = []
        """The rest of the last block."""

    def draw(self) -> int:
        if not self._waiting:
            self._waiting = self._draw_block().tolist()
            self._blocks += 1
        return self._waiting.pop(0)

    def weights(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """`[rows]`: expected p (1 - p)."""
        a, b = 1 + self._solved, 1 + self._failed
        return a * b / ((a + b) * (a + b + 1))

    def _draw_block(self) -> IntArray:
        """Different rows, one after another in proportion to their weights among those that are left: those whose
        exponential waiting times, at rates that are the weights, end first."""
        bits = np.random.Philox(np.random.SeedSequence([self._seed, self._blocks])).random_raw(len(self._solved))
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        times = -np.log(uniform) / self.weights()
        first = np.argpartition(times, self._block - 1)[: self._block]
        return first[np.lexsort((first, times[first]))]

    def update(self, outcomes: Sequence[Outcome]) -> None:
        """By accuracies, or rewards where there are none, cut to 0 to 1."""
        for one in outcomes:
            if solved := np.clip(one.accuracies or one.rewards, 0.0, 1.0).tolist():
                self._solved[one.row] = self._discount * self._solved[one.row] + sum(solved)
                self._failed[one.row] = self._discount * self._failed[one.row] + len(solved) - sum(solved)

    def metrics(self) -> StepMetrics:
        """What is known of the rows. A row has a rate once an answer of it has a score."""
        known = self._solved + self._failed
        seen = known > 0
        found = {"data/solve_rate/seen_share": float(seen.mean())}
        if not seen.any():
            return found
        solved, failed = self._solved[seen], self._failed[seen]
        return found | {
            "data/solve_rate/mean": float((solved / known[seen]).mean()),
            "data/solve_rate/never_share": float((solved == 0).mean()),
            "data/solve_rate/always_share": float((failed == 0).mean()),
        }

    def state(self) -> dict[str, Any]:
        seen = np.flatnonzero(self._solved + self._failed)
        known = [[row, float(self._solved[row]), float(self._failed[row])] for row in seen.tolist()]
        return {"blocks": self._blocks, "waiting": list(self._waiting), "known": known}

    def load_state(self, state: dict[str, Any], /) -> None:
        self._blocks, self._waiting = state["blocks"], list(state["waiting"])
        for row, solved, failed in state["known"]:
            self._solved[row], self._failed[row] = solved, failed
