"""In which order training takes groups, and what each rule costs at the same bound on staleness: discrete events.

    python benchmarks/taking_order.py [--slots 256 64] [--seeds 0 1 2]

A step trains on 32 groups of 8 samples and takes a second; so does the generation of a step's samples with all slots
busy. Lengths are lognormal (sigma 1, at most 8 times the mean of an uncut one), and every sample is made at the same
speed. Weights are published at the end of a step, at no cost, and samples go on. The rules:

    in order       the next 32 groups in the order of their prompts, waiting for them (what Tandem does)
    window         whichever of the next 33 is ready, 32 times; its bound is one step more than what is admitted by
    ready first    the oldest 32 that are ready; a group that is too old by then is dropped, and another prompt asked

The first ten of fifty steps do not count.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import NamedTuple

from command_line import parse_arguments

PROMPTS, SAMPLES, STEPS, UNCOUNTED, TRAINING_S = 32, 8, 50, 10, 1.0
SIGMA, LONGEST, WINDOW = 1.0, 8.0, PROMPTS + 1
IN_ORDER, WINDOWED, READY_FIRST = "in order", "window", "ready first"
RULES = (IN_ORDER, 0), (IN_ORDER, 1), (READY_FIRST, 1), (IN_ORDER, 2), (WINDOWED, 1), (IN_ORDER, 4), (READY_FIRST, 4)
"""Each with the steps ahead by which prompts are admitted."""


class Figures(NamedTuple):
    """What comes of a rule."""

    step_s: float
    staleness: float
    """Mean over the trained groups, of the version at which a group began."""
    dropped: float
    """Share of the groups that are trained."""
    length: float
    """Mean length of a trained sample; 1: that of all samples, had none been cut."""


@dataclass
class _Group:
    unfinished: int
    length: float
    began: int | None = None
    """The version at which its first sample started."""


@dataclass
class World:
    """Slots that generate and a trainer, under one rule."""

    rule: str
    ahead: int
    slots: int
    random: Random
    now: float = 0.0
    version: int = 0
    drawn: int = 0
    dropped: int = 0
    groups: dict[int, _Group] = field(default_factory=dict[int, _Group])
    """By draw: those that are neither trained nor dropped, oldest first."""
    waiting: deque[tuple[int, float]] = field(default_factory=deque[tuple[int, float]])
    running: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    def run(self) -> Figures:
        trained: list[tuple[int, float]] = []
        begun = 0.0
        for step in range(STEPS):
            if step == UNCOUNTED:
                begun = self.now
            groups = self._take()
            if step >= UNCOUNTED:
                trained += [(step - (group.began or 0), group.length) for group in groups]
            self._wait_until(self.now + TRAINING_S)
            self.version += 1
        step_s = (self.now - begun) / (STEPS - UNCOUNTED)
        staleness, length = map(fmean, zip(*trained, strict=True))
        return Figures(step_s, staleness, self.dropped / (STEPS * PROMPTS), length)

    def _take(self) -> list[_Group]:
        """The groups of a step; waits for them."""
        self._fill()
        while not (numbers := self._chosen()):
            self._finish_one()
        return [self.groups.pop(number) for number in numbers]

    def _wait_until(self, end: float) -> None:
        while self.running and self.running[0][0] <= end:
            self._finish_one()
        self.now = end

    def _finish_one(self) -> None:
        self.now, number = heapq.heappop(self.running)
        self.groups[number].unfinished -= 1
        self._fill()

    def _chosen(self) -> list[int]:
        """The draws that are trained next; none: they are not ready."""
        if self.rule == READY_FIRST:
            self._drop_old()
            ready = sorted((group.began, number) for number, group in self.groups.items() if group.unfinished == 0)
            return [number for _, number in ready[:PROMPTS]] if len(ready) >= PROMPTS else []
        rest, chosen = list(self.groups), []
        window = WINDOW if self.rule == WINDOWED else 1
        while len(chosen) < PROMPTS:
            near = (number for number in rest if number < rest[0] + window and self.groups[number].unfinished == 0)
            if (number := next(near, None)) is None:
                return []
            rest.remove(number)
            chosen.append(number)
        return chosen

    def _drop_old(self) -> None:
        old = {
            number
            for number, group in self.groups.items()
            if group.began is not None and self.version - group.began > self.ahead
        }
        if old:
            self.dropped += len(old)
            self.groups = {number: group for number, group in self.groups.items() if number not in old}
            self.running = [one for one in self.running if one[1] not in old]
            heapq.heapify(self.running)
            self.waiting = deque(one for one in self.waiting if one[0] not in old)
            self._fill()

    def _fill(self) -> None:
        """Admit prompts, and start samples in free slots."""
        limit = min(self.version + 1 + self.ahead, STEPS) * PROMPTS
        while self.drawn - self.dropped < limit:
            lengths = [min(self.random.lognormvariate(-(SIGMA**2) / 2, SIGMA), LONGEST) for _ in range(SAMPLES)]
            self.groups[self.drawn] = _Group(SAMPLES, fmean(lengths))
            self.waiting.extend((self.drawn, length) for length in lengths)
            self.drawn += 1
        seconds_a_length = self.slots * TRAINING_S / (PROMPTS * SAMPLES)
        while self.waiting and len(self.running) < self.slots:
            number, length = self.waiting.popleft()
            if self.groups[number].began is None:
                self.groups[number].began = self.version
            heapq.heappush(self.running, (self.now + length * seconds_a_length, number))


def mean_figures(rule: str, ahead: int, slots: int, seeds: Sequence[int]) -> Figures:
    runs = [World(rule, ahead, slots, Random(seed)).run() for seed in seeds]
    return Figures(*(fmean(values) for values in zip(*runs, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 64], help="samples that run at once")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parse_arguments(parser, slots=[64], seeds=[0])
    figures: dict[str, float] = {}
    for slots in arguments.slots:
        print(f"| {slots} slots | bound | s/step | mean staleness | dropped | mean length |")
        print("| --- " * 6 + "|")
        for rule, ahead in RULES:
            found = mean_figures(rule, ahead, slots, arguments.seeds)
            bound = ahead + (rule == WINDOWED)
            cells = (rule, bound, *(f"{value:.2f}" for value in found))
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            figures[f"{slots} slots, {rule}, bound {bound}"] = found.step_s
        print()
    print(json.dumps({"benchmark": "taking_order", "figures": figures, "baseline": next(iter(figures))}))


if __name__ == "__main__":
    main()
