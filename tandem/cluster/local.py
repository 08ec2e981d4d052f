"""This machine: the processes of a pool come from a fork server that has torch loaded.

    consumes       calls of the controller, each written once to memory that all ranks of its pool map
    produces       answers, from memory of each rank
    waits for      all processes of all pools, in `LocalCluster.watch`
    unblocked by   answers, the end of a process, a call that is overdue

Meanwhile a thread a pool forwards what its processes print.
"""

import atexit
import multiprocessing
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, NoReturn

import torch

from tandem.cluster.debugger import is_open
from tandem.cluster.output import Output, forward
from tandem.cluster.process import TELL_STACKS, Answer, Request, Start, Task, serve
from tandem.cluster.shared_memory import Arena, Place, SharedFile, View
from tandem.controller.groups import Future
from tandem.controller.pools import ResourcePool
from tandem.errors import TandemError, UserError, WorkerLost
from tandem.workers.dispatch import Arguments, Calls, Mesh
from tandem.workers.host import Worker

_LOOK_S = 1.0
"""Between looks at the clock while workers are silent; also how long after a rank's error we look for a dead one,
whose end broke a collective and so is the cause."""
_GRACE_S = 3.0
"""For a process to end by itself, to write its stacks, to have its last lines forwarded."""
_FORK = multiprocessing.get_context("forkserver")


@dataclass(slots=True)
class _Call:
    answers: list[Any]
    missing: int


class _Process:
    """The controller's side of one process."""

    def __init__(self, pool: ResourcePool, rank: int, shared: dict[str, Any]) -> None:
        self.name = f"{pool.name} rank {rank}"
        self.rank = rank
        pipe: tuple[Any, Any] = _FORK.Pipe()
        self.connection, theirs = pipe
        readers, writers = zip(*(_FORK.Pipe(duplex=False) for _ in range(2)), strict=True)
        self.output = Output(self.name, *readers)
        self.stacks, answers = SharedFile(), SharedFile()
        self.answers = View(answers, writable=True)
        start = Start(self.name, rank, pool.size, theirs, writers, answers=answers, stacks=self.stacks, **shared)
        self.process = _FORK.Process(target=serve, args=(start,), name=self.name)
        self.process.start()
        for ended in (theirs, *writers):
            ended.close()
        self.pending: deque[_Call] = deque()
        self.since = time.monotonic()
        """When it began what is first in `pending`."""

    def expect(self, call: _Call) -> None:
        self.since = self.since if self.pending else time.monotonic()
        self.pending.append(call)

    def send(self, role: str = "", place: Place | None = None) -> None:
        """Without a place: end."""
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead, which its sentinel tells
            self.connection.send(Request(role, place, self.answers.released()))

    def receive(self, requests: Arena) -> None:
        """Take an answer. Raises what the worker raised, EOFError or ConnectionResetError when the process is dead."""
        answer: Answer = self.connection.recv()
        requests.free(answer.free)
        call = self.pending.popleft()
        self.since = time.monotonic()
        value = self.answers.read(answer.place)
        if answer.failed:
            raise value
        call.answers[self.rank] = value
        call.missing -= 1

    def obituary(self) -> str:
        code = self.process.exitcode
        assert code is not None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        hint = " (as the system does when memory runs out)" if code == -signal.SIGKILL else ""
        self.output.ended.wait(_GRACE_S)
        last = "\n".join(self.output.last) or "nothing"
        return f"{self.name} (process {self.process.pid}) {how}{hint}; the last that it printed:\n{last}"

    def kill(self) -> None:
        """With everything that it has started."""
        self.process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)


class LocalRanks:
    """The processes of one pool."""

    def __init__(self, pool: ResourcePool, cluster: "LocalCluster", environments: Sequence[dict[str, str]]) -> None:
        self.size = pool.size
        self.requests = Arena(file := SharedFile())
        self.processes: list[_Process] = []
        self._name = pool.name
        self._cluster = cluster
        shared = {"requests": file, "rendezvous": SharedFile(), "turn": cluster.turn, "terminal": _terminal()}
        try:
            for rank, environment in enumerate(environments):
                self.processes.append(_Process(pool, rank, shared | {"environment": environment}))
        finally:
            self._printer = Thread(target=forward, args=([p.output for p in self.processes],), daemon=True)
            self._printer.start()

    def start(self) -> None:
        """Wait until all processes are up, in one torch.distributed world."""
        call = _Call([None] * self.size, self.size)
        for process in self.processes:
            process.expect(call)
        self._wait(call)

    def create(self, role: str, kind: type[Worker], arguments: Arguments) -> dict[str, Mesh]:
        return self._ask("create", (role, kind), [arguments] * self.size).get()[0]

    def submit(self, role: str, method: str, calls: Calls) -> Future[list[Any]]:
        return self._ask("call", (role, method), calls)

    def _ask(self, verb: str, subject: tuple[str, Any], calls: Calls) -> Future[list[Any]]:
        self._check_open()
        sharing: dict[tuple[int, int], dict[int, Arguments]] = {}
        for rank, call in enumerate(calls):
            if call is not None:
                sharing.setdefault((id(call.args), id(call.kwargs)), {})[rank] = call
        asked = _Call([None] * self.size, sum(map(len, sharing.values())))
        for ranks in sharing.values():
            first = next(iter(ranks.values()))
            rows = {rank: call.rows for rank, call in ranks.items()}
            place = self.requests.write(Task(verb, subject, first.args, first.kwargs, rows), len(ranks))
            for rank in ranks:
                self.processes[rank].expect(asked)
                self.processes[rank].send(subject[0], place)
        return Future(partial(self._wait, asked))

    def _wait(self, call: _Call) -> list[Any]:
        while call.missing:
            self._check_open()
            self._cluster.watch()
        return call.answers

    def _check_open(self) -> None:
        if not self.processes:
            raise WorkerLost(f"pool {self._name}: its processes have ended")

    def close(self) -> None:
        """At once when a call is under way; else processes get a moment to free what they hold elsewhere."""
        self._cluster.forget(self)
        if not any(process.pending for process in self.processes):
            for process in self.processes:
                process.send()
            deadline = time.monotonic() + _GRACE_S
            for process in self.processes:
                process.process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.process.join()
            process.connection.close()
        self._printer.join(_GRACE_S)
        self.processes = []


class LocalCluster:
    """Pools on this machine. A failure in one ends them all; `spawn` may then start anew."""

    def __init__(self, timeout_s: float = 1800.0) -> None:
        """A call that takes longer, and is not being debugged, ends everything with the stacks of all ranks."""
        self.turn = SharedFile()
        self._timeout_s = timeout_s
        self._pools: list[LocalRanks] = []
        self._selector = selectors.DefaultSelector()
        known = [name for name in ("tandem.workers.rollout", "tandem.workers.training") if name in sys.modules]
        _FORK.set_forkserver_preload(["tandem.cluster.process", "tandem.cli", *known])
        atexit.register(self.close)

    def spawn(self, pool: ResourcePool) -> LocalRanks:
        if len(pool.processes_on_nodes) > 1:
            nodes = list(pool.processes_on_nodes)
            raise UserError(
                f"pool {pool.name}: {nodes} are several nodes, a local cluster is one; use cluster.type: ray"
            )
        ranks = LocalRanks(pool, self, self._environments(pool))
        self._pools.append(ranks)
        for process in ranks.processes:
            self._selector.register(process.connection, selectors.EVENT_READ, (ranks, process))
            self._selector.register(process.process.sentinel, selectors.EVENT_READ, (ranks, process))
        ranks.start()
        return ranks

    def _environments(self, pool: ResourcePool) -> list[dict[str, str]]:
        """Of each rank: ours, and where there are GPUs one that no other process has."""
        ours = dict(os.environ)
        count = torch.cuda.device_count()
        if not count:
            return [ours] * pool.size
        taken = sum(ranks.size for ranks in self._pools)
        if taken + pool.size > count:
            raise UserError(
                f"pool {pool.name}: {pool.size} processes need a GPU each, {count - taken} of {count} are free"
            )
        named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        return [{**ours, "CUDA_VISIBLE_DEVICES": gpu} for gpu in named.split(",")[taken : taken + pool.size]]

    def watch(self) -> None:
        """Wait a moment for answers and take them; raise when anything is wrong with any process."""
        for key, _ in self._selector.select(min(_LOOK_S, self._timeout_s)):
            ranks, process = key.data
            if key.fileobj is not process.connection:
                self._lost()
            try:
                process.receive(ranks.requests)
            except (EOFError, ConnectionResetError):
                self._lost()
            except TandemError as error:
                self._failed(error)
        now, processes = time.monotonic(), self._processes()
        if is_open(self.turn):
            for process in processes:
                process.since = now
        elif any(process.pending and now - process.since > self._timeout_s for process in processes):
            self._hung()

    def forget(self, ranks: LocalRanks) -> None:
        """The pool is not watched any more."""
        if ranks in self._pools:
            self._pools.remove(ranks)
            for process in ranks.processes:
                self._selector.unregister(process.connection)
                self._selector.unregister(process.process.sentinel)

    def close(self) -> None:
        while self._pools:
            self._pools[-1].close()

    def _processes(self) -> list[_Process]:
        return [process for ranks in self._pools for process in ranks.processes]

    def _failed(self, error: TandemError) -> NoReturn:
        sentinels = [process.process.sentinel for process in self._processes()]
        if wait(sentinels, _LOOK_S):
            self._lost()
        self.close()
        raise error

    def _lost(self) -> NoReturn:
        processes = self._processes()
        wait([process.process.sentinel for process in processes], _GRACE_S)
        dead = [process.obituary() for process in processes if process.process.exitcode is not None]
        self.close()
        raise WorkerLost("\n".join(dead))

    def _hung(self) -> NoReturn:
        processes = self._processes()
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.process.pid or 0, TELL_STACKS)
        time.sleep(_LOOK_S)
        stacks = [os.pread(process.stacks.descriptor, 1 << 20, 0).decode() for process in processes]
        told = "\n".join(f"{process.name}:\n{stack}" for process, stack in zip(processes, stacks, strict=True))
        self.close()
        raise WorkerLost(f"a call takes longer than cluster.timeout_s: {self._timeout_s:g}; all ranks are at\n{told}")


def _terminal() -> str | None:
    return os.ttyname(0) if os.isatty(0) else None
