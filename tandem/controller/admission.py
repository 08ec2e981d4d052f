"""Which draws may be asked, and which of their groups train: the rule of docs/async.md, as a value.

    admit --> decided in order --> kept --take--> a training step
      ^               |
      +---------------+ dropped (dynamic sampling): one more draw

Draw n is the n-th prompt that the sampler gives; its seeds are functions of n, and with the sampler `epochs` its row,
too. With P groups a step, weights of version v served and k the most staleness:

    admitted   draw n, when n - dropped < (v + 1 + k) * P
    trained    the next P kept groups in the order of draws, waiting for them; nothing else

So the group at place m of those that are kept has m <= n - dropped < (v + 1 + k) * P. It is trained by the weights of
version m // P <= v + k, and its tokens were made by v or later: no token is staler than k, and nothing is ever dropped
for its age. When a step waits for groups, its draws have been admitted, and every answer ends, so nothing waits for
ever. What a checkpoint needs of this is one number, the cursor: draws before it are trained or dropped; and where the
run does not depend on time, the draws beyond it that are answered, which are all that were admitted.
tests/unit/test_controller_admission.py looks for a run in which some of this does not hold.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Self


class Timing(Enum):
    """Whether what is asked, and of which version, may depend on how long things take."""

    REPRODUCIBLE = auto()
    """It does not: a publish waits for what runs, and what is dropped is replaced when nothing is under way."""
    FREE = auto()
    """A publish falls into answers that are being made, and what is dropped is replaced at once."""


@dataclass(frozen=True, slots=True)
class RolloutRules:
    """How far ahead groups are made, and which."""

    groups_per_step: int
    samples_per_ask: int
    total_steps: int
    max_staleness: int = 0
    partial_rollouts: bool = True
    """A publish falls into answers that are being made; else it waits for them, and the run does not depend on time."""
    balanced: bool = False
    """Engines that are free take what waits also where nothing else depends on time; else each has a fixed share."""
    max_replaced: int = 0
    """Uninformative groups that further draws replace, in each step at most."""
    mask_truncated: bool = False
    """Answers that were cut train nothing."""

    @property
    def timing(self) -> Timing:
        return Timing.FREE if self.max_staleness and self.partial_rollouts else Timing.REPRODUCIBLE

    @property
    def answers_per_step(self) -> int:
        """Of all prompts of a step, where none is replaced."""
        return self.groups_per_step * self.samples_per_ask

    @property
    def most_answers_per_step(self) -> int:
        """With those of prompts that are replaced."""
        return (self.groups_per_step + self.max_replaced) * self.samples_per_ask

    def step_of(self, draw: int) -> int:
        """The step that the draw would be in, were none dropped; from 1."""
        return draw // self.groups_per_step + 1


@dataclass(frozen=True, slots=True)
class Admission:
    """How far a run is. Each event gives the next value: `admit`, `decide`, `take`, `publish`, `replace_dropped`."""

    rules: RolloutRules
    version: int = 0
    """Of the weights that are served."""
    admitted: int = 0
    """Draws that were admitted: all before this one."""
    decided: int = 0
    """Draws that were kept or dropped: all before this one."""
    kept: int = 0
    taken: int = 0
    """Groups that steps have taken, of those that were kept."""
    replaceable: int = 0
    """Dropped draws for which another one may be admitted: in rounds not always all."""
    dropped_in_step: int = 0
    """Draws that were dropped for the step whose groups are not all kept yet."""

    @classmethod
    def resumed(cls, rules: RolloutRules, version: int, cursor: int, saved: Collection[int] = ()) -> Self:
        """After step `version`, whose weights are served; draws from the cursor on are admitted and decided again.

        In rounds as many are admitted as were before: `saved`, those that a checkpoint has, are all of them.
        """
        taken = version * rules.groups_per_step
        then = cls(rules, version, cursor, cursor, taken, taken, replaceable=cursor - taken)
        if rules.timing is Timing.FREE or not saved:
            return then
        return replace(then, replaceable=max(then.replaceable, max(saved) + 1 - then._limit_without_dropped))

    @property
    def dropped(self) -> int:
        return self.decided - self.kept

    @property
    def missing(self) -> int:
        """Groups that the next step lacks."""
        return max(0, self.taken + self.rules.groups_per_step - self.kept)

    @property
    def admits(self) -> bool:
        """Whether there are draws to `admit`."""
        return self._limit > self.admitted

    def admit(self) -> tuple[Self, range]:
        """And the draws that may be asked now."""
        new = range(self.admitted, max(self._limit, self.admitted))
        return replace(self, admitted=new.stop), new

    def decide(self, informative: bool, before: bool | None = None) -> tuple[Self, bool]:
        """And whether the next draw's group is kept, or dropped. `before`: what a run that this one goes on with had
        decided, of which draws were admitted."""
        assert self.decided < self.admitted, "a draw that nobody was asked"
        keeps = informative or self.dropped_in_step == self.rules.max_replaced if before is None else before
        if keeps:
            kept = self.kept + 1
            in_step = self.dropped_in_step if kept % self.rules.groups_per_step else 0
            return replace(self, decided=self.decided + 1, kept=kept, dropped_in_step=in_step), True
        then = replace(self, decided=self.decided + 1, dropped_in_step=self.dropped_in_step + 1)
        return then if self.rules.timing is Timing.REPRODUCIBLE else then.replace_dropped(), False

    def take(self) -> Self:
        """A step takes the oldest groups that are kept."""
        assert not self.missing, "groups that are not kept yet"
        return replace(self, taken=self.taken + self.rules.groups_per_step)

    def publish(self, version: int) -> Self:
        """Weights are served that a step has trained."""
        return replace(self.replace_dropped(), version=version)

    def replace_dropped(self) -> Self:
        """All that was dropped may be replaced: in rounds when nothing else is under way."""
        return replace(self, replaceable=self.dropped)

    @property
    def _limit(self) -> int:
        """The first draw that may not be asked yet."""
        return self._limit_without_dropped + self.replaceable

    @property
    def _limit_without_dropped(self) -> int:
        steps = min(self.version + 1 + self.rules.max_staleness, self.rules.total_steps)
        return steps * self.rules.groups_per_step
