"""The producer over random schedules in virtual time, and mutants of it, each of which some schedule must find."""

# ruff: noqa: E501 - a mutant is a line

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tandem.controller import engines, rollouts
from tests import schedules


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
    undecided = "finished = {number: Finished(one.group, one.greedy) for number, one in finished.items()}\n        "
    anew = mutated(rollouts, (line := "self._restored = dict(finished)"), undecided + line)
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
    module.RolloutProducer, module.RolloutRules = Told, rollouts.RolloutRules  # type: ignore[attr-defined]
    schedules.run(0, module)
    assert [one["time/generation_s"] for one in metrics] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert metrics[3]["time/reward_s"] > 15


MUTANTS = {
    "a step further ahead": ("self._version + 1 + rules.max_staleness", "self._version + 2 + rules.max_staleness"),
    "dropped groups have no successors": ("limit = self._first_without_replacements + self._replaced\n", "limit = self._first_without_replacements\n"),
    "every dropped group has two": ("limit = self._first_without_replacements + self._replaced\n", "limit = self._first_without_replacements + 2 * self._replaced\n"),
    "draws beyond the last step": (", rules.total_steps)", ", rules.total_steps + 1)"),
    "the cursor is what was asked": ("self.cursor = self._taken + size, kept[-1].number + 1", "self.cursor = self._taken + size, self._drawn"),
    "groups are taken as they come": (
        "while self._decided in self._scored:\n            number = self._decided\n",
        "while self._scored:\n            number = next(iter(self._scored))\n",
    ),
    "a resumed run has trained nothing": ("self._taken = version * self._rules.groups_per_step\n", "self._taken = 0\n"),
    "a resumed run has dropped nothing": ("self._dropped = self._replaced = cursor - self._taken", "self._dropped = self._replaced = 0"),
    "finished groups are asked again": ("if number not in restored})", "})"),
    "finished groups begin at the wrong draw": ("return {number: _finished", "return {number + 1: _finished"),
    "answers without scores are forgotten": (".items()} | answers\n", ".items()}\n"),
    "the count of dropped groups goes on": ("self._dropped_in_step = 0\n            else", "pass\n            else"),
    "the published version is forgotten": ("        self._version = version\n        self._replaced", "        self._replaced"),
    "a publish does not wait": ("        self.settle()\n        self._devices.publish", "        self._devices.publish"),
    "engines go on in training": ("            self._engines.paused = True\n        self._devices.to_training", "        self._devices.to_training"),
    "engines never go on": ("        self._engines.paused = False\n", ""),
    "successors come as soon as they may": ("if self._dropped > dropped and not self._in_rounds:", "if self._dropped > dropped:"),
    "a score is taken for decided": ("            self._decided += 1\n            informative", "            self._decided += 2\n            informative"),
    "greedy answers are lost": ("groups[0].greedy = groups[1].scores[0]", "pass"),
}  # fmt: skip
OF_ENGINES = {
    "an ask is sent twice": ("new[number] = self._waiting.pop(number)", "new[number] = self._waiting[number]"),
    "a fixed share stays where it was": ("engine.own.popleft() if", "engine.own[0] if"),
    "an answered ask stays": ("self._running -= 1\n", "pass\n"),
    "an engine is called once": ("        self._give(engine)\n        if self._waiting and self._in_call < len(self._engines):\n            self.give()\n", ""),
    "a slice while standing still": ("        if self.paused:\n            return\n", ""),
}  # fmt: skip


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, f"{source.count(old)} times in {module.__name__}: {old!r}"
    mutant = ModuleType(f"{module.__name__}_mutant")
    sys.modules[mutant.__name__] = mutant  # dataclasses look for it
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), mutant.__dict__)
    return mutant


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str) -> None:
    expect_found(mutated(rollouts, *MUTANTS[name]))


@pytest.mark.parametrize("name", OF_ENGINES)
def test_a_mutant_of_the_engines_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = mutated(engines, *OF_ENGINES[name])
    monkeypatch.setattr(rollouts, "Engines", mutant.Engines)
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
