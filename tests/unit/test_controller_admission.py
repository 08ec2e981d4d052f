"""The rule of admission over random runs: staleness, order, replacements, resumes, an end; and mutants of it."""

# ruff: noqa: E501 - a mutant is a line

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tandem.controller import admission as real
from tests.mutants import mutated


class Run(RuleBasedStateMachine):
    """What a producer does with an `Admission`, whenever it may; answers come in any order."""

    module: ModuleType = real

    @initialize(
        size=st.integers(1, 4),
        steps=st.integers(1, 6),
        staleness=st.sampled_from([0, 1, 2, 5]),
        partial=st.booleans(),
        most=st.sampled_from([0, 1, 3]),
        seed=st.integers(0, 2**32),
    )
    def begin(self, size: int, steps: int, staleness: int, partial: bool, most: int, seed: int) -> None:
        self.rules = real.RolloutRules(size, 1, steps, staleness, partial, max_replaced=most * size)
        self.in_rounds = staleness == 0 or not partial
        self.now: Any = self.module.Admission(self.rules)
        self.random = Random(seed)
        self.share = self.random.choice([0.2, 0.7])
        self.informative: dict[int, bool] = {}
        """By draw, when it is decided first."""
        self.version_of: dict[int, int] = {}
        """By draw: that of the weights which are served when it is asked."""
        self.answered: set[int] = set()
        self.decided: dict[int, bool] = {}
        """By draw that is decided: whether it was kept."""
        self.before: dict[int, bool] = {}
        """The same of a run that this one goes on with, until it is decided again."""
        self.saved: set[int] = set()
        self.kept: list[int] = []
        self.asked_again = False
        self.has_asked = True
        """Since it was resumed, if it was; before that its checkpoint is the one that it goes on with."""

    @property
    def trained(self) -> int:
        """Steps that have taken their groups."""
        return self.now.taken // self.rules.groups_per_step

    @rule()
    @precondition(lambda self: self.now.version == self.trained < self.rules.total_steps)
    def take(self) -> None:
        self.admit()
        if not self.now.missing:
            self.check_staleness(self.now.taken)
            self.now = self.now.take()
        elif self.now.decided == self.now.admitted:
            self.now = self.now.replace_dropped()
            assert self.now.admits, "groups are missing, and nothing is under way"
            self.admit()

    @rule(most=st.integers(1, 8))
    @precondition(lambda self: self.now.decided < self.now.admitted)
    def answer(self, most: int) -> None:
        waited = [draw for draw in range(self.now.decided, self.now.admitted) if draw not in self.answered]
        self.answered.update(self.random.sample(waited, min(most, len(waited))))
        self.decide()
        if not self.in_rounds:
            self.admit()

    @rule()
    @precondition(lambda self: self.now.version < self.trained)
    def publish(self) -> None:
        if self.in_rounds:
            self.answer(self.now.admitted)
        self.now = self.now.publish(self.trained)
        if self.rules.max_staleness:
            self.admit()

    @rule(with_groups=st.booleans())
    @precondition(lambda self: self.now.version == self.trained > 0)
    def resume(self, with_groups: bool) -> None:
        """At a checkpoint of this moment, with the finished groups or without; from the same one nothing changes."""
        if not self.has_asked:
            return
        if self.in_rounds:
            self.answer(self.now.admitted)
        cursor = self.kept[self.now.taken - 1] + 1
        self.saved = {draw for draw in self.answered if draw >= cursor} if with_groups else set()
        self.asked_again |= self.now.admitted > cursor and not with_groups
        decided = self.before | self.decided
        self.before = {draw: decided[draw] for draw in self.saved & decided.keys()}
        for draw in range(cursor, self.now.admitted):
            self.decided.pop(draw, None)
            if draw not in self.saved:
                self.informative.pop(draw, None)
        self.answered.clear()
        del self.kept[self.now.taken :]
        self.now = self.module.Admission.resumed(self.rules, self.now.version, cursor, self.saved)
        self.has_asked = False

    @invariant()
    def counts_agree(self) -> None:
        now = self.now
        assert now.taken <= now.kept <= now.decided <= now.admitted and now.kept == len(self.kept)
        assert now.admitted <= self.rules.total_steps * self.rules.groups_per_step + now.dropped, "beyond the last step"

    def teardown(self) -> None:
        """Whatever was done, the run ends, and where nothing depends on time as the undisturbed one."""
        while self.now.version < self.rules.total_steps:
            before = self.now
            if self.now.version < self.trained:
                self.publish()
            else:
                self.take()
                self.answer(self.now.admitted)
            assert self.now != before, "nothing goes on"
        assert self.now.taken == self.rules.total_steps * self.rules.groups_per_step
        taken = self.kept[: self.now.taken]
        assert taken == sorted({*taken})
        if self.in_rounds and not self.asked_again:
            expected = undisturbed(self.module.Admission(self.rules), self.informative)
            assert [(draw, self.version_of[draw]) for draw in taken] == expected

    def admit(self) -> None:
        """All that may be asked, and of what a checkpoint has at once a part."""
        while self.now.admits:
            self.now, new = self.now.admit()
            self.has_asked = True
            for draw in new:
                if draw not in self.saved:
                    self.version_of[draw] = self.now.version
                elif draw in self.before or self.random.random() < 0.5:
                    self.answered.add(draw)
            self.decide()
        if not self.in_rounds:
            ahead = min(self.now.version + 1 + self.rules.max_staleness, self.rules.total_steps)
            assert self.now.admitted - self.now.dropped == ahead * self.rules.groups_per_step, (
                "not all that may be asked"
            )

    def decide(self) -> None:
        while (draw := self.now.decided) in self.answered:
            informative = self.informative.setdefault(draw, self.random.random() < self.share)
            before = self.before.pop(draw, None)
            if before is None:
                expected = informative or self.dropped_in_step(draw) == self.rules.max_replaced
            else:
                expected, informative = before, self.random.random() < 0.5  # what had failed is scored again
            self.now, kept = self.now.decide(informative, before)
            assert kept == expected
            self.decided[draw] = kept
            self.kept += [draw] if kept else []

    def dropped_in_step(self, draw: int) -> int:
        """Of the draws before it, those that were dropped since the groups of a step were complete."""
        in_step = len(self.kept) % self.rules.groups_per_step
        complete = self.kept[: len(self.kept) - in_step]
        return draw - (complete[-1] + 1 if complete else 0) - in_step

    def check_staleness(self, first: int) -> None:
        """Of the groups that a step takes, from this place among the kept ones on."""
        size = self.rules.groups_per_step
        taken = self.kept[first : first + size]
        assert len(taken) == size
        for draw in taken:
            assert 0 <= first // size - self.version_of[draw] <= self.rules.max_staleness


def undisturbed(now: Any, informative: dict[int, bool]) -> list[tuple[int, int]]:
    """The draws that are trained, each with the version by which it is asked, in rounds and without a resume."""
    kept: list[tuple[int, int]] = []
    version_of: dict[int, int] = {}

    def admit() -> None:
        nonlocal now
        now, new = now.admit()
        version_of.update(dict.fromkeys(new, now.version))

    for step in range(1, now.rules.total_steps + 1):
        admit()
        while True:
            for draw in range(now.decided, now.admitted):
                now, keeps = now.decide(informative[draw])
                kept += [(draw, version_of[draw])] if keeps else []
            if not now.missing:
                break
            now = now.replace_dropped()
            admit()
        now = now.take().publish(step)
        if now.rules.max_staleness:
            admit()
    return kept[: now.taken]


def look(module: ModuleType, runs: int) -> None:
    """Raises AssertionError where some of so many random runs shows that the rule does not hold."""
    machine = type("Run", (Run,), {"module": module})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=runs,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("runs", [100, pytest.param(3000, marks=pytest.mark.nightly)])
def test_no_run_is_stale_stuck_or_out_of_order(runs: int) -> None:
    look(real, runs)


MUTANTS = {
    "a step further ahead": ("self.version + 1 + self.rules.max_staleness", "self.version + 2 + self.rules.max_staleness"),
    "a step less ahead": ("self.version + 1 + self.rules.max_staleness", "self.version + max(1, self.rules.max_staleness)"),
    "draws beyond the last step": (", self.rules.total_steps)", ", self.rules.total_steps + 1)"),
    "dropped groups have no successors": ("self._limit_without_dropped + self.replaceable", "self._limit_without_dropped"),
    "every dropped group has two": ("self._limit_without_dropped + self.replaceable", "self._limit_without_dropped + 2 * self.replaceable"),
    "successors come as soon as they may": ("then if self.rules.timing is Timing.REPRODUCIBLE else then.replace_dropped()", "then.replace_dropped()"),
    "successors come late": ("then if self.rules.timing is Timing.REPRODUCIBLE else then.replace_dropped()", "then"),
    "nothing is replaced": ("replace(self, replaceable=self.dropped)", "self"),
    "a draw is asked twice": ("range(self.admitted, max(self._limit, self.admitted))", "range(self.decided, max(self._limit, self.admitted))"),
    "what is informative is dropped": ("informative or self.dropped_in_step == ", "self.dropped_in_step == "),
    "one more is dropped": ("== self.rules.max_replaced", "== self.rules.max_replaced + 1"),
    "the count of dropped groups goes on": ("if kept % self.rules.groups_per_step else 0", "if kept else 0"),
    "each kept group ends a step": ("if kept % self.rules.groups_per_step else 0", "if not kept else 0"),
    "a decision is made anew": ("if before is None else before", "if True else before"),
    "a draw is skipped": ("decided=self.decided + 1, kept=kept", "decided=self.decided + 2, kept=kept"),
    "a step takes fewer than its groups": ("max(0, self.taken + self.rules.groups_per_step - self.kept)", "max(0, self.taken + 1 - self.kept)"),
    "taken groups are taken again": ("replace(self, taken=self.taken + self.rules.groups_per_step)", "self"),
    "the published version is forgotten": ("replace(self.replace_dropped(), version=version)", "self.replace_dropped()"),
    "a publish replaces nothing": ("replace(self.replace_dropped(), version=version)", "replace(self, version=version)"),
    "a resumed run has trained nothing": ("taken = version * rules.groups_per_step", "taken = 0"),
    "a resumed run has dropped nothing": ("replaceable=cursor - taken)", "replaceable=0)"),
    "a resumed run admits less than before": ("if rules.timing is Timing.FREE or not saved:", "if True:"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str) -> None:
    mutant = mutated(real, *MUTANTS[name])
    with pytest.raises(AssertionError):
        look(mutant, 1000)
