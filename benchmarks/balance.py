"""When engines of unequal speed have answered the prompts of a step: by who is free, and in equal shares. Virtual time.

    python benchmarks/balance.py [--seeds 0 1 2 3 4]

The real `Engines` of the controller spread groups of 8 over engines that take time and do nothing else
(tandem/simulation). Lengths are lognormal (sigma 1, mean 256, at most 2,048). An iteration of n rows takes 8 + n ms
on the fastest engine. The ideal knows all lengths and moves tokens freely: all tokens over the speed of all engines
with all slots busy, or the longest answer alone on the fastest engine where that takes longer.

`first` is a run's first step, when nothing is known of the engines; `later` the mean of the next four, of whose single
steps median, worst and those within 10% of the ideal are printed. `moved` is a dispatch that does not know lengths
either, but moves rows that run from engine to engine whenever one ends, at no cost: mean and worst of the same steps.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean, median
from typing import Any, NamedTuple

from command_line import parse_arguments

from tandem.controller.engines import Engines
from tandem.controller.pools import ResourcePool
from tandem.controller.worker_groups import WorkerGroup
from tandem.simulation.lengths import LognormalLengths
from tandem.simulation.speeds import EngineSpeed, Speeds
from tandem.simulation.virtual import VirtualCluster
from tandem.simulation.virtual_workers import VirtualEngine, World
from tandem.workers.host import WorkerContext
from tandem.workers.rollout import Ask, RolloutRequest

SAMPLES, MEAN_TOKENS, LONGEST, STEPS = 8, 256, 2048, 5
FASTEST = EngineSpeed(iteration_s=0.008, row_s=0.001)


class Case(NamedTuple):
    """Engines and what they are asked in a step."""

    slowness: Sequence[float]
    """Of each engine: how many times as long as the fastest one it takes for everything."""
    slots: int
    groups: int
    engine: EngineSpeed = FASTEST

    @property
    def name(self) -> str:
        speeds = ":".join(f"{1 / slowness:.2g}" for slowness in self.slowness)
        kind = "" if self.engine is FASTEST else ", 16 + n / 4 ms"
        return f"{speeds}, {self.slots} slots each, {self.groups * SAMPLES} samples{kind}"


READS_WEIGHTS = EngineSpeed(iteration_s=0.016, row_s=0.00025)
"""Of which a row costs little beside the others."""
CASES = (
    Case((1, 2), 16, 128),
    Case((1, 2), 32, 128),
    Case((1, 3), 32, 128),
    Case((1, 1.25, 2, 4), 16, 256),
    Case((1, 1), 32, 128),
    Case((1, 1, 1, 1), 32, 256),
    Case((1, 2), 256, 32),
    Case((1, 2), 64, 128, READS_WEIGHTS),
)


class Makespans(NamedTuple):
    """Seconds of each step, from the asks to the last answer."""

    ideal: list[float]
    found: list[float]
    moved: list[float]


@cache
def makespans(case: Case, seed: int, fixed: bool, steps: int = STEPS) -> Makespans:
    """Of the first steps of a run."""
    lengths = LognormalLengths(SAMPLES, MEAN_TOKENS, 1.0, LONGEST, prompt_share=0.25, seed=seed)
    cluster = VirtualCluster()
    world = World(cluster, Speeds(case.engine), lengths, case.slots, own_process=True)
    ranks = cluster.spawn(ResourcePool("generation", (len(case.slowness),)))
    rollout: Any = WorkerGroup(ranks, "rollout", world.bind(_unequal(case)), None)
    engines = Engines(rollout, SAMPLES, case.groups, fixed, lambda *_: None, lambda: cluster.now, hurry=lambda: False)
    found, ideal, moved = [], [], []
    for step in range(steps):
        draws, start = range(step * case.groups, (step + 1) * case.groups), cluster.now
        engines.add({draw: Ask(RolloutRequest(world.prompt_of(draw), (0,) * SAMPLES), False) for draw in draws})
        engines.give()
        while engines.unanswered:
            cluster.watch()
        found.append(cluster.now - start)
        rows = [length for draw in draws for length in lengths.of(draw)[0]]
        ideal.append(ideal_s(case, rows))
        moved.append(moved_s(case, rows))
    return Makespans(ideal, found, moved)


def ideal_s(case: Case, lengths: Sequence[float]) -> float:
    """Seconds that no schedule can fall below."""
    row_s = case.engine.iteration_s / case.slots + case.engine.row_s
    together = sum(1 / (row_s * slowness) for slowness in case.slowness)
    alone_s = (case.engine.iteration_s + case.engine.row_s) * min(case.slowness)
    return max(sum(lengths) / together, max(lengths) * alone_s)


def moved_s(case: Case, lengths: Sequence[float]) -> float:
    """Seconds where rows start in their order and all that run gain tokens alike, on whichever engine."""
    speeds = together(case)
    now = gained = 0.0
    running: list[float] = []
    """Tokens that a row which has run from the start would have when this one ends."""
    waiting = list(reversed(lengths))
    while waiting or running:
        while waiting and len(running) < len(speeds):
            heapq.heappush(running, gained + waiting.pop())
        rows, end = len(running), heapq.heappop(running)
        now += (end - gained) * rows / speeds[rows - 1]
        gained = end
    return now


def together(case: Case) -> list[float]:
    """Tokens a second of one row, of two, ... on all engines, the next row always where it adds the most."""

    def speed(engine: int, rows: int) -> float:
        return rows / ((case.engine.iteration_s + case.engine.row_s * rows) * case.slowness[engine])

    rows, found, total = [0] * len(case.slowness), [], 0.0
    for _ in range(case.slots * len(rows)):
        free = [engine for engine in range(len(rows)) if rows[engine] < case.slots]
        gain, best = max((speed(one, rows[one] + 1) - speed(one, rows[one]), one) for one in free)
        rows[best] += 1
        total += gain
        found.append(total)
    return found


def _unequal(case: Case) -> type[VirtualEngine]:
    class UnequalEngine(VirtualEngine):
        def __init__(self, context: WorkerContext, spec: Any) -> None:
            super().__init__(context, spec)
            slowness, speed = case.slowness[context.rank], case.engine
            self._decoding.speed = replace(
                speed, iteration_s=speed.iteration_s * slowness, row_s=speed.row_s * slowness
            )

    return UnequalEngine


def over_ideal(case: Case, fixed: bool, seeds: Sequence[int]) -> tuple[float, float]:
    """The makespan over the ideal one, mean over seeds: of the first step, and of those after it."""
    runs = [makespans(case, seed, fixed) for seed in seeds]
    first = fmean(run.found[0] / run.ideal[0] for run in runs)
    return first, fmean(sum(run.found[1:]) / sum(run.ideal[1:]) for run in runs)


def single_steps(case: Case, seeds: Sequence[int]) -> tuple[list[float], list[float]]:
    """Of each step after a run's first one the makespan over the ideal one: balanced, and where rows move."""
    runs = [makespans(case, seed, False) for seed in seeds]
    pairs = [
        (found / ideal, moved / ideal)
        for run in runs
        for ideal, found, moved in zip(run.ideal[1:], run.found[1:], run.moved[1:], strict=True)
    ]
    balanced, moved = zip(*pairs, strict=True)
    return list(balanced), list(moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    seeds = parse_arguments(parser, seeds=[0]).seeds
    figures: dict[str, float] = {}
    print("| engines | ideal s | static | balanced, first | later | median | worst | within 10% | moved | worst |")
    print("| --- " * 10 + "|")
    for case in CASES:
        ideal = fmean(makespans(case, seed, False).ideal[0] for seed in seeds)
        static = over_ideal(case, True, seeds)[1]
        first, later = over_ideal(case, False, seeds)
        steps, moved = single_steps(case, seeds)
        within = f"{sum(step <= 1.1 for step in steps)} of {len(steps)}"
        print(f"| {case.name} | {ideal:.1f} | {static:.2f} | {first:.2f} | {later:.2f} | {median(steps):.2f} ", end="")
        print(f"| {max(steps):.2f} | {within} | {fmean(moved):.2f} | {max(moved):.2f} |", flush=True)
        figures |= {f"{case.name}, static": static, f"{case.name}, balanced": later}
        figures[f"{case.name}, worst step"] = max(steps)
    print(json.dumps({"benchmark": "balance", "figures": figures, "baseline": "the ideal makespan"}))


if __name__ == "__main__":
    main()
