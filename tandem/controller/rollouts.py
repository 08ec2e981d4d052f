"""Prompts -> scored groups, ahead of training by at most `trainer.max_staleness` steps, in the order of the prompts.

    draw --admitted by version--> Engines --> scoring --> decided in order --> kept --take--> a training step
                                                              |
                                                              +--> uninformative (dynamic sampling): one more draw

Draw n is the n-th prompt in the order of the epochs; its row and seeds are functions of n. With P groups a step,
weights of version v served and k the most staleness:

    admitted   draw n, when n - dropped < (v + 1 + k) * P
    trained    the next P kept groups in the order of draws, waiting for them; nothing else

So the group at place m of those that are kept has m <= n - dropped < (v + 1 + k) * P. It is trained by the weights of
version m // P <= v + k, and its tokens were made by v or later: no token is staler than k, and nothing is ever dropped
for its age. When a step waits for groups, its draws have been admitted, and every answer ends, so nothing waits for
ever. The state of a run is one number, the cursor: draws before it are trained or dropped. docs/async.md explains all
of it.

Concurrency: everything runs on the controller's thread.

consumes:     draws, when a version is published, a step begins or one is to be replaced; answers and scores, in
              callbacks of `Cluster.watch`
produces:     the groups of each step
waits for:    `take` for scored groups; where the run must not depend on time, `publish`, `settle`, `finished` and, on
              shared devices, `to_training` for what runs
unblocked by: engines and reward workers; a call, an engine without an answer and a reward function that take too long
              are ended
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tandem.activity import begin, count
from tandem.controller.clock import RolloutTimes
from tandem.controller.engines import Engines, Rollout
from tandem.controller.reward_model import Rewards, scores_groups
from tandem.controller.scoring import ScoresLookedAt
from tandem.controller.timesharing import Devices
from tandem.reward.manager import check_share_early, ending_early
from tandem.signals import waits_in_vain
from tandem.types import Finished, Group, Status, StepMetrics, Trajectory
from tandem.workers.rollout import Ask

_FAILED = (Status.REWARD_ERROR, Status.REWARD_TIMEOUT)


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


class _Kept(NamedTuple):
    number: int
    group: Group
    decided: dict[int, list[Group]]
    """By draw: this group, and before it those that were dropped since the one before."""


class RolloutProducer:
    """The producer. It starts with version 0 served, or where `resume` puts it."""

    def __init__(
        self,
        rules: RolloutRules,
        rollout: Rollout,
        reward: Rewards,
        devices: Devices,
        watch: Callable[[], None],
        ask: Callable[[int], Ask],
        *,
        stands_still: bool = False,
        timeout_s: float = math.inf,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`watch` is the cluster's. `ask` gives the row and the seeds of a draw.

        `stands_still`: the engines compute in the processes of models, and do nothing while these train. `timeout_s`:
        an engine that has run so long without an answer is lost (WorkerLost, from whatever the controller waits for).
        """
        self._rules = rules
        self._reward = reward
        self._devices = devices
        self._watch = watch
        self._ask_of = ask
        self._stands_still = stands_still or devices.engine_sleeps("training")
        self._in_rounds = rules.max_staleness == 0 or not rules.partial_rollouts
        """What is asked, and of which version, does not depend on time; nor of which engine, unless `balanced`."""
        size, samples, fixed = rules.groups_per_step, rules.samples_per_ask, self._in_rounds and not rules.balanced
        self._engines = Engines(rollout, samples, size, fixed, self._answered, now, self.only_scores_lack, timeout_s)
        self._version = 0
        self._drawn = self._decided = 0
        """Draws that were admitted, and those that are kept or dropped: all before this one."""
        self._dropped = 0
        self._replaced = 0
        """Dropped draws for which another one may be admitted: in rounds not always all."""
        self._dropped_in_step = 0
        self._taken = 0
        """Groups that were taken for training."""
        self._missing = 0
        """Groups that training waits for."""
        self._answers: dict[int, tuple[list[Trajectory], Trajectory | None]] = {}
        """Answers that are to be scored together with others of their step."""
        self._scoring: dict[int, tuple[list[Trajectory], Trajectory | None]] = {}
        self._scored: dict[int, list[Group]] = {}
        """Groups that wait for a decision on those before them, each with the group of its greedy answer if any."""
        self._restored: dict[int, Finished] = {}
        """What a checkpoint has of draws that are not admitted again yet."""
        self._decisions: dict[int, bool] = {}
        """Draws of a checkpoint that are not decided again yet: whether they were kept."""
        self._since_kept: dict[int, list[Group]] = {}
        self._kept: deque[_Kept] = deque()
        self._times = RolloutTimes(now)
        self._uninformative = 0
        self._closed = self._scores_given_up = False
        self.cursor = 0
        """Draws that training has behind it: all before this one."""
        self.decided: dict[int, Group] = {}
        """By draw: the groups of the step that was taken last, and before each those that were dropped."""

    def take(self, step: int) -> list[Group]:
        """The groups of a step; waits for them. Raises RewardShareExceeded where too many of their rewards failed."""
        size = self._rules.groups_per_step
        begin("generation", size, "prompts")
        looked = ScoresLookedAt(self)
        with self._times.taking():
            self._devices.to_generation()
            self._go_on()
            while (missing := size - len(self._kept)) > 0:
                self._missing = missing
                if not looked.only_scores_lack:
                    count(min(size, len(self._kept) + len(self._answers) + len(self._scoring) + len(self._scored)))
                if self._reward.by_step and all(self._decided + place in self._answers for place in range(missing)):
                    self._score_together(missing, step)
                elif self._under_way:
                    with self._times.waiting(for_rewards=self.only_scores_lack()):
                        self._watch()
                    if scores_groups(self._reward):
                        looked.look()
                else:
                    self._next_round()
            self._missing = 0
        kept = [self._kept.popleft() for _ in range(size)]
        self._taken, self.cursor = self._taken + size, kept[-1].number + 1
        groups = [one.group for one in kept]
        self._times.took(groups)
        self.decided = {draw: decided[0] for one in kept for draw, decided in one.decided.items()}
        self._uninformative = sum(not is_informative(group, self._rules.mask_truncated) for group in groups)
        self._reward.check_share([group for one in kept for decided in one.decided.values() for group in decided])
        return groups

    def to_training(self) -> None:
        """The models compute until the next `publish`; engines that share their devices stand still meanwhile."""
        if self._stands_still:
            self.settle()
            self._engines.paused = True
        self._devices.to_training()
        if self._engines.paused and not self._stands_still:  # for the reward model alone
            self._go_on()

    def to_update(self) -> None:
        """The reference has nothing more to compute until the next `publish`."""
        self._devices.to_update()

    def publish(self, version: int) -> None:
        """Serve the actor's present weights as `version`; with them further draws are admitted."""
        self.settle()
        self._devices.publish(version)
        self._times.published()
        self._version = version
        self._replaced = self._dropped
        if self._rules.max_staleness:
            self._go_on()

    def settle(self) -> None:
        """Wait for what runs, where the run must not depend on time: before a publish, validation or a checkpoint."""
        since = time.monotonic()
        with self._times.settling():
            while self._in_rounds and self._under_way:
                if not self._engines.unanswered and waits_in_vain(since):
                    self.give_up_scores()
                elif self._engines.paused:
                    self._devices.to_generation()
                    self._go_on()
                else:
                    self._watch()

    def give_up_scores(self) -> None:
        """The run is to stop, and rewards do not come: answers stay without scores, as a checkpoint may have them."""
        if scores_groups(self._reward):
            self._reward.forget()
        self._answers |= self._scoring
        self._scoring.clear()
        self._scores_given_up = True

    def finished(self) -> dict[int, Finished]:
        """By draw: the groups that no step has taken yet, for a checkpoint."""
        self.settle()
        kept = {number: (groups, number == one.number) for one in self._kept for number, groups in one.decided.items()}
        dropped = {number: (groups, False) for number, groups in self._since_kept.items()}
        scored = {number: (groups, self._decisions.get(number)) for number, groups in self._scored.items()}
        answers = {
            number: Finished(Group(siblings, []), greedy, self._decisions.get(number))
            for number, (siblings, greedy) in self._answers.items()
        }
        return {number: _finished(*one) for number, one in (kept | dropped | scored).items()} | answers

    def resume(self, version: int, cursor: int, finished: Mapping[int, Finished]) -> None:
        """Go on after step `version`, whose weights are served, at a cursor; `finished` groups are not asked again.

        Where nothing depends on time, as many draws are admitted as were before: all of them are in `finished`.
        """
        self._version, self.cursor = version, cursor
        self._drawn = self._decided = cursor
        self._taken = version * self._rules.groups_per_step
        self._dropped = self._replaced = cursor - self._taken
        self._restored = dict(finished)
        self._decisions = {number: one.kept for number, one in finished.items() if one.kept is not None}
        if self._in_rounds and finished:
            self._replaced = max(self._replaced, max(finished) + 1 - self._first_without_replacements)

    def metrics(self) -> StepMetrics:
        """Of the step that was taken last."""
        metrics = self._times.metrics()
        if self._rules.max_replaced:
            metrics["rollout/resample/replaced"] = float(len(self.decided) - self._rules.groups_per_step)
            metrics["rollout/resample/uninformative"] = float(self._uninformative)
        if self._rules.max_staleness:
            metrics["time/rollout_idle_s"] = self._engines.take_idle_s()
        return metrics

    def close(self) -> None:
        """Forget what runs: answers and scores that still come are nobody's."""
        self._closed = self._engines.paused = True

    @property
    def _under_way(self) -> bool:
        return self._engines.unanswered > 0 or bool(self._scoring)

    @property
    def answers_per_step(self) -> int:
        """Of all prompts of a step, where none is replaced."""
        return self._rules.groups_per_step * self._rules.samples_per_ask

    @property
    def _most_answers(self) -> int:
        """That a step can have, with those of prompts that are replaced."""
        return (self._rules.groups_per_step + self._rules.max_replaced) * self._rules.samples_per_ask

    def groups_so_far(self) -> list[Group]:
        """Those of the draws that the next step has whatever is replaced, as far as they are answered: with the scores
        that have come."""
        first = range(self.cursor, self.cursor + self._rules.groups_per_step)
        decided = [one.decided for one in self._kept] + [self._since_kept]
        known = {number: groups[0] for some in decided for number, groups in some.items()}
        known |= {number: groups[0] for number, groups in self._scored.items()}
        assert scores_groups(self._reward)
        known |= {number: self._reward.so_far(siblings) for number, (siblings, _) in self._scoring.items()}
        return [known[number] for number in first if number in known]

    def check_share_so_far(self, groups: Sequence[Group]) -> None:
        """Raises RewardShareExceeded as soon as `take` is bound to; `groups` are those of `groups_so_far`."""
        left = self._most_answers - sum(len(group.scores) for group in groups)
        check_share_early(self._reward.check_share, groups, left)

    def only_scores_lack(self) -> bool:
        """Training waits, and all answers that it waits for are there, unless some are dropped."""
        lacking = range(self._decided, min(self._decided + self._missing, self._drawn))
        return self._missing > 0 and all(number in self._scoring or number in self._scored for number in lacking)

    def _go_on(self) -> None:
        self._engines.paused = False
        self._admit()
        self._engines.give()

    def _admit(self) -> None:
        limit = self._first_without_replacements + self._replaced
        new = range(self._drawn, max(limit, self._drawn))
        self._drawn = new.stop
        restored = {number: self._restored.pop(number) for number in new if number in self._restored}
        self._engines.add({number: self._ask_of(number) for number in new if number not in restored})
        for number, finished in restored.items():
            if finished.group.scores or finished.kept is False:
                self._scored[number] = [finished.group]
            else:
                self._answered(number, finished.group.trajectories, finished.greedy)
        self._decide()

    @property
    def _first_without_replacements(self) -> int:
        """The first draw that may not be admitted yet, had none been dropped."""
        rules = self._rules
        return min(self._version + 1 + rules.max_staleness, rules.total_steps) * rules.groups_per_step

    def _next_round(self) -> None:
        """Replace what was dropped, after everything that was asked has been decided."""
        drawn, self._replaced = self._drawn, self._dropped
        self._go_on()
        assert self._drawn > drawn, "groups are missing, and nothing is under way"

    def _answered(self, number: int, siblings: list[Trajectory], greedy: Trajectory | None) -> None:
        if self._closed:
            return
        if not scores_groups(self._reward) or self._scores_given_up:
            self._answers[number] = siblings, greedy
            return
        self._scoring[number] = siblings, greedy
        answers = [siblings] if greedy is None else [siblings, [greedy]]
        self._reward.submit(answers, self._step_of(number), partial(self._take_scores, number))

    def _score_together(self, count: int, step: int) -> None:
        """Score the answers that a step lacks; where the reward model takes its turn on the devices, engines rest."""
        numbers = range(self._decided, self._decided + count)
        answers = [self._answers[number] for number in numbers]
        begin("rewards")
        self._engines.paused = self._devices.engine_sleeps("scoring")
        with self._times.waiting(for_rewards=True):
            with ending_early(self._most_answers - sum(len(siblings) for siblings, _ in answers)):
                groups = self._reward.score([siblings for siblings, _ in answers], step)
            greedy = [[answer] for _, answer in answers if answer is not None]
            greedy_groups = self._reward.score(greedy, step) if greedy else []
        for place, number in enumerate(numbers):
            del self._answers[number]
            self._take_scores(number, [groups[place], *greedy_groups[place : place + 1]])
        if len(self._kept) < self._rules.groups_per_step:
            begin("generation", self._rules.groups_per_step, "prompts")
            self._devices.to_generation()
            self._go_on()

    def _take_scores(self, number: int, groups: list[Group]) -> None:
        if self._closed:
            return
        self._scoring.pop(number, None)
        if len(groups) > 1:
            groups[0].greedy = groups[1].scores[0]
        self._scored[number] = groups
        dropped = self._dropped
        self._decide()
        if self._dropped > dropped and not self._in_rounds:
            self._replaced = self._dropped
            self._admit()
            self._engines.give()

    def _decide(self) -> None:
        """Keep or drop, in the order of the draws, as far as they are scored."""
        size = self._rules.groups_per_step
        while self._decided in self._scored:
            number = self._decided
            self._since_kept[number] = groups = self._scored.pop(number)
            self._decided += 1
            informative = is_informative(groups[0], self._rules.mask_truncated)
            wanted = informative or self._dropped_in_step == self._rules.max_replaced
            if self._decisions.pop(number, wanted):
                self._kept.append(_Kept(number, groups[0], self._since_kept))
                self._since_kept = {}
                if (self._taken + len(self._kept)) % size == 0:
                    self._dropped_in_step = 0
            else:
                self._dropped += 1
                self._dropped_in_step += 1

    def _step_of(self, number: int) -> int:
        return number // self._rules.groups_per_step + 1


def _finished(groups: list[Group], kept: bool | None) -> Finished:
    """A group, and that of its greedy answer if any, for a checkpoint: without scores where a reward failed. A resumed
    run has them scored again, unless they were dropped, for what made it fail may be over; a run that this has stopped
    would stop once more."""
    if not any(score.failure in _FAILED for group in groups for score in group.scores):
        return Finished(groups[0], kept=kept)
    greedy = groups[1].trajectories[0] if len(groups) > 1 else None
    return Finished(Group(groups[0].trajectories, []), greedy, kept)


def is_informative(group: Group, mask_truncated: bool) -> bool:
    """Its rewards differ, so that a group-relative advantage is not zero everywhere, and not all of it was cut where
    answers that were cut train nothing."""
    differ = len({score.value for score in group.scores if score.value is not None}) > 1
    return differ and not (mask_truncated and all(one.status is Status.TRUNCATED for one in group.trajectories))
