"""The producer over random schedules in virtual time, and mutants of it, each of which some schedule must find."""

# ruff: noqa: E501 - a mutant is a line

from __future__ import annotations

from types import ModuleType

import pytest

from tandem.controller import engines, rollouts, saved_draws, scoring
from tests import schedules
from tests.mutants import mutated


def some_and_many(some: int, many: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("count", [some, pytest.param(many, marks=pytest.mark.nightly)])


@some_and_many(100, 250)
def test_nothing_is_stale_lost_doubled_or_stuck(count: int) -> None:
    for seed in range(count):
        schedules.run(seed)


def test_without_partial_rollouts_nothing_depends_on_time() -> None:
    """The same groups by the same versions, however long answers and scores take; and where shares are fixed on the
    same engines."""
    compared = 0
    for seed in range(1000, 1200):
        world = schedules.draw_world(seed)
        if (world.staleness == 0 or not world.partial) and not world.kills:
            assert _compared(world, schedules.run(seed)[1]) == _compared(world, schedules.run(seed, timing=1)[1]), seed
            compared += 1
    assert compared > 40


@some_and_many(150, 500)
def test_without_partial_rollouts_a_killed_run_is_the_undisturbed_one(count: int) -> None:
    """The same groups by the same versions on the same engines, also where dropped groups were replaced ahead."""
    compared = 0
    for seed in range(2000, 2000 + count):
        world = schedules.draw_world(seed)
        rescored = world.failing and world.max_replaced  # and kept then, where the undisturbed run drops it
        if world.kills and not world.partial and not rescored:
            killed, undisturbed = schedules.run(seed)[1], schedules.run(seed, killed=False)[1]
            assert _compared(world, killed) == _compared(world, undisturbed), seed
            compared += 1
    assert compared > 60 * count // 500


def _compared(world: schedules.World, taken: list[schedules.Taken]) -> list[tuple[int, ...]]:
    """Draws and versions, and engines where these do not depend on time."""
    return [one[:3] if world.balanced else one for one in taken]


@some_and_many(50, 150)
def test_decisions_outlive_a_kill(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is dropped because its rewards fail, another draw is admitted for it, and after a kill they no longer
    fail: were it kept then, the other draw would be trained a step later than its version allows."""
    draw = schedules.draw_world

    def with_failing_rewards(seed: int, timing: int) -> schedules.World:
        world = draw(seed, timing)
        world.staleness, world.steps, world.kills = 1 + seed % 2, 7, 3
        world.samples, world.max_replaced = max(2, world.samples), 3 * world.prompts
        world.failing, world.by_step = 0.3, False
        return world

    monkeypatch.setattr(schedules, "draw_world", with_failing_rewards)
    for seed in range(count):
        schedules.run(seed)
    undecided = "{draw: SavedGroup(one.group, one.greedy) for draw, one in finished.items()}"
    anew = mutated(rollouts, "self._saved = dict(finished)", f"self._saved = {undecided}")
    with pytest.raises(AssertionError, match="is by version"):
        for seed in range(150):
            schedules.run(seed, anew)


def test_waiting_for_scores_alone_is_told_from_waiting_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where engines are busy with answers of later steps."""
    draw, metrics = schedules.draw_world, list[dict[str, float]]()

    def slow_scores(seed: int, timing: int) -> schedules.World:
        world = draw(seed, timing)
        world.ranks, world.capacity, world.staleness, world.steps, world.partial = 1, 1, 2, 6, True
        world.prompts, world.kills, world.max_replaced, world.by_step, world.colocated = 1, 0, 0, False, ""
        world.duration, world.score_s, world.own_process = lambda number: 1.0, lambda: 20.0, True
        return world

    class Told(rollouts.RolloutProducer):
        def publish(self, version: int) -> None:
            super().publish(version)
            metrics.append(self.metrics())

    monkeypatch.setattr(schedules, "draw_world", slow_scores)
    module = ModuleType("told")
    module.RolloutProducer, module.RolloutRules, module.Sharing = Told, rollouts.RolloutRules, rollouts.Sharing  # type: ignore[attr-defined]
    schedules.run(0, module)
    assert [one["time/generation_s"] for one in metrics] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert metrics[3]["time/reward_s"] > 15


MUTANTS: dict[str, tuple[ModuleType, str, str]] = {
    "the cursor is what was asked": (rollouts, "self._admission.take(), taken[-1] + 1", "self._admission.take(), self._admission.admitted"),
    "groups are taken as they come": (rollouts, "while (draw := self._admission.decided) in self._scoring.scored:", "while (draw := next(iter(self._scoring.scored), None)) is not None:"),
    "a decision is forgotten": (rollouts, "            self._admission, kept = self._admission.decide", "            _, kept = self._admission.decide"),
    "groups that were taken count again": (rollouts, "self._admission, self.cursor = self._admission.take(), taken[-1] + 1", "self.cursor = taken[-1] + 1"),
    "finished groups are asked again": (rollouts, "for draw in new if draw not in self._saved})", "for draw in new})"),
    "a resumed run begins anew": (rollouts, "self._admission = Admission.resumed(self._rules, version, cursor, finished)", "self._admission = Admission(self._rules, version)"),
    "the published version is forgotten": (rollouts, "        self._admission = self._admission.publish(version)\n", ""),
    "a publish does not wait": (rollouts, "        self.settle()\n        self._devices.publish", "        self._devices.publish"),
    "engines go on in training": (rollouts, "            self._engines.paused = True\n        self._devices.to_preparation", "        self._devices.to_preparation"),
    "engines never go on": (rollouts, "        self._engines.paused = False\n", ""),
    "greedy answers are lost": (scoring, "scored.group.greedy = scored.greedy.scores[0]", "pass"),
    "what is scored is still to be scored": (scoring, "        self._submitted.pop(draw, None)\n", ""),
    "answers wait for scores for ever": (scoring, "        self.unscored.pop(draw, None)\n", ""),
    "finished groups begin at the wrong draw": (saved_draws, "finished = {draw: _finished", "finished = {draw + 1: _finished"),
    "answers without scores are forgotten": (saved_draws, "return finished | unscored", "return finished"),
    "what is not scored is decided": (saved_draws, "if finished.group.scores or finished.kept is False:", "if True:"),
    "an ask is sent twice": (engines, "new[draw] = self._waiting.pop(draw)", "new[draw] = self._waiting[draw]"),
    "a fixed share stays where it was": (engines, "engine.own.popleft() if", "engine.own[0] if"),
    "an answered ask stays": (engines, "self._running -= 1\n", "pass\n"),
    "an engine is called once": (engines, "        self._give(engine)\n        if self._waiting and self._in_call < len(self._engines):\n            self.give()\n", ""),
    "a slice while standing still": (engines, "        if self.paused:\n            return\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new = MUTANTS[name]
    mutant = mutated(module, old, new)
    if module is rollouts:
        expect_found(mutant)
        return
    for public in ("Engines", "GroupScoring", "finished_draws", "restore"):
        if hasattr(mutant, public):
            monkeypatch.setattr(rollouts, public, getattr(mutant, public))
    expect_found(rollouts)


def expect_found(module: ModuleType) -> None:
    for seed in range(2000):
        try:
            trained = schedules.run(seed, module)[1]
            world = schedules.draw_world(seed)
            if world.staleness == 0 or not world.partial:
                undisturbed = schedules.run(seed, module, timing=1, killed=False)[1]
                assert _compared(world, trained) == _compared(world, undisturbed)
        except Exception:  # noqa: BLE001 - of whatever kind: it was found
            return
    raise AssertionError("no schedule found the mutant")
