"""A cluster in virtual time: calls take as long as their worker says, and the clock jumps from event to event.

Ranks run the calls of their pool one after the other, different ranks side by side, as on any cluster; controller,
worker groups and dispatch are the real ones. Where nothing is left to happen while the controller waits, it would wait
for ever: that is a Deadlock, at once.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, TypeVar

from tandem.controller.groups import Future, Source
from tandem.controller.pools import ResourcePool
from tandem.errors import TandemError
from tandem.workers.host import Worker, WorkerContext
from tandem.workers.registration import Arguments, Calls, Mesh

Spec = TypeVar("Spec")


class Deadlock(TandemError):
    """The controller waits, and nothing will ever happen."""


class Takes(NamedTuple):
    """What the method of a virtual worker returns: how long the call takes, and what it answers at its end."""

    seconds: float
    finish: Callable[[], Any]


@dataclass(slots=True)
class _Call:
    answers: list[Any]
    missing: int
    callbacks: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


class VirtualCluster:
    """Also the clock: `now` is in seconds since the start."""

    def __init__(self, ties: Random | None = None) -> None:
        """`ties`: decides what comes first of what happens at the same time; without, what was begun first."""
        self.now = 0.0
        self.sources: list[Source] = []
        self.events = 0
        """Events so far."""
        self._ties = ties
        self._count = itertools.count()
        self._queue: list[tuple[float, float, int, Callable[[], None]]] = []

    def spawn(self, pool: ResourcePool) -> "VirtualRanks":
        return VirtualRanks(pool, self)

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """Call `happen` when the clock is there."""
        tie = 0.0 if self._ties is None else self._ties.random()
        heapq.heappush(self._queue, (when, tie, next(self._count), happen))

    def watch(self, timeout_s: float | None = None) -> None:
        """Let the next thing happen. Raises Deadlock where there is none."""
        if not self._queue:
            raise Deadlock(f"at {self.now:g} s of virtual time everything is idle, and the controller waits")
        when, _, _, happen = heapq.heappop(self._queue)
        self.now = max(self.now, when)
        self.events += 1
        happen()

    def close(self) -> None:
        """Nothing that was under way happens any more."""
        self._queue.clear()


class VirtualRanks:
    """The ranks of one pool."""

    def __init__(self, pool: ResourcePool, cluster: VirtualCluster) -> None:
        self.size = pool.size
        self.busy_s = [0.0] * pool.size
        """How long each rank has worked."""
        self._cluster = cluster
        self._workers: list[dict[str, Worker[Any]]] = [{} for _ in range(pool.size)]
        self._queues: list[deque[tuple[_Call, str, str, Arguments]]] = [deque() for _ in range(pool.size)]
        self._busy = [False] * pool.size

    def create(self, name: str, kind: type[Worker[Spec]], spec: Spec) -> dict[str, Mesh]:
        for rank, workers in enumerate(self._workers):
            workers[name] = kind(WorkerContext(name, rank, self.size, neighbours=workers), spec)
        return self._workers[0][name].meshes

    def submit(self, name: str, method: str, calls: Calls) -> Future[list[Any]]:
        call = _Call([None] * self.size, sum(arguments is not None for arguments in calls))
        for rank, arguments in enumerate(calls):
            if arguments is not None:
                self._queues[rank].append((call, name, method, arguments))
                self._start(rank)

        def wait() -> list[Any]:
            while call.missing:
                self._cluster.watch()
            return call.answers

        def notify(callback: Callable[[], None]) -> None:
            if call.missing:
                call.callbacks.append(callback)
            else:
                self._cluster.at(self._cluster.now, callback)

        return Future(wait, notify)

    def close(self) -> None:
        """Nothing to end."""

    def _start(self, rank: int) -> None:
        if self._busy[rank] or not self._queues[rank]:
            return
        call, name, method, arguments = self._queues[rank].popleft()
        self._busy[rank] = True
        taken = getattr(self._workers[rank][name], method)(*arguments.take(), **arguments.kwargs)

        def end() -> None:
            self._busy[rank] = False
            self.busy_s[rank] += taken.seconds
            call.answers[rank] = taken.finish()
            call.missing -= 1
            self._start(rank)
            if not call.missing:
                for callback in call.callbacks:
                    callback()

        self._cluster.at(self._cluster.now + taken.seconds, end)
