"""Between the answers and scores that a step waits for: how far they are, and whether to wait on."""

import time
from collections.abc import Sequence
from typing import Protocol

from tandem.activity import begin
from tandem.errors import StepGivenUp
from tandem.reward.progress import ScoringProgress
from tandem.signals import REWARDS_S, waits_in_vain
from tandem.types import Group

_LOOK_S = 0.5


class Waits(Protocol):
    """Who waits for the groups of a step."""

    @property
    def answers_per_step(self) -> int:
        """Of all prompts of a step, where none is replaced."""
        ...

    def only_scores_lack(self) -> bool:
        """Every answer that is waited for is there."""
        ...

    def groups_so_far(self) -> list[Group]:
        """Of those that the step is sure to have, what there is."""
        ...

    def check_share_so_far(self, groups: Sequence[Group]) -> None:
        """Raises RewardShareExceeded where the step is bound to."""
        ...

    def give_up_scores(self) -> None:
        """No score is waited for any more."""
        ...


class ScoresLookedAt:
    """Made when a step begins to wait."""

    def __init__(self, step: Waits) -> None:
        self._step = step
        self._next = time.monotonic() + _LOOK_S
        self._progress: ScoringProgress | None = None
        self._since = 0.0
        """Since when scores alone are waited for."""

    @property
    def only_scores_lack(self) -> bool:
        """Whether the stage that is shown is that of the rewards."""
        return self._progress is not None

    def look(self) -> None:
        """Raises RewardShareExceeded where that is certain, and StepGivenUp where the run is to stop and scores do not
        come. To be called often."""
        now, only_scores = time.monotonic(), self._step.only_scores_lack()
        if only_scores and self._progress is None:
            begin("rewards")
            self._progress, self._since = ScoringProgress(self._step.answers_per_step), now
        if only_scores and waits_in_vain(self._since):
            self._step.give_up_scores()
            raise StepGivenUp(f"the rewards are not there {REWARDS_S:g} s later")
        if now < self._next:
            return
        self._next = now + _LOOK_S
        groups = self._step.groups_so_far()
        if self._progress is not None:
            self._progress.tell(groups)
        self._step.check_share_so_far(groups)
