"""Reward functions run in processes of their own, each call with a time limit.

    consumes       Calls of one `run`
    produces       their scores: what the function says, or the failure of the call that hung or took its process down
    waits for      answers on the sockets
    unblocked by   answers, the end of a process, a call that is overdue

A worker gets a chunk of calls and answers every few milliseconds, so that trivial functions cost microseconds. When it
hangs or dies, its unanswered calls run again one by one in fresh workers: who hangs or dies alone is to blame.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from tandem.errors import TandemError
from tandem.reward.functions import Call, execute, load, lost
from tandem.signals import leave_stopping_to_the_controller
from tandem.types import Score, Status

MAX_CHUNK = 256
FLUSH_S = 0.02
"""How long a worker keeps answers back, and the time below which calls are not worth a second worker."""
_LOOK_S = 0.05
"""Between looks at workers that are silent: how much later than its time-out a call may end."""
_START = "import sys; sys.path[:] = sys.argv[2:]; from tandem.reward.workers import main; main()"
"""The worker finds modules exactly where its parent does, and does not run the parent's `__main__` again."""


class WorkerPool:
    """`count` processes that have loaded `references`, each with its arguments; others they load when called.

    They end with ours, at the latest after the call they run.
    """

    def __init__(self, references: Mapping[str, Mapping[str, Any]], count: int, timeout_s: float) -> None:
        self._references = references
        self._timeout_s = timeout_s
        self._workers = [_Worker(self._references) for _ in range(count)]
        self._call_s = math.inf
        """What a call of the latest run took, on average."""

    def run(self, calls: Sequence[Call]) -> None:
        """Fill in the scores of each call. Raises TandemError when a worker cannot start."""
        waiting = deque(calls)
        while waiting or any(worker.pending for worker in self._workers):
            for worker in self._workers:
                if waiting and worker.is_idle():
                    worker.pending.extend(waiting.popleft() for _ in range(self._chunk(waiting)))
                    worker.since = time.monotonic()
                    worker.send(list(worker.pending))
            # Who has ended is asked before who has answered, so that no answer is overlooked.
            stuck = [w for w in self._workers if w.process.poll() is not None or w.is_late(self._timeout_s)]
            answered = wait([worker.connection for worker in self._workers], 0 if stuck else _LOOK_S)
            for worker in list(self._workers):
                if not (worker.connection in answered and worker.receive()) and worker in stuck:
                    waiting.extendleft(reversed(self._replace(worker)))
        self._call_s = sum(score.seconds for call in calls for score in call.scores) / max(1, len(calls))

    def _chunk(self, waiting: Sequence[Call]) -> int:
        """How many calls a worker is given: fewer towards the end, so that all end together, if that is worth it."""
        fair, quick = -(-len(waiting) // len(self._workers)), int(FLUSH_S / max(self._call_s, 1e-6))
        return 1 if waiting[0].suspect else min(MAX_CHUNK, len(waiting), max(fair, quick))

    def close(self) -> None:
        """End the workers and whatever they started. Safe to repeat."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _replace(self, worker: _Worker) -> list[Call]:
        """Start a fresh worker in place of one that hangs or has ended; the calls to run again."""
        late, status, seconds = worker.is_late(self._timeout_s), worker.end(), time.monotonic() - worker.since
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        if worker.since == math.inf:
            raise TandemError(f"a reward worker {ended} before any call; see the standard error stream")
        self._workers[self._workers.index(worker)] = _Worker(self._references)
        if len(worker.pending) == 1:
            call = worker.pending.popleft()
            slow = f"took longer than reward.timeout_s = {self._timeout_s:g} s"
            failure = Status.REWARD_TIMEOUT if late else Status.REWARD_ERROR
            call.scores = lost(len(call.completions), slow if late else f"its process {ended}", failure, seconds)
        for call in worker.pending:
            call.suspect = True
        return list(worker.pending)


class _Worker:
    """One process, in a session of its own: Ctrl-C on the terminal passes it by, and its children die with it."""

    def __init__(self, references: Mapping[str, Mapping[str, Any]]) -> None:
        ours, theirs = socket.socketpair()
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.pending: deque[Call] = deque()
        """Given and not answered."""
        self.since = math.inf
        """When it was given calls or answered last; infinite until it has loaded the functions."""
        self.process = subprocess.Popen(
            [sys.executable, "-uP", "-c", _START, str(theirs.fileno()), *sys.path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a function prints joins our standard error
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sets of strings iterate alike in every worker and run
            start_new_session=True,
        )
        theirs.close()
        self.send(references)

    def send(self, message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead, which its process tells
            self.connection.send(message)

    def receive(self) -> bool:
        """Take what it has sent; False at end of file."""
        try:
            answers = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return False
        self.since = time.monotonic()
        for scores in answers:
            self.pending.popleft().scores = scores
        return True

    def is_idle(self) -> bool:
        return not self.pending and self.since < math.inf and self.process.poll() is None

    def is_late(self, timeout_s: float) -> bool:
        return bool(self.pending) and time.monotonic() - self.since > timeout_s

    def end(self) -> int:
        """Kill it and what it started; its exit status (negative: the signal)."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


def main() -> None:
    """What a worker runs: lists of calls in, lists of their scores out, until end of file."""
    leave_stopping_to_the_controller()
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    if sys.platform == "linux":  # prctl(PR_SET_PDEATHSIG): a call that never ends must not outlive the trainer
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        functions = {reference: load(reference, arguments=given) for reference, given in connection.recv().items()}
        answers: list[list[Score]] = []
        while True:
            connection.send(answers)
            answers, flushed = [], time.monotonic()
            for call in connection.recv():
                if call.reference not in functions:
                    functions[call.reference] = load(call.reference)
                answers.append(execute(functions[call.reference], call))
                if time.monotonic() - flushed > FLUSH_S:
                    connection.send(answers)
                    answers, flushed = [], time.monotonic()
