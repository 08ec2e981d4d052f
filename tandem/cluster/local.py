"""This machine: the processes of a pool come from a fork server that has torch loaded.

    consumes       calls of the controller, each written once to memory that all ranks of its pool map
    produces       answers, in memory of the rank that answers
    waits for      the pipes of all processes of all pools, in `LocalCluster.watch`
    unblocked by   answers, sources, the end of a process, a call that is overdue

A thread for each process forwards what it prints.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, NoReturn, TypeVar

import torch

from tandem.cluster.debugger import is_open
from tandem.cluster.events import Events, PendingCall
from tandem.cluster.process import TELL_STACKS, ProcessSetup, keep_freed_memory, process_main
from tandem.cluster.rank_rpc import CallRequest, CreateRequest, RankClient
from tandem.cluster.shared_memory import Arena, SharedFile, View
from tandem.controller.pools import ResourcePool
from tandem.controller.worker_groups import EventSource, Future
from tandem.errors import TandemError, UserError, WorkerLost
from tandem.signals import stop_signals_blocked
from tandem.workers.host import Worker
from tandem.workers.registration import Calls, Mesh

Spec = TypeVar("Spec")
_FORK = multiprocessing.get_context("forkserver")
_PRELOADED = {"tandem.cluster.process", "tandem.workers.rollout", "tandem.workers.training"}
_WRITING_S = 1.0
"""For stacks to be written; for a death to show that broke another rank's collective."""
_GRACE_S = 3.0
"""For a process to end by itself, or for what it has printed to come through."""
_LAST_LINES, _STACK_LINES = 20, 500
"""Lines of what a process has printed: those shown when it dies, and those kept."""


class _Process(RankClient):
    """The controller's side of a process, which `start` starts."""

    def __init__(self, pool: ResourcePool, rank: int, gpu: str, requests: Arena, up: PendingCall, *shared: Any) -> None:
        self.name, self.gpu = f"{pool.name} rank {rank}", gpu
        pipes: tuple[tuple[Any, Any], tuple[Any, Any]] = _FORK.Pipe(), _FORK.Pipe(duplex=False)
        (connection, theirs), (self._output, output) = pipes
        self._given_away = theirs, output
        super().__init__(rank, connection, connection, requests, View(answers := SharedFile(), writable=True))
        self.pending.append(up)
        environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        setup = ProcessSetup(self.name, rank, pool.size, theirs, output, environment, answers, *shared)
        self.process = _FORK.Process(target=process_main, args=(setup,), name=self.name)
        self.printed: deque[str] = deque(maxlen=_STACK_LINES)
        self.printer = Thread(target=self._forward, daemon=True)

    def start(self) -> None:
        self.process.start()
        for end in self._given_away:
            end.close()
        self.printer.start()

    def kill(self) -> None:
        """End the process and all that it has started, also where `start` was interrupted."""
        if self.process.pid is not None:
            self.process.kill()
            self.signal(signal.SIGKILL)

    def join(self) -> None:
        """Wait until it has ended, and what it has printed is out."""
        if self.process.pid is not None:
            self.process.join()
        self.close()
        if self.printer.ident is not None:
            self.printer.join(_GRACE_S)

    def _forward(self) -> None:
        pipe = self._output.fileno()
        with self._output, os.fdopen(pipe, errors="replace", newline="\n", closefd=False) as lines:
            for line in lines:
                self.printed.append(line.rstrip().rpartition("\r")[2])  # of a progress bar, its last state
                print(f"({self.name}) {self.printed[-1]}\n", end="", flush=True)

    def report_end(self) -> str:
        """How the process ended, and what it printed last."""
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        hint = " (as the system does when memory runs out)" if code == -signal.SIGKILL else ""
        self.printer.join(_GRACE_S)
        last = "\n".join([*self.printed][-_LAST_LINES:]) or "nothing"
        return f"{self.name} (process {self.process.pid}) {how}{hint}; the last that it printed:\n{last}"

    def signal(self, number: signal.Signals) -> None:
        """Signal the process and all that it has started."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class LocalRanks:
    """The processes of one pool."""

    def __init__(self, pool: ResourcePool, cluster: "LocalCluster") -> None:
        self.size = pool.size
        self.processes: list[_Process] = []
        self._pool = pool
        self._cluster = cluster
        self._file = SharedFile()
        self._requests = Arena(self._file, pickler())

    def start(self, gpus: list[str]) -> None:
        """Wait until a process for each is up, all in one torch.distributed world."""
        up = PendingCall(range(self.size))
        shared = self._file, SharedFile(), self._cluster.turn, os.ttyname(0) if os.isatty(0) else None
        _start_fork_server()
        for rank, gpu in enumerate(gpus):
            self.processes.append(_Process(self._pool, rank, gpu, self._requests, up, *shared))
            self.processes[-1].start()  # after it is known: Ctrl-C may interrupt this, and `close` must end it
        self._wait(up)

    def create(self, name: str, kind: type[Worker[Spec]], spec: Spec) -> dict[str, Mesh]:
        self._check_open()
        call = PendingCall(range(self.size))
        slot = self._requests.write(CreateRequest(kind, spec), self.size)
        for process in self.processes:
            process.request(call, name, slot)
        return self._wait(call)[0]

    def submit(self, name: str, method: str, calls: Calls) -> Future[dict[int, Any]]:
        self._check_open()
        sharing: dict[int, list[int]] = {}
        for rank, arguments in calls.items():
            sharing.setdefault(id(arguments), []).append(rank)
        call = PendingCall(calls)
        for ranks in sharing.values():
            arguments = calls[ranks[0]]
            slot = self._requests.write(CallRequest(method, arguments.args, arguments.kwargs), len(ranks))
            for rank in ranks:
                self.processes[rank].request(call, name, slot)
        return self._cluster.events.future(call, partial(self._wait, call))

    def _wait(self, call: PendingCall) -> dict[int, Any]:
        while call.missing:
            self._check_open()
            self._cluster.watch()
        return call.answers

    def _check_open(self) -> None:
        if not self.processes:
            raise WorkerLost(f"pool {self._pool.name}: its processes have ended")

    def close(self) -> None:
        """End the processes: at once when a call is under way, else after a moment to free what they hold elsewhere."""
        if not any(process.pending for process in self.processes):
            for process in self.processes:
                process.end()
            deadline = time.monotonic() + _GRACE_S
            for process in self.processes:
                process.process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []


def pickler() -> Callable[..., bytes]:
    """What writes requests. Classes and functions of a program are found in its file, which each process reads; those
    of a notebook are in no file, and travel with the requests that name them."""
    if hasattr(sys.modules["__main__"], "__file__"):
        return pickle.dumps
    import cloudpickle  # for notebooks alone

    return cloudpickle.dumps


class LocalCluster:
    """Pools on this machine. A failure in one ends them all, but that a death leaves those be that have nothing to do:
    a trainer may save. `spawn` may then start anew."""

    def __init__(self, timeout_s: float = 1800.0) -> None:
        """A call that takes longer ends everything with the stacks of all ranks, unless a rank is being debugged."""
        self.turn = SharedFile()
        """Locked by the rank that is at a prompt."""
        keep_freed_memory()
        self.events = Events()
        self._timeout_s = timeout_s
        self._pools: list[LocalRanks] = []
        # Every process runs the main script's imports again, which costs nothing where the fork server has made them.
        main = {getattr(x, "__module__", getattr(x, "__name__", "")) for x in vars(sys.modules["__main__"]).values()}
        _FORK.set_forkserver_preload(sorted((main | _PRELOADED) & (sys.modules.keys() - {"__main__"})))
        atexit.register(self.close)

    def spawn(self, pool: ResourcePool) -> LocalRanks:
        gpus = self._free_gpus(pool)
        ranks = LocalRanks(pool, self)
        self._pools = [*(other for other in self._pools if other.processes), ranks]
        ranks.start(gpus)
        return ranks

    def _free_gpus(self, pool: ResourcePool) -> list[str]:
        """One for each rank of the pool, "" where there are none at all."""
        count = torch.cuda.device_count()
        names = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]
        free = [name for name in names if name not in {process.gpu for process in self._processes}]
        if count and len(free) < pool.size:
            raise UserError(f"pool {pool.name}: {pool.size} processes need a GPU each; free are {len(free)} of {count}")
        return (free or [""] * pool.size)[: pool.size]

    @property
    def sources(self) -> list[EventSource]:
        return self.events.sources

    def watch(self, timeout_s: float | None = None) -> None:
        """Raises when anything is wrong with any process."""
        connections = self.events.connections()
        under_way = bool(connections) or any(process.pending for process in self._processes)
        self._take_in(connections, min(self.events.patience_s(timeout_s, under_way), self._timeout_s))
        self._check_time()
        self.events.run()

    def _take_in(self, connections: list[Any], patience_s: float) -> None:
        answering: dict[Any, _Process] = {process.connection: process for process in self._processes}
        sentinels = self._sentinels
        for end in wait([*answering, *sentinels, *connections], patience_s):
            if end in sentinels:
                self._lost()
            if end not in answering:
                continue  # a source's, which its turn looks at
            try:
                answering[end].receive(self.events)
            except (EOFError, ConnectionResetError):
                self._lost()
            except TandemError as error:
                self._failed(error)

    def _check_time(self) -> None:
        now = time.monotonic()
        if is_open(self.turn):
            for process in self._processes:
                process.since = now
        elif any(process.pending and now - process.since > self._timeout_s for process in self._processes):
            self._hung()

    def close(self) -> None:
        self.events.forget()
        for ranks in self._pools:
            ranks.close()
        self._pools = []

    @property
    def _processes(self) -> list[_Process]:
        return [process for ranks in self._pools for process in ranks.processes]

    @property
    def _sentinels(self) -> list[int]:
        return [process.process.sentinel for process in self._processes]

    def _failed(self, error: TandemError) -> NoReturn:
        if wait(self._sentinels, _WRITING_S):
            self._lost()
        self.close()
        raise error

    def _lost(self) -> NoReturn:
        wait(self._sentinels, _GRACE_S)
        dead = [process.report_end() for process in self._processes if process.process.exitcode is not None]
        self.events.forget()
        for ranks in self._pools:
            if any(process.pending or process.process.exitcode is not None for process in ranks.processes):
                ranks.close()
        raise WorkerLost("\n".join(dead)) from None

    def _hung(self) -> NoReturn:
        for process in self._processes:
            process.printed.clear()
            process.signal(TELL_STACKS)
        time.sleep(_WRITING_S)
        stacks = "\n".join(line for process in self._processes for line in (f"{process.name}:", *process.printed))
        self.close()
        raise WorkerLost(f"a call takes longer than cluster.timeout_s: {self._timeout_s:g}; all ranks are at\n{stacks}")


def _start_fork_server() -> None:
    """Where it does not run yet, so that it goes on when everything gets SIGTERM: it tells of the ends of processes."""
    resource_tracker.ensure_running()  # first, for that would unblock the signals
    with stop_signals_blocked():
        forkserver.ensure_running()
