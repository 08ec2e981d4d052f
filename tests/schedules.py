"""Random runs of the real producer in virtual time: ranks, sizes, lengths, slow rewards, kills, resumes.

python -m tests.schedules FIRST LAST      (10,000 of them take a few minutes)
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any

import numpy as np

from tandem.controller import rollouts as real
from tandem.controller.pools import ResourcePool
from tandem.controller.timesharing import SleepPhase
from tandem.controller.worker_groups import WorkerGroup
from tandem.simulation.virtual import Timed, VirtualCluster
from tandem.types import Group, Prompt, SavedGroup, Score, Status, Trajectory
from tandem.workers.host import Worker
from tandem.workers.registration import Dispatch, Mesh, register
from tandem.workers.rollout import Advance, Ask, RolloutRequest

NO_TOKENS = np.zeros(0, np.int32)


@dataclass
class World:
    """What a schedule is drawn from, and what its workers share."""

    random: Random
    cluster: VirtualCluster
    ranks: int
    prompts: int
    samples: int
    staleness: int
    steps: int
    partial: bool
    capacity: int
    slice_s: float | None
    own_process: bool
    """Engines go on while their rank does other things."""
    colocated: str
    """Empty: generation has a pool of its own; `native`: rows stand still in training; `sleep`: engines sleep."""
    uninformative: float
    max_replaced: int
    by_step: bool
    greedy: bool
    evaluations: float
    kills: int
    failing: float
    """Share of the draws whose rewards fail until something has killed the run."""
    duration: Callable[[int], float] = lambda number: 0.0
    """Seconds that the engine needs for a draw."""
    balanced: bool = False
    """Engines that are free take what waits, whatever else may not depend on time."""
    waits: Callable[[int], list[float]] = lambda number: []
    """Seconds for which a draw's conversation waits for tools, between turns that need the engine equally long."""
    score_s: Callable[[], float] = lambda: 0.0
    training: bool = False
    ran_on: dict[int, int] = field(default_factory=dict[int, int])
    """The engine that each draw ran on last."""


def draw_world(seed: int, timing: int = 0) -> World:
    """`timing`: another one has other durations, and nothing else."""
    random = Random(seed)
    prompts = random.randint(1, 5)
    uninformative = random.choice([0, 0, 0.3, 0.8])
    samples = random.randint(1, 4)
    world = World(
        random=random,
        cluster=VirtualCluster(Random(seed * 7 + timing)),
        ranks=random.choice([1, 1, 2, 3]),
        prompts=prompts,
        samples=samples,
        staleness=random.choice([0, 0, 1, 1, 2, 3, 4, 7]),
        steps=random.randint(1, 7),
        partial=random.random() < 0.6,
        capacity=random.choice([1, samples, 2 * samples, 100 * samples]),
        slice_s=random.choice([0.2, 1.0, 5.0, None]),
        own_process=random.random() < 0.5,
        colocated=random.choice(["", "", "native", "sleep"]),
        uninformative=uninformative,
        max_replaced=random.choice([0, prompts, 3 * prompts]) if uninformative else 0,
        by_step=random.random() < 0.2,
        greedy=random.random() < 0.2,
        evaluations=random.choice([0, 0.3]),
        kills=random.choice([0, 0, 1, 3]),
        failing=random.choice([0, 0, 0.3]),
    )
    if world.colocated:
        world.own_process = world.colocated == "sleep"
    sigma, slow = random.choice([0, 0.5, 2]), random.choice(["none", "exponential", "heavy"])
    timed = Random(seed * 11 + timing)
    lengths: dict[int, float] = {}

    def duration(number: int) -> float:
        length = timed.lognormvariate(0, sigma) if sigma else float(timed.randint(0, 2))
        return lengths.setdefault(number, length)

    talking, waits = Random(seed * 13 + timing), dict[int, list[float]]()
    most_waits = Random(seed * 17).choice([0, 0, 3])

    def waits_of(number: int) -> list[float]:
        count = talking.randint(0, most_waits)
        return waits.setdefault(number, [talking.expovariate(1.0) for _ in range(count)])

    scores = {"none": lambda: 0.0, "exponential": lambda: timed.expovariate(2.0), "heavy": lambda: timed.choice([0, 9])}
    world.duration, world.waits, world.score_s = duration, waits_of, scores[slow]
    world.balanced = Random(seed * 19).random() < 0.3
    return world


@dataclass
class Part:
    """A turn of a draw's conversation, or a wait for tools between two turns."""

    left: float
    decodes: bool


def parts_of(world: World, number: int) -> list[Part]:
    waits = world.waits(number)
    turn = world.duration(number) / (len(waits) + 1)
    parts = [Part(turn, decodes=True)]
    for wait in waits:
        parts += [Part(wait, decodes=False), Part(turn, decodes=True)]
    return parts


class FakeEngine(Worker[World]):
    """An engine whose asks take as long as the schedule says, by the versions that are served meanwhile."""

    def __init__(self, context: Any, spec: World) -> None:
        super().__init__(context, spec)
        self.version = 0
        self.asleep = False
        self.left: dict[int, list[Part]] = {}
        self.versions: dict[int, set[int]] = {}
        self.seen = spec.cluster.now

    @property
    def meshes(self) -> dict[str, Mesh]:
        return {"training": Mesh({"data": self.context.size})}

    @register(Dispatch.ALL)
    def room(self) -> Timed:
        return Timed(0.0, lambda: self._room)

    @register(Dispatch.EACH)
    def advance(self, asks: Mapping[int, Ask], slice_s: float) -> Timed:
        world = self.spec
        assert not (world.training and world.colocated), "a slice while the models train on the same devices"
        self._catch_up()
        for number in asks:
            assert number not in self.left, f"draw {number} is asked twice"
            self.left[number] = parts_of(world, number)
            self.versions[number] = {self.version}
            world.ran_on[number] = self.context.rank
        seconds = max(0.0, min([world.slice_s or slice_s, *(_seconds(parts) for parts in self.left.values())]))

        def finish() -> Advance:
            self._catch_up()
            if not world.own_process:
                self._generate(seconds)
            ended = [number for number, parts in self.left.items() if _seconds(parts) <= 1e-12]
            for number in ended:
                del self.left[number]
            return Advance([(number, *self._answer(number)) for number in ended], self._room, tokens=len(ended))

        return Timed(seconds, finish)

    @register(Dispatch.REPLICATED)
    def publish(self, version: int, seconds: float) -> Timed:
        self._catch_up()

        def finish() -> None:
            self._catch_up()
            assert version > self.version
            self.version = version

        return Timed(seconds, finish)

    @register(Dispatch.REPLICATED)
    def evaluate(self, seconds: float) -> Timed:
        self._catch_up()

        def finish() -> int:
            self._catch_up()
            if not self.spec.own_process:
                self._generate(seconds)
            return self.version

        return Timed(seconds, finish)

    @register(Dispatch.REPLICATED)
    def set_asleep(self, asleep: bool) -> Timed:
        self._catch_up()
        self.asleep = asleep
        return Timed(0.0, lambda: None)

    @property
    def _room(self) -> int:
        """Conversations that wait for tools take none."""
        decoding = sum(any(part.decodes for part in parts[:1]) for parts in self.left.values())
        return self.spec.capacity - self.spec.samples * decoding

    def _catch_up(self) -> None:
        now = self.spec.cluster.now
        if self.spec.own_process and not self.asleep:
            self._generate(now - self.seen)
        self.seen = now

    def _generate(self, seconds: float) -> None:
        for number, parts in self.left.items():
            left = seconds
            while parts and (left > 0 or parts[0].left <= 1e-12):
                part = parts[0]
                if part.decodes and part.left > 0:
                    self.versions[number].add(self.version)
                spent = min(left, part.left)
                part.left, left = part.left - spent, left - spent
                if part.left <= 1e-12:
                    parts.pop(0)

    def _answer(self, number: int) -> tuple[list[Trajectory], Trajectory | None]:
        versions = np.array(sorted(self.versions.pop(number)), np.int32)
        prompt = Prompt(number, NO_TOKENS, "", "", "")
        one = Trajectory(prompt, 0, versions, versions > -1, versions * 0.0, versions, "", Status.COMPLETED)
        return [one] * self.spec.samples, one if self.spec.greedy else None


def _seconds(parts: list[Part]) -> float:
    return sum(part.left for part in parts)


class FakeTrainer(Worker[World]):
    @register(Dispatch.REPLICATED)
    def learn(self, seconds: float) -> Timed:
        return Timed(seconds, lambda: None)


class FakeRewards:
    """Scores by chance of the schedule, as late as it says."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._seed = seed
        self.by_step = world.by_step

    def submit(self, answers_by_prompt: list[list[Trajectory]], step: int, done: Callable[[list[Group]], None]) -> None:
        cluster = self._world.cluster
        cluster.at(cluster.now + self._world.score_s(), lambda: done(self.score(answers_by_prompt, step)))

    def score(self, answers_by_prompt: list[list[Trajectory]], step: int) -> list[Group]:
        return [
            Group(group, [self._score(one, place) for place, one in enumerate(group)]) for group in answers_by_prompt
        ]

    def so_far(self, siblings: list[Trajectory]) -> Group:
        return Group(siblings, [Score(None, failure=Status.NOT_SCORED) for _ in siblings])

    def check_share(self, groups: list[Group]) -> None:
        assert groups

    def _score(self, one: Trajectory, place: int) -> Score:
        if Random(self._seed * 1000033 + one.prompt.index).random() < self._world.failing:
            return Score(None, failure=Status.REWARD_ERROR)
        return Score(0.0 if is_dull(self._world, self._seed, one.prompt.index) else place % 2)


def is_dull(world: World, seed: int, number: int) -> bool:
    return world.samples == 1 or Random(seed * 1000003 + number).random() < world.uninformative


class FakeDevices:
    """Publishes, and with `colocated: sleep` puts the engines to sleep in training."""

    def __init__(self, world: World, rollout: Any) -> None:
        self._world = world
        self._rollout = rollout

    def engine_sleeps(self, phase: SleepPhase) -> bool:
        return self._world.colocated == "sleep"

    def to_generation(self) -> None:
        if self.engine_sleeps("training"):
            self._rollout.set_asleep(False).get()

    def to_preparation(self) -> None:
        self._world.training = True
        if self.engine_sleeps("training"):
            self._rollout.set_asleep(True).get()

    def publish(self, version: int) -> None:
        self._rollout.publish(version, self._world.random.choice([0.0, 0.05])).get()
        self._world.training = False
        self.to_generation()


Taken = tuple[int, int, int, int]
"""A group that was trained: its draw, its oldest and newest version, its engine."""


def run(seed: int, module: ModuleType = real, timing: int = 0, killed: bool = True) -> tuple[int, list[Taken]]:
    """One schedule: (events, what was trained). AssertionError, Deadlock where something does not hold."""
    world = draw_world(seed, timing)
    world.kills *= killed
    record: list[list[Taken]] = []
    checkpoint: tuple[int, int, dict[int, SavedGroup]] = (0, 0, {})
    most_staleness, failing, cluster = world.staleness, world.failing, world.cluster
    rollouts, rollout, actor = start(world, seed, module)
    kills, step = world.kills, 0
    while step < world.steps:
        step += 1
        groups = rollouts.take(step)
        record.append([_taken(world, group) for group in groups])
        _check_staleness(world, step, record[-1], resumed=checkpoint[0] > 0)
        _check_memory(world, rollouts)
        rollouts.to_preparation()
        actor.learn(world.random.choice([0.0, 0.2, 1.0, 5.0])).get()
        rollouts.publish(step)
        if world.random.random() < world.evaluations:
            rollouts.settle()
            assert rollout.evaluate(world.random.random()).get() == step
        cursors = rollouts.cursor
        if world.random.random() < 0.4:
            kept = rollouts.finished() if world.random.random() < 0.5 or not world.partial else {}
            checkpoint = (step, cursors, kept)
        if kills and world.random.random() < 0.3:  # everything since the checkpoint is forgotten
            kills -= 1
            rollouts.close()
            cluster.close()
            world.training = False
            world.failing = 0.0
            step, cursor, kept = checkpoint
            record = record[:step]
            rollouts, rollout, actor = start(world, seed, module)
            if step:
                rollout.publish(step, 0.0).get()
            rollouts.resume(step, cursor, kept)
    _check_order(world, seed, record, rollouts, exact=not (failing and world.max_replaced))
    assert most_staleness == world.staleness
    return cluster.events, [taken for groups in record for taken in groups]


def start(world: World, seed: int, module: ModuleType) -> tuple[Any, Any, Any]:
    engines = world.cluster.spawn(ResourcePool("generation", (world.ranks,)))
    models = engines if world.colocated else world.cluster.spawn(ResourcePool("training", (1,)))
    rollout: Any = WorkerGroup(engines, "rollout", FakeEngine, world)
    actor: Any = WorkerGroup(models, "actor", FakeTrainer, world)
    rules = module.RolloutRules(
        groups_per_step=world.prompts,
        samples_per_ask=world.samples,
        total_steps=world.steps,
        max_staleness=world.staleness,
        partial_rollouts=world.partial,
        balanced=world.balanced,
        max_replaced=world.max_replaced,
    )
    rollouts = module.RolloutProducer(
        rules,
        rollout,
        FakeRewards(world, seed),
        FakeDevices(world, rollout),
        world.cluster.watch,
        lambda number: Ask(RolloutRequest(Prompt(number, NO_TOKENS, "", "", ""), (number,)), world.greedy),
        sharing=module.Sharing.STANDS_STILL if world.colocated else module.Sharing.GO_ON,
        now=lambda: world.cluster.now,
    )
    return rollouts, rollout, actor


def _taken(world: World, group: Group) -> Taken:
    versions, number = group.trajectories[0].versions, group.trajectories[0].prompt.index
    assert (group.greedy is not None) == world.greedy
    return number, int(versions.min()), int(versions.max()), world.ran_on[number]


def _check_staleness(world: World, step: int, taken: list[Taken], resumed: bool) -> None:
    for number, oldest, newest, _ in taken:
        assert step - 1 - oldest <= world.staleness, f"step {step}: draw {number} is by version {oldest}"
        assert world.staleness or oldest == newest == step - 1
        assert world.partial or oldest == newest, f"step {step}: draw {number} is by versions {oldest} and {newest}"
        if not world.partial and not world.max_replaced and not resumed:
            assert oldest == max(0, step - 1 - world.staleness)


def _check_memory(world: World, rollouts: Any) -> None:
    alive = rollouts._engines.unanswered + len(rollouts._scoring) + len(rollouts._kept)
    assert alive <= world.staleness * world.prompts, f"{alive} groups beyond those of the step are alive"


def _check_order(world: World, seed: int, record: list[list[Taken]], rollouts: Any, exact: bool) -> None:
    """`exact`: what is dropped follows from the schedule alone, not from what had failed when it was killed."""
    numbers = [number for groups in record for number, *_ in groups]
    expected = _expected(world, seed) if exact else sorted({*numbers})
    assert numbers == expected, "draws were lost, doubled, out of order, or dropped without need"
    assert rollouts.cursor == numbers[-1] + 1
    if not world.max_replaced:
        assert not rollouts._under_way, "draws of no step were asked"


def _expected(world: World, seed: int) -> list[int]:
    """The draws that are trained, whatever happens when."""
    kept: list[int] = []
    number = dropped = 0
    while len(kept) < world.steps * world.prompts:
        if dropped < world.max_replaced and is_dull(world, seed, number):
            dropped += 1
        else:
            kept.append(number)
            dropped = dropped if len(kept) % world.prompts else 0
        number += 1
    return kept


def main() -> None:
    first, last = map(int, sys.argv[1:3])
    start, events = time.process_time(), 0
    for seed in range(first, last):
        try:
            events += run(seed)[0]
        except BaseException:
            print(f"schedule {seed}", flush=True)
            raise
    print(f"{last - first} schedules, {events} events, {time.process_time() - start:.1f} CPU-seconds")


if __name__ == "__main__":
    main()
