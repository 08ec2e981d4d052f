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
        """One result a call, in order. Raises TandemError when workers die before they begin a call."""
        for worker in self._workers:
            if worker.pending:  # left over from a run that was interrupted
                self._replace(worker)
        self._calls, self._waiting, self._results, self._false_starts = calls, deque(range(len(calls))), {}, 0
        while len(self._results) < len(calls):
            for worker in list(self._workers):
                if self._waiting and not worker.pending:
                    self._hand_out(worker)
            self._collect()
        return [self._results[position] for position in range(len(calls))]

    def close(self) -> None:
        """End the workers and whatever they started. Safe to repeat."""
        for worker in self._workers:
            worker.kill()
            worker.close()
        self._workers = []

    def _hand_out(self, worker: _Worker) -> None:
        # Chunks shrink towards the end, so that the workers end together.
        size = min(MAX_CHUNK, -(-len(self._waiting) // (2 * len(self._workers))))
        positions = [self._waiting.popleft() for _ in range(size)]
        try:
            worker.send([(position, self._calls[position]) for position in positions])
        except (BrokenPipeError, ConnectionResetError):
            self._bury(worker)

    def _collect(self) -> None:
        busy = {worker.connection: worker for worker in self._workers if worker.pending}
        for connection in wait(list(busy), min(_LOOK_S, self._timeout_s)):
            worker = busy[connection]  # type: ignore[index]
            try:
                self._record(worker, worker.connection.recv())
            except (EOFError, ConnectionResetError):
                self._bury(worker)
        for worker in list(self._workers):
            if (overdue := worker.overdue(self._timeout_s)) is not None:
                self._bury(worker, overdue)
            elif worker.pending and worker.is_dead():
                self._bury(worker)

    def _record(self, worker: _Worker, results: list[Result]) -> None:
        for result in results:
            self._results[result.position] = result
            worker.pending.remove(result.position)
        self._false_starts = 0

    def _bury(self, worker: _Worker, overdue: int | None = None) -> None:
        """End a worker; the call to blame fails, what it had sent stands, the rest waits again."""
        status = worker.kill()
        for results in worker.last_words():
            self._record(worker, results)
        culprit = worker.board.latest() if overdue is None else overdue
        if culprit in worker.pending:
            worker.pending.remove(culprit)
            self._results[culprit] = self._failure(culprit, status, timed_out=overdue is not None)
        elif overdue is None:
            self._count_false_start(status)
        self._waiting.extendleft(reversed(worker.pending))
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        worker.close()
        self._workers[self._workers.index(worker)] = _Worker(self._references)

    def _count_false_start(self, status: int) -> None:
        self._false_starts += 1
        if self._false_starts > MAX_FALSE_STARTS:
            raise TandemError(
                f"reward workers {_ended(status)} {self._false_starts} times in a row outside of any call; "
                "what they said is on the standard error stream"
            )

    def _failure(self, position: int, status: int, timed_out: bool) -> Result:
        call = self._calls[position]
        reference = self._references[call.function]
        late = f"took longer than reward.timeout_s = {self._timeout_s:g} s"
        reason = late if timed_out else f"its process {_ended(status)}"
        site = f"{reference}: {reason}"
        failures = [
            Failure(f"reward function {reference!r} on {place}: {reason}", site, timed_out) for place in call.places
        ]
        seconds = self._timeout_s if timed_out else 0.0
        return Result(position, [Verdict(None, failure=failure) for failure in failures], seconds)


class _Worker:
    """One process, in a session of its own: Ctrl-C on the terminal passes it by, and its children die with it."""

    def __init__(self, references: list[str]) -> None:
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("tandem-reward")
        with theirs:
            os.ftruncate(memory, Board.SIZE)
            self.board = Board(memory)
            descriptors = (theirs.fileno(), memory)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *map(str, (*descriptors, os.getpid(), *sys.path))],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints joins our standard error
                env={**os.environ, "PYTHONHASHSEED": "0"},  # sets of strings iterate alike in every worker and run
                start_new_session=True,
            )
        os.close(memory)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.pending: list[int] = []
        """Positions of the calls it was given and has not answered."""
        self.board.clear()
        with suppress(BrokenPipeError, ConnectionResetError):  # `run` meets a dead worker when it sends calls
            self.connection.send(references)

    def send(self, chunk: list[tuple[int, Call]]) -> None:
        self.board.clear()
        self.pending = [position for position, _ in chunk]
        self.connection.send(chunk)

    def overdue(self, timeout_s: float) -> int | None:
        """The pending call that has run for longer than `timeout_s`."""
        running = self.board.running()
        if running is None or running[0] not in self.pending or time.monotonic() - running[1] <= timeout_s:
            return None
        return running[0]

    def is_dead(self) -> bool:
        """Without reaping it, so that its process group can still be named."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> int:
        """End it and what it started; its exit status (negative: the signal). Safe to repeat."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def last_words(self) -> list[list[Result]]:
        """Results that a dead worker had sent."""
        messages = []
        with suppress(EOFError, ConnectionResetError):
            while self.connection.poll():
                messages.append(self.connection.recv())
        return messages

    def close(self) -> None:
        self.connection.close()
        self.board.close()


def _ended(status: int) -> str:
    return (
        f"was killed by signal {-status} ({signal.strsignal(-status)})"
        if status < 0
        else f"ended with exit status {status}"
    )
