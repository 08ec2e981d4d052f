"""Asks to generation engines, a whole group each, and the answers back.

    add --> waiting --oldest first--> asked --RolloutWorker.advance, again and again--> answered(draw, ...)

An engine that has anything to do has one call of `advance` under way, a slice of the worker's time: publishing,
validation and checkpoints fall between two slices. What no engine has room for waits here. Of what waits and runs each
engine is to have as much as it is fast (generation/dispatch_balance.py): one that is free takes the oldest ask, unless
a faster one, though full, would be through with it sooner. Siblings stay together, so that their prompt is computed
once. Room for one sample is enough for a group: an engine whose slots wait until as many are free as a group has
siblings leaves many of them empty where lengths differ.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.controller.worker_groups import Future
from tandem.errors import WorkerLost
from tandem.generation.dispatch_balance import Balance
from tandem.types import Trajectory
from tandem.workers.rollout import Advance, Ask

Answered = Callable[[int, list[Trajectory], Trajectory | None], None]
"""Takes a draw, its trajectories, and the greedy one where it was wanted."""
_COUNTED_S = 60.0
"""Of a slice that lasts longer, as at a breakpoint or where a call hangs, which the cluster ends."""
_SLICE_S, _SLICE_S_AN_ENGINE = 0.05, 0.005
"""How long a slice lasts at most, so that engines with long answers send the controller 200 slices a second in all."""
_HURRIED_SLICE_S = 0.005
"""Of a slice while training waits for scores alone: engines in the controller's own process hold these up."""


class RolloutEngines(Protocol):
    """What is asked of the worker group of the engines."""

    def advance(self, asks: Mapping[int, Mapping[int, Ask]], patience_s: float) -> Future[dict[int, Advance]]:
        """Start new asks on the engines that have an entry and let these run for a while."""
        ...

    def room(self) -> Future[list[int]]:
        """How many samples each engine could start now."""
        ...


@dataclass(eq=False, slots=True)
class _Engine:
    number: int
    asked: set[int] = field(default_factory=set[int])
    """Asks that it has and that are not answered."""
    own: deque[int] = field(default_factory=deque[int])
    """Its share of what waits, where shares are fixed; oldest first."""
    called_at: float = 0.0
    unfruitful_s: float = 0.0
    """Its slices since an ask was answered or the first one came."""
    idle_since: float = 0.0
    idle_s: float = 0.0


class Engines:
    """Spreads asks over engines. Nothing in here waits: answers come in `Cluster.watch`."""

    def __init__(
        self,
        rollout: RolloutEngines,
        samples: int,
        share: int,
        fixed: bool,
        answered: Answered,
        now: Callable[[], float],
        hurry: Callable[[], bool],
        timeout_s: float = math.inf,
    ) -> None:
        """`samples`: those of one ask. `share`: asks that are spread evenly over the engines where shares are fixed.
        `hurry`: the next slices are to be short. `timeout_s`: an engine that has run so long without an answer has lost
        one.

        `fixed`: each engine gets an equal share at once, however fast it is, so that which samples decode side by side
        does not depend on time.
        """
        self._rollout = rollout
        self._samples = samples
        self._share = share
        self._fixed = fixed
        self._answered = answered
        self._now = now
        self._waiting: dict[int, Ask] = {}
        self._room = np.array(rollout.room().get())
        """Samples that each engine could start at once, as far as is known here."""
        self._slots = self._room.copy()
        """Samples that it could start at once, if it had none."""
        self._engines = [_Engine(number, idle_since=now()) for number in range(len(self._room))]
        self._balance = Balance(len(self._engines))
        self._hurry = hurry
        self._timeout_s = timeout_s
        self._slice_s = max(_SLICE_S, _SLICE_S_AN_ENGINE * len(self._engines))
        self._running = 0
        self._in_call = 0
        """Engines that have a slice under way."""
        self._is_idle = np.ones(len(self._engines), dtype=np.bool_)
        self._goes_on = np.zeros(len(self._engines), dtype=np.bool_)
        """Engines between two slices: those that have nothing, and those that have something."""
        self.paused = False
        """No further slice is asked for; one that is under way ends."""

    @property
    def unanswered(self) -> int:
        """Asks that wait or run."""
        return len(self._waiting) + self._running

    def add(self, asks: Mapping[int, Ask]) -> None:
        """Take what draws ask; draws ascend from call to call. `give` sends them."""
        self._waiting |= asks
        self._balance.more_waits()
        draws = list(asks) if self._fixed else []
        for first in range(0, len(draws), self._share):
            by_room = sorted(
                self._engines, key=lambda engine: len(engine.own) * self._samples - self._room[engine.number]
            )
            shares = np.array_split(draws[first : first + self._share], len(by_room))
            for engine, share in zip(by_room, shares, strict=True):
                engine.own.extend(share.tolist())

    def give(self) -> None:
        """Send what waits to engines that are between two slices."""
        if not self.paused and self._fixed:
            for engine in self._engines:
                if self._goes_on[engine.number] or (self._is_idle[engine.number] and engine.own):
                    self._give(engine)
        elif not self.paused:
            while len(takers := np.flatnonzero(self._takers())):
                for number in takers.tolist():
                    self._give(self._engines[number])

    def take_idle_s(self) -> float:
        """Seconds since the last call of this that an engine had nothing to do, on average."""
        now, total = self._now(), 0.0
        for engine in self._engines:
            total += engine.idle_s + (0.0 if engine.asked else now - engine.idle_since)
            engine.idle_s, engine.idle_since = 0.0, now
        return total / len(self._engines)

    def _give(self, engine: _Engine) -> None:
        new: dict[int, Ask] = {}
        while (draw := self._next(engine, first=not (engine.asked or new))) is not None:
            new[draw] = self._waiting.pop(draw)
            self._room[engine.number] -= self._samples
            self._balance.changed()
        if new and not engine.asked:
            engine.idle_s += self._now() - engine.idle_since
        self._running += len(new)
        engine.asked.update(new)
        if engine.asked:
            engine.called_at = self._now()
            self._is_idle[engine.number] = self._goes_on[engine.number] = False
            self._in_call += 1
            patience_s = _HURRIED_SLICE_S if self._hurry() else self._slice_s
            self._rollout.advance({engine.number: new}, patience_s).then(partial(self._ended, engine))

    def _takers(self) -> NDArray[np.bool_]:
        """The engines between two slices that go on, or begin the next ask."""
        if not self._waiting:
            return self._goes_on
        waiting, runs = self._samples * len(self._waiting), self._in_call > 0
        takers = self._balance.takers(self._is_idle, self._slots, self._room, waiting, self._samples, runs)
        return self._goes_on | takers

    def _next(self, engine: _Engine, first: bool) -> int | None:
        """The draw whose ask the engine should start now, whole or in part; `first`: it has nothing else."""
        if self._fixed:
            return engine.own.popleft() if engine.own else None
        if not self._waiting or not (first or self._room[engine.number] > 0):
            return None
        waiting = self._samples * len(self._waiting)
        takes = self._balance.takes_next(engine.number, self._slots, self._room, waiting, self._samples)
        return next(iter(self._waiting)) if takes else None

    def _ended(self, engine: _Engine, by_engine: dict[int, Advance]) -> None:
        advance = by_engine[engine.number]
        number = engine.number
        load = int(self._slots[number] - self._room[number])
        self._balance.throughput.worked(number, load, min(self._now() - engine.called_at, _COUNTED_S))
        self._room[number], self._slots[number] = advance.room, max(self._slots[number], advance.room)
        self._balance.changed()
        self._in_call -= 1
        self._check_fruitful(engine, bool(advance.done))
        for draw, siblings, greedy in advance.done:
            engine.asked.remove(draw)
            self._running -= 1
            self._answered(draw, siblings, greedy)
        self._balance.throughput.answered(number, self._samples * len(advance.done), advance.tokens)
        self._balance.changed()
        self._is_idle[number], self._goes_on[number] = not engine.asked, bool(engine.asked)
        if not engine.asked:
            engine.idle_since = self._now()
        if self.paused:
            return
        self._give(engine)
        if self._waiting and self._in_call < len(self._engines):
            self.give()

    def _check_fruitful(self, engine: _Engine, answered: bool) -> None:
        """Raises WorkerLost where an engine answers nothing for too long, though each of its slices ends."""
        engine.unfruitful_s += min(self._now() - engine.called_at, _COUNTED_S)
        if answered:
            engine.unfruitful_s = 0.0
        if engine.unfruitful_s > self._timeout_s:
            raise WorkerLost(
                f"generation: engine {engine.number} has run for {engine.unfruitful_s:.0f} s and ended none of the "
                f"{len(engine.asked)} prompts that it has, draws {min(engine.asked)} to {max(engine.asked)} of the run "
                f"(cluster.timeout_s: {self._timeout_s:g})"
            )
