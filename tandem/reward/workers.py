"""Reward functions run in processes of their own, each call with a time limit.

    consumes       Calls of one `run`
    produces       a Result each: verdicts, or the failure of the one call that hung or took its process down
    waits for      results on the sockets, a tenth of a second at a time
    unblocked by   results, the end of a process, a call that is overdue

A worker gets a chunk of calls, so that trivial functions cost microseconds. When its running call outlives the limit or
its process dies, that call fails, results that it had sent stand, and the rest goes to a fresh worker.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from tandem.errors import TandemError
from tandem.reward.verdicts import Failure, Verdict
from tandem.reward.worker_main import Board, Call, Result

MAX_CHUNK = 64
MAX_FALSE_STARTS = 5
_LOOK_S = 0.1
"""Between looks at workers that are silent: how much later than its time-out a call may end."""
_START = "import sys; sys.path[:] = sys.argv[4:]; from tandem.reward.worker_main import main; main()"
"""The worker finds modules exactly where its parent does, and does not run the parent's `__main__` again."""


class WorkerPool:
    """`count` processes that have loaded `references`.

    One thread makes and uses a pool and outlives it: Linux ends a worker with the thread that started it.
    """

    def __init__(self, references: Sequence[str], count: int, timeout_s: float) -> None:
        self._references = list(references)
        self._timeout_s = timeout_s
        self._workers = [_Worker(self._references) for _ in range(count)]
        self._calls: Sequence[Call] = ()
        self._waiting: deque[int] = deque()
        self._results: dict[int, Result] = {}
        self._false_starts = 0

    def run(self, calls: Sequence[Call]) -> list[Result]:
        """One result a call, in order. Raises TandemError when workers keep dying without a call to blame."""
        for worker in self._workers:
            if worker.pending:  # left over from a run that was interrupted
                self._replace(worker)
        self._calls, self._waiting, self._results, self._false_starts = calls, deque(range(len(calls))), {}, 0
        while len(self._results) < len(calls):
            for worker in self._workers:
                if self._waiting and not worker.pending:
                    self._hand_out(worker)
            self._collect()
        return [self._results[position] for position in range(len(calls))]

    def close(self) -> None:
        """End the workers and whatever they started. Safe to repeat."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _hand_out(self, worker: _Worker) -> None:
        # Chunks shrink towards the end, so that the workers end together.
        size = min(MAX_CHUNK, -(-len(self._waiting) // (2 * len(self._workers))))
        worker.pending = [self._waiting.popleft() for _ in range(size)]
        worker.board.write(-1, 0.0)
        worker.send([(position, self._calls[position]) for position in worker.pending])

    def _collect(self) -> None:
        busy = [worker for worker in self._workers if worker.pending]
        ready = wait([worker.connection for worker in busy], min(_LOOK_S, self._timeout_s))
        for worker in busy:
            if worker.connection in ready and (results := worker.receive()):
                self._record(worker, results)
            elif (overdue := worker.overdue(self._timeout_s)) is not None:
                self._bury(worker, overdue)
            elif worker.is_dead():
                self._bury(worker)

    def _record(self, worker: _Worker, results: list[Result]) -> None:
        for result in results:
            self._results[result.position] = result
            worker.pending.remove(result.position)
            self._false_starts = 0

    def _bury(self, worker: _Worker, overdue: int | None = None) -> None:
        """Replace a worker; the call to blame fails, what it had sent stands, the rest waits again."""
        culprit = worker.board.read()[0] if overdue is None else overdue
        status, last_words = self._replace(worker)
        self._record(worker, last_words)
        if culprit in worker.pending:
            worker.pending.remove(culprit)
            if overdue is None:
                self._fail(culprit, f"its process {_ended(status)}", timed_out=False)
            else:
                self._fail(culprit, f"took longer than reward.timeout_s = {self._timeout_s:g} s", timed_out=True)
        elif overdue is None:
            self._count_false_start(status)
        self._waiting.extendleft(reversed(worker.pending))

    def _replace(self, worker: _Worker) -> tuple[int, list[Result]]:
        last = worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._references)
        return last

    def _count_false_start(self, status: int) -> None:
        self._false_starts += 1
        if self._false_starts > MAX_FALSE_STARTS:
            raise TandemError(
                f"reward workers: {self._false_starts} in a row {_ended(status)} outside of any call; "
                "what they said is on the standard error stream"
            )

    def _fail(self, position: int, reason: str, timed_out: bool) -> None:
        call = self._calls[position]
        function = f"reward function {call.reference!r}"
        failures = [
            Failure(f"{function} on {place}: {reason}", f"{function}: {reason}", timed_out) for place in call.places
        ]
        verdicts = [Verdict(None, failure=failure) for failure in failures]
        self._results[position] = Result(position, verdicts, self._timeout_s if timed_out else 0.0)


class _Worker:
    """One process, in a session of its own: Ctrl-C on the terminal passes it by, and its children die with it."""

    def __init__(self, references: list[str]) -> None:
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("tandem-reward")
        os.ftruncate(memory, Board.SIZE)
        self.board = Board(memory)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.pending: list[int] = []
        """Positions of the calls it was given and has not answered."""
        numbers = (theirs.fileno(), memory, os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, *map(str, (*numbers, *sys.path))],
            pass_fds=numbers[:2],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a function prints joins our standard error
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sets of strings iterate alike in every worker and run
            start_new_session=True,
        )
        theirs.close()
        os.close(memory)
        self.send(references)

    def send(self, message: Any) -> None:
        # A worker that is dead is found out, and replaced, where its answer is awaited.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def receive(self) -> list[Result]:
        """Results that it has sent; none when it is dead."""
        with suppress(EOFError, ConnectionResetError):
            return self.connection.recv()
        return []

    def overdue(self, timeout_s: float) -> int | None:
        """The pending call that has run for longer than `timeout_s`."""
        position, started = self.board.read()
        late = position in self.pending and 0.0 < started < time.monotonic() - timeout_s
        return position if late and self.board.read() == (position, started) else None

    def is_dead(self) -> bool:
        """Without reaping it, so that its process group can still be named."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> tuple[int, list[Result]]:
        """Kill it and what it started: its exit status (negative: the signal) and results that had been on the way."""
        with suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        status, last = self._process.wait(), []
        while not self.connection.closed and self.connection.poll():
            results = self.receive()
            if not results:
                break
            last += results
        self.connection.close()
        return status, last


def _ended(status: int) -> str:
    if status < 0:
        return f"was killed by signal {-status} ({signal.strsignal(-status)})"
    return f"ended with exit status {status}"
