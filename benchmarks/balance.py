"""When engines of unequal speed have answered the prompts of a step: by who is free, and in equal shares. Virtual time.

    python benchmarks/balance.py [--seeds 0 1 2 3 4]

The real `Engines` of the controller spread groups of 8 over engines that take time and do nothing else
(tandem/simulation). Lengths are lognormal (sigma 1, mean 256, at most 2,048). An iteration of n rows takes 8 + n ms
on the fastest engine. The ideal knows all lengths and moves tokens freely: all tokens over the speed of all engines
with all slots busy, or the longest answer alone on the fastest engine where that takes longer.

`first` is a run's first step, when nothing is known of the engines; `later` the mean of the next four.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from tandem.controller.engines import Engines
from tandem.controller.groups import WorkerGroup
from tandem.controller.pools import ResourcePool
from tandem.simulation.lengths import LognormalLengths
from tandem.simulation.speeds import EngineSpeed, Speeds
from tandem.simulation.virtual import VirtualCluster
from tandem.simulation.workers import VirtualEngine, World
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


def makespans(case: Case, seed: int, fixed: bool, steps: int = STEPS) -> Makespans:
    """Of the first steps of a run."""
    lengths = LognormalLengths(SAMPLES, MEAN_TOKENS, 1.0, LONGEST, prompt_share=0.25, seed=seed)
    cluster = VirtualCluster()
    world = World(cluster, Speeds(case.engine), lengths, case.slots, own_process=True)
    ranks = cluster.spawn(ResourcePool("generation", (len(case.slowness),)))
    rollout: Any = WorkerGroup(ranks, "rollout", world.bind(_unequal(case)), None)
    engines = Engines(rollout, SAMPLES, case.groups, fixed, lambda *_: None, lambda: cluster.now, hurry=lambda: False)
    found, ideal = [], []
    for step in range(steps):
        draws, start = range(step * case.groups, (step + 1) * case.groups), cluster.now
        engines.add({draw: Ask(RolloutRequest(world.prompt_of(draw), (0,) * SAMPLES), False) for draw in draws})
        engines.give()
        while engines.unanswered:
            cluster.watch()
        found.append(cluster.now - start)
        ideal.append(ideal_s(case, [length for draw in draws for length in lengths.of(draw)[0]]))
    return Makespans(ideal, found)


def ideal_s(case: Case, lengths: Sequence[float]) -> float:
    """Seconds that no schedule can fall below."""
    row_s = case.engine.iteration_s / case.slots + case.engine.row_s
    together = sum(1 / (row_s * slowness) for slowness in case.slowness)
    alone_s = (case.engine.iteration_s + case.engine.row_s) * min(case.slowness)
    return max(sum(lengths) / together, max(lengths) * alone_s)


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Makespans of a step over the ideal one.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    print("| engines | ideal s | static | balanced, first | later |")
    print("| --- " * 5 + "|")
    for case in CASES:
        ideal = fmean(makespans(case, seed, fixed=True).ideal[0] for seed in arguments.seeds)
        static = over_ideal(case, True, arguments.seeds)[1]
        first, later = over_ideal(case, False, arguments.seeds)
        print(f"| {case.name} | {ideal:.1f} | {static:.2f} | {first:.2f} | {later:.2f} |", flush=True)
        figures |= {f"{case.name}, static": static, f"{case.name}, balanced": later}
    print(json.dumps({"benchmark": "balance", "figures": figures, "baseline": "the ideal makespan"}))


if __name__ == "__main__":
    main()
