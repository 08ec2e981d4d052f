"""Prompts -> scored groups, ahead of training by at most `trainer.max_staleness` steps, in the order of the prompts.

    draw --Admission--> Engines --GroupScoring--> decided in order --> kept --take--> a training step
               ^                                         |
               +-----------------------------------------+ dropped (dynamic sampling): one more draw

`Admission` says which draws are asked and which groups are trained, and why no token is staler than that and nothing
waits for ever. docs/async.md explains all of it.

Concurrency: everything runs on the controller's thread.

consumes:     draws, when a version is published, a step begins or one is to be replaced; answers and scores, in
              callbacks of `Cluster.watch`
produces:     the groups of each step
waits for:    `take` for scored groups; where the run must not depend on time, `publish`, `settle`, `finished` and, on
              shared devices, `to_preparation` for what runs
unblocked by: engines and reward workers; a call, an engine without an answer and a reward function that take too long
              are ended
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, auto

from tandem.activity import begin, count
from tandem.controller.admission import Admission, RolloutRules, Timing
from tandem.controller.clock import RolloutTimes
from tandem.controller.engines import Engines, RolloutEngines
from tandem.controller.reward_model import Rewards, scores_groups
from tandem.controller.saved_draws import finished_draws, restore
from tandem.controller.scoring import GroupScoring, ScoredDraw, ScoresLookedAt
from tandem.controller.timesharing import Devices
from tandem.signals import waits_in_vain
from tandem.types import Group, SavedGroup, Status, StepMetrics
from tandem.workers.rollout import Ask


class Sharing(Enum):
    """What engines do while models train."""

    GO_ON = auto()
    """They go on."""
    STANDS_STILL = auto()
    """Nothing: they compute in the models' processes, or on their devices."""


class RolloutProducer:
    """The producer. It starts with version 0 served, or where `resume` puts it."""

    def __init__(
        self,
        rules: RolloutRules,
        rollout: RolloutEngines,
        reward: Rewards,
        devices: Devices,
        watch: Callable[[], None],
        ask: Callable[[int], Ask],
        *,
        sharing: Sharing = Sharing.GO_ON,
        timeout_s: float = math.inf,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`watch` is the cluster's. `ask` gives the row and the seeds of a draw. `timeout_s`: an engine that has run so
        long without an answer is lost (WorkerLost, from whatever the controller waits for).
        """
        self._rules = rules
        self._reward = reward
        self._devices = devices
        self._watch = watch
        self._ask_of = ask
        self._sharing = sharing
        self._scoring = GroupScoring(rules, reward, self._scored)
        self._engines = Engines(
            rollout,
            rules.samples_per_ask,
            rules.groups_per_step,
            rules.timing is Timing.REPRODUCIBLE and not rules.balanced,
            self._scoring.answered,
            now,
            self._only_scores_lack,
            timeout_s,
        )
        self._admission = Admission(rules)
        self._saved: dict[int, SavedGroup] = {}
        """What a checkpoint has of draws that are not decided again yet."""
        self._untaken: dict[int, ScoredDraw] = {}
        """Groups that no step has taken yet, in the order of draws, each with the group of its greedy answer if any."""
        self._kept: deque[int] = deque()
        """Those of them that are not dropped."""
        self._missing = 0
        """Groups that training waits for."""
        self._times = RolloutTimes(now)
        self.cursor = 0
        """Draws that training has behind it: all before this one."""
        self.decided: dict[int, Group] = {}
        """By draw: the groups of the step that was taken last, and before each those that were dropped."""

    def take(self, step: int) -> list[Group]:
        """The groups of a step; waits for them. Raises RewardShareExceeded where too many of their rewards failed."""
        size = self._rules.groups_per_step
        begin("generation", size, "prompts")
        looked = ScoresLookedAt(
            self._scoring, self._rules.answers_per_step, self._only_scores_lack, self._groups_so_far
        )
        with self._times.taking():
            self._devices.to_generation()
            self._go_on()
            while missing := self._admission.missing:
                self._missing = missing
                if not looked.only_scores_lack:
                    count(min(size, len(self._kept) + len(self._scoring)))
                if self._reward.by_step and all(draw in self._scoring.unscored for draw in self._next_draws(missing)):
                    self._score_together(missing, step)
                elif self._under_way:
                    with self._times.waiting(for_rewards=self._only_scores_lack()):
                        self._watch()
                    if scores_groups(self._reward):
                        looked.look()
                else:
                    self._replace_dropped()
            self._missing = 0
        return self._take_kept()

    def to_preparation(self) -> None:
        """The models compute until the next `publish`; engines that share their devices stand still meanwhile."""
        if self._sharing is Sharing.STANDS_STILL:
            self.settle()
            self._engines.paused = True
        self._devices.to_preparation()
        if self._engines.paused and self._sharing is Sharing.GO_ON:  # for the reward model alone
            self._go_on()

    def to_update(self) -> None:
        """The reference scores nothing more until the next `publish`; its own weights may still move."""
        self._devices.to_update()

    def publish(self, version: int) -> None:
        """Serve the actor's present weights as `version`; with them further draws are admitted."""
        self.settle()
        self._devices.publish(version)
        self._times.published()
        self._admission = self._admission.publish(version)
        if self._rules.max_staleness:
            self._go_on()

    def settle(self) -> None:
        """Wait for what runs, where the run must not depend on time: before a publish, validation or a checkpoint."""
        since = time.monotonic()
        with self._times.settling():
            while self._rules.timing is Timing.REPRODUCIBLE and self._under_way:
                if not self._engines.unanswered and waits_in_vain(since):
                    self._scoring.give_up()
                elif self._engines.paused:
                    self._devices.to_generation()
                    self._go_on()
                else:
                    self._watch()

    def finished(self) -> dict[int, SavedGroup]:
        """By draw: the groups that no step has taken yet, for a checkpoint."""
        self.settle()
        before = {draw: one.kept for draw, one in self._saved.items()}
        return finished_draws(self._untaken, self._scoring, before | {d: d in self._kept for d in self._untaken})

    def resume(self, version: int, cursor: int, finished: Mapping[int, SavedGroup]) -> None:
        """Go on after step `version`, whose weights are served, at a cursor; `finished` groups are not asked again.

        Where nothing depends on time, as many draws are admitted as were before: all of them are in `finished`.
        """
        self._admission = Admission.resumed(self._rules, version, cursor, finished)
        self._saved = dict(finished)
        self.cursor = cursor

    def metrics(self) -> StepMetrics:
        """Of the step that was taken last."""
        metrics = self._times.metrics()
        if self._rules.max_replaced:
            replaced = len(self.decided) - self._rules.groups_per_step
            uninformative = sum(not self._is_informative(group) for group in self.decided.values())
            metrics["rollout/resample/replaced"] = float(replaced)
            metrics["rollout/resample/uninformative"] = float(uninformative - replaced)
        if self._rules.max_staleness:
            metrics["time/rollout_idle_s"] = self._engines.take_idle_s()
        return metrics

    def close(self) -> None:
        """Forget what runs: answers and scores that still come are nobody's."""
        self._engines.paused = True
        self._scoring.close()

    @property
    def _under_way(self) -> bool:
        return self._engines.unanswered > 0 or self._scoring.under_way

    def _next_draws(self, count: int) -> range:
        """That are to be decided."""
        return range(self._admission.decided, self._admission.decided + count)

    def _only_scores_lack(self) -> bool:
        """Training waits, and all answers that it waits for are there, unless some are dropped."""
        lacking = self._next_draws(self._missing)
        return self._missing > 0 and self._scoring.all_answered(n for n in lacking if n < self._admission.admitted)

    def _groups_so_far(self) -> list[Group]:
        """Those of the draws that the next step has whatever is replaced, as far as they are answered: with the scores
        that have come."""
        first = range(self.cursor, self.cursor + self._rules.groups_per_step)
        groups = (self._untaken[n].group if n in self._untaken else self._scoring.so_far(n) for n in first)
        return [group for group in groups if group is not None]

    def _go_on(self) -> None:
        self._engines.paused = False
        self._admit()
        self._engines.give()

    def _admit(self) -> None:
        """Have all draws answered that may be asked, by the engines or a checkpoint."""
        while self._admission.admits:
            self._admission, new = self._admission.admit()
            self._engines.add({draw: self._ask_of(draw) for draw in new if draw not in self._saved})
            for draw in new:
                if draw in self._saved:
                    restore(draw, self._saved[draw], self._scoring)
            self._decide()

    def _scored(self) -> None:
        """A group has its scores."""
        self._decide()
        if self._admission.admits:
            self._admit()
            self._engines.give()

    def _decide(self) -> None:
        """Keep or drop, in the order of the draws, as far as they are scored."""
        while (draw := self._admission.decided) in self._scoring.scored:
            self._untaken[draw] = scored = self._scoring.scored.pop(draw)
            before = self._saved.pop(draw).kept if draw in self._saved else None
            self._admission, kept = self._admission.decide(self._is_informative(scored.group), before)
            if kept:
                self._kept.append(draw)

    def _score_together(self, count: int, step: int) -> None:
        """Score the answers that a step lacks; where the reward model takes its turn on the devices, engines rest."""
        begin("rewards")
        self._engines.paused = self._devices.engine_sleeps("scoring")
        with self._times.waiting(for_rewards=True):
            by_draw = self._scoring.score_together(self._next_draws(count), step)
        for draw, scored in by_draw.items():
            self._scoring.take_scores(draw, scored)
        if self._admission.missing:
            begin("generation", self._rules.groups_per_step, "prompts")
            self._devices.to_generation()
            self._go_on()

    def _replace_dropped(self) -> None:
        """After everything that was asked has been decided."""
        admitted, self._admission = self._admission.admitted, self._admission.replace_dropped()
        self._go_on()
        assert self._admission.admitted > admitted, "groups are missing, and nothing is under way"

    def _take_kept(self) -> list[Group]:
        """The oldest groups that are kept, with those before them behind the cursor."""
        taken = [self._kept.popleft() for _ in range(self._rules.groups_per_step)]
        self._admission, self.cursor = self._admission.take(), taken[-1] + 1
        decided = {draw: self._untaken.pop(draw) for draw in [*self._untaken] if draw < self.cursor}
        self.decided = {draw: scored.group for draw, scored in decided.items()}
        groups = [self.decided[draw] for draw in taken]
        self._times.took(groups)
        self._reward.check_share([group for scored in decided.values() for group in scored.groups])
        return groups

    def _is_informative(self, group: Group) -> bool:
        return is_informative(group, self._rules.mask_truncated)


def is_informative(group: Group, mask_truncated: bool) -> bool:
    """Its rewards differ, so that a group-relative advantage is not zero everywhere, and not all of it was cut where
    answers that were cut train nothing."""
    differ = len({score.value for score in group.scores if score.value is not None}) > 1
    return differ and not (mask_truncated and all(one.status is Status.TRUNCATED for one in group.trajectories))
