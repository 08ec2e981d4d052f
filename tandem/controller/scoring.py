"""Answers -> scored groups, by draw; and the wait of a step for them.

    answered --+--> submitted, one by one -----------------------+--> scored, until they are decided
               +--> unscored, until `score_together` has its turn --+

Concurrency: everything runs on the controller's thread; scores of what is submitted come in callbacks of
`Cluster.watch`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from tandem.activity import begin
from tandem.controller.admission import RolloutRules
from tandem.controller.reward_model import GroupRewards, Rewards, scores_groups
from tandem.errors import StepGivenUp
from tandem.reward.manager import check_share_early, ending_early
from tandem.reward.progress import ScoringProgress
from tandem.signals import REWARDS_S, waits_in_vain
from tandem.types import Group, Trajectory

_LOOK_S = 0.5
_LOOKING_SHARE, _LONGEST_GAP_S = 0.02, 10.0
"""Of the thread's time, spent on looks: each takes the longer the more prompts a step has; and the longest time between
two, whatever that share comes to."""


class Answers(NamedTuple):
    """Those of one draw."""

    siblings: list[Trajectory]
    greedy: Trajectory | None
    """The greedy one, where it is wanted."""


class ScoredDraw(NamedTuple):
    """The answers of one draw with their scores."""

    group: Group
    greedy: Group | None = None
    """That of the greedy answer alone, where there is one."""

    @property
    def groups(self) -> list[Group]:
        return [self.group] if self.greedy is None else [self.group, self.greedy]


class GroupScoring:
    """What is answered and not decided yet."""

    def __init__(self, rules: RolloutRules, reward: Rewards, scored: Callable[[], None]) -> None:
        """`scored` is called after each draw that has come to `self.scored` by its scores."""
        self._rules = rules
        self._reward = reward
        self._submits_to: GroupRewards | None = reward if scores_groups(reward) else None
        self._note_scored = scored
        self._closed = False
        self._submitted: dict[int, Answers] = {}
        self.unscored: dict[int, Answers] = {}
        """Answers that are to be scored together with others of their step, or of which no score is waited for."""
        self.scored: dict[int, ScoredDraw] = {}
        """Draws that are not decided yet."""

    def __len__(self) -> int:
        return len(self._submitted) + len(self.unscored) + len(self.scored)

    @property
    def under_way(self) -> bool:
        """Scores will come."""
        return bool(self._submitted)

    def answered(self, draw: int, siblings: list[Trajectory], greedy: Trajectory | None) -> None:
        """Take in answers, and have them scored as soon as that may be."""
        if self._closed:
            return
        if self._submits_to is None:
            self.unscored[draw] = Answers(siblings, greedy)
            return
        self._submitted[draw] = Answers(siblings, greedy)
        answers = [siblings] if greedy is None else [siblings, [greedy]]
        self._submits_to.submit(answers, self._rules.step_of(draw), partial(self._take_groups, draw))

    def score_together(self, draws: Iterable[int], step: int) -> dict[int, ScoredDraw]:
        """Draws that are unscored with their scores, for `take_scores`; waits. Raises RewardShareExceeded."""
        answers = {draw: self.unscored[draw] for draw in draws}
        with ending_early(self._rules.most_answers_per_step - sum(len(one.siblings) for one in answers.values())):
            groups = self._reward.score([one.siblings for one in answers.values()], step)
        greedy = [[one.greedy] for one in answers.values() if one.greedy is not None]
        greedy_groups = self._reward.score(greedy, step) if greedy else []
        return {
            draw: ScoredDraw(groups[place], *greedy_groups[place : place + 1]) for place, draw in enumerate(answers)
        }

    def take_scores(self, draw: int, scored: ScoredDraw) -> None:
        """Take in the scores of a draw's answers."""
        if self._closed:
            return
        self._submitted.pop(draw, None)
        self.unscored.pop(draw, None)
        if scored.greedy is not None:
            scored.group.greedy = scored.greedy.scores[0]
        self.scored[draw] = scored
        self._note_scored()

    def _take_groups(self, draw: int, groups: list[Group]) -> None:
        """What `submit` gives: the group of the answers, and that of the greedy one, if any."""
        self.take_scores(draw, ScoredDraw(*groups))

    def so_far(self, draw: int) -> Group | None:
        """A draw's group, or one that is being scored with the scores that have come; None where its answers lack."""
        if draw in self.scored:
            return self.scored[draw].group
        if draw not in self._submitted:
            return None
        assert self._submits_to is not None
        return self._submits_to.so_far(self._submitted[draw].siblings)

    def all_answered(self, draws: Iterable[int]) -> bool:
        """Nothing but scores lacks of these draws."""
        return all(draw in self._submitted or draw in self.scored for draw in draws)

    def check_share_early(self, groups: Sequence[Group]) -> None:
        """Raises RewardShareExceeded as soon as a step that has these groups among its own is bound to."""
        left = self._rules.most_answers_per_step - sum(len(group.scores) for group in groups)
        check_share_early(self._reward.check_share, groups, left)

    def give_up(self) -> None:
        """The run is to stop, and rewards do not come: answers stay without scores, as a checkpoint may have them."""
        if self._submits_to is not None:
            self._submits_to.forget()
        self._submits_to = None
        self.unscored |= self._submitted
        self._submitted.clear()

    def close(self) -> None:
        """Answers and scores that still come are nobody's."""
        self._closed = True


class ScoresLookedAt:
    """Between the answers and the scores that a step waits for: how far they are, and whether to wait on. Made when it
    begins to wait."""

    def __init__(
        self,
        scoring: GroupScoring,
        answers_per_step: int,
        only_scores_lack: Callable[[], bool],
        groups_so_far: Callable[[], list[Group]],
    ) -> None:
        """`only_scores_lack`: every answer that is waited for is there. `groups_so_far`: of those that the step is sure
        to have, what there is."""
        self._scoring = scoring
        self._answers_per_step = answers_per_step
        self._only_scores_lack = only_scores_lack
        self._groups_so_far = groups_so_far
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
        now, only_scores = time.monotonic(), self._only_scores_lack()
        if only_scores and self._progress is None:
            begin("rewards")
            self._progress, self._since = ScoringProgress(self._answers_per_step), now
        if only_scores and waits_in_vain(self._since):
            self._scoring.give_up()
            raise StepGivenUp(f"the rewards are not there {REWARDS_S:g} s later")
        if now < self._next:
            return
        begun_s = time.thread_time()
        groups = self._groups_so_far()
        if self._progress is not None:
            self._progress.tell(groups)
        self._scoring.check_share_early(groups)
        gap_s = max(_LOOK_S, (time.thread_time() - begun_s) / _LOOKING_SHARE)
        self._next = time.monotonic() + min(gap_s, _LONGEST_GAP_S)
