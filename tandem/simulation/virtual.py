"""A cluster in virtual time: calls take as long as their worker says, and the clock jumps from event to event.

Ranks run the calls of their pool one after the other, different ranks side by side, as on any cluster; controller,
worker groups and dispatch are the real ones. Where nothing is left to happen while the controller waits, it would wait
for ever: that is a Deadlock, at once.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, TypeVar

from tandem.controller.pools import ResourcePool
from tandem.controller.worker_groups import EventSource, Future
from tandem.errors import TandemError
from tandem.workers.host import Worker, WorkerContext
from tandem.workers.registration import Arguments, Calls, Mesh

Spec = TypeVar("Spec")


class Deadlock(TandemError):
    """The controller waits, and nothing will ever happen."""


class Timed(NamedTuple):
    """What the method of a virtual worker returns: how long the call takes, and what it answers at its end."""

    seconds: float
    finish: Callable[[], Any]
    slice_s: float = math.inf
    """The call is of slices so long, which the worker has joined because nothing would happen between them. It ends
    after the present one when anything else waits for the rank."""


class _Call:
    """A call of some ranks."""

    __slots__ = ("answers", "callbacks", "cluster", "missing")

    def __init__(self, cluster: "VirtualCluster", ranks: Iterable[int]) -> None:
        self.cluster = cluster
        self.answers: dict[int, Any] = dict.fromkeys(ranks)
        self.missing = len(self.answers)
        self.callbacks: list[Callable[[], None]] = []

    def wait(self) -> dict[int, Any]:
        while self.missing:
            self.cluster.watch()
        return self.answers

    def notify(self, callback: Callable[[], None]) -> None:
        if self.missing:
            self.callbacks.append(callback)
        else:
            self.cluster.at(self.cluster.now, callback)


@dataclass(slots=True, eq=False)
class _Running:
    """A call that a rank works on."""

    call: _Call
    taken: Timed
    began: float
    ends: float


class VirtualCluster:
    """Also the clock: `now` is in seconds since the start."""

    def __init__(self, ties: Random | None = None) -> None:
        """`ties`: decides what comes first of what happens at the same time; without, what was begun first."""
        self.now = 0.0
        self.happening = 0.0
        """When what happens on a rank happens: before `now` where the controller was busy meanwhile."""
        self.sources: list[EventSource] = []
        self.events = 0
        """Events so far."""
        self._ties = ties
        self._count = itertools.count()
        self._queue: list[tuple[float, float, int, Callable[[], None]]] = []
        self._pools: list[VirtualRanks] = []

    def spawn(self, pool: ResourcePool) -> "VirtualRanks":
        self._pools.append(VirtualRanks(pool, self))
        return self._pools[-1]

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """Call `happen` when the clock is there."""
        tie = 0.0 if self._ties is None else self._ties.random()
        heapq.heappush(self._queue, (when, tie, next(self._count), happen))

    def watch(self, timeout_s: float | None = None) -> None:
        """Let the next thing happen. Raises Deadlock where there is none."""
        if not self._queue:
            raise Deadlock(f"at {self.now:g} s of virtual time everything is idle, and the controller waits")
        when, _, _, happen = heapq.heappop(self._queue)
        self.happening = when
        self.now = max(self.now, when)
        self.events += 1
        happen()

    def spend(self, seconds: float) -> None:
        """The controller is busy: what happens meanwhile it takes in afterwards. A call of many slices ends after the
        present one, for the next slice begins only when the controller asks for it."""
        if not seconds:
            return
        self.cut_slices()
        self.now += seconds

    def cut_slices(self) -> None:
        """There is news for the ranks: calls of many slices end after the present one."""
        for pool in self._pools:
            pool.cut_slices()

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
        self._queues: list[deque[tuple[float, _Call, str, str, Arguments]]] = [deque() for _ in range(pool.size)]
        """Calls that wait for each rank, with the time at which they were made."""
        self._running: dict[int, _Running] = {}
        """By rank."""

    def create(self, name: str, kind: type[Worker[Spec]], spec: Spec) -> dict[str, Mesh]:
        for rank, workers in enumerate(self._workers):
            workers[name] = kind(WorkerContext(name, rank, self.size, colocated=workers), spec)
        return self._workers[0][name].meshes

    def submit(self, name: str, method: str, calls: Calls) -> Future[dict[int, Any]]:
        call = _Call(self._cluster, calls)
        for rank, arguments in calls.items():
            self._queues[rank].append((self._cluster.now, call, name, method, arguments))
            if rank in self._running:
                self._cut(rank)
            else:
                self._start_next(rank, self._cluster.now)
        return Future(call.wait, call.notify)

    def cut_slices(self) -> None:
        """Calls of many slices end after the present one."""
        for rank in self._running:
            self._cut(rank)

    def close(self) -> None:
        """Nothing to end."""

    def _start_next(self, rank: int, free_since: float) -> None:
        """The rank has ended its last call, which the controller may hear of later than it makes the next one."""
        if not self._queues[rank]:
            return
        made, call, name, method, arguments = self._queues[rank].popleft()
        self._cluster.happening = now = max(free_since, made)
        taken: Timed = getattr(self._workers[rank][name], method)(*arguments.args, **arguments.kwargs)
        ends = now + taken.seconds
        running = self._running[rank] = _Running(call, taken, now, ends)
        self._cluster.at(ends, lambda: self._end(rank, running, ends))
        if self._queues[rank]:
            self._cut(rank)

    def _cut(self, rank: int) -> None:
        running, now = self._running[rank], self._cluster.now
        slice_s = running.taken.slice_s
        if math.isinf(slice_s):
            return
        ends = running.began + max(1, math.ceil((now - running.began) / slice_s)) * slice_s
        if ends < running.ends:
            running.ends = ends
            self._cluster.at(ends, lambda: self._end(rank, running, ends))

    def _end(self, rank: int, running: _Running, ended: float) -> None:
        if self._running.get(rank) is not running or ended != running.ends:
            return  # it was cut
        del self._running[rank]
        self.busy_s[rank] += ended - running.began
        call = running.call
        call.answers[rank] = running.taken.finish()
        call.missing -= 1
        self._start_next(rank, ended)
        if not call.missing:
            callbacks, call.callbacks = call.callbacks, []  # they know the call: without a cycle it is freed at once
            for callback in callbacks:
                callback()
