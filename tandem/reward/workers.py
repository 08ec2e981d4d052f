"""Reward functions run in processes of their own, each call with a time limit.

    consumes       the Calls of one `run`
    produces       their scores: what the function returned, or the failure of a call that hung or took its process down
    waits for      scores on the workers' sockets
    unblocked by   scores, the end of a worker's process, a call that is overdue

A worker gets a chunk of calls and sends scores every few milliseconds, so that trivial functions cost microseconds. If
it hangs or dies, the calls without scores run again one by one in fresh workers: which then hangs or dies has failed.
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
from tandem.reward.functions import Call, RewardFunction, execute, failed_scores, load
from tandem.signals import leave_stopping_to_the_controller
from tandem.types import Score, Status

MAX_CHUNK = 256
FLUSH_S = 0.02
"""How long a worker keeps scores back, and the time below which calls are not worth a second worker."""
_LOOK_S = 0.05
"""The time between looks at silent workers: how much later than its time-out a call may end."""
_START = "import sys; sys.path[:] = sys.argv[2:]; from tandem.reward.workers import main; main()"
"""The worker finds modules exactly where its parent does, and does not run the parent's `__main__` again."""


class WorkerPool:
    """`count` processes that have loaded `references`, each with its arguments; others they load when called.

    They end with this process, at the latest after the call that they run.
    """

    def __init__(self, references: Mapping[str, Mapping[str, Any]], count: int, timeout_s: float) -> None:
        self._references = references
        self._timeout_s = timeout_s
        self._workers = [_Worker(self._references) for _ in range(count)]
        self._mean_call_s = math.inf
        """What a call of the latest run took, on average."""

    def run(self, calls: Sequence[Call]) -> None:
        """Fill in the scores of each call. Raises TandemError when a worker cannot start."""
        waiting = deque(calls)
        while waiting or any(worker.pending for worker in self._workers):
            self._hand_out(waiting)
            for worker in self._receive_scores():
                waiting.extendleft(reversed(self._replace(worker)))
        seconds = sum(score.seconds for call in calls for score in call.scores)
        self._mean_call_s = seconds / max(1, len(calls))

    def close(self) -> None:
        """End the workers and whatever they started. Safe to repeat."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _hand_out(self, waiting: deque[Call]) -> None:
        for worker in self._workers:
            if waiting and worker.is_idle():
                size = self._chunk_size(waiting)
                worker.start([waiting.popleft() for _ in range(size)])

    def _chunk_size(self, waiting: Sequence[Call]) -> int:
        """How many calls a worker is given: fewer towards the end, so that all end together, if that is worth it."""
        if waiting[0].runs_alone:
            return 1
        even_share = math.ceil(len(waiting) / len(self._workers))
        worth_a_worker = int(FLUSH_S / max(self._mean_call_s, 1e-6))
        return min(MAX_CHUNK, len(waiting), max(even_share, worth_a_worker))

    def _receive_scores(self) -> list[_Worker]:
        """Take the scores that arrive within a moment; returns the workers that have ended or are overdue."""
        # They are looked for before scores are read: one that still sent some is not given up.
        stuck = [worker for worker in self._workers if worker.has_ended() or worker.is_overdue(self._timeout_s)]
        ready = wait([worker.connection for worker in self._workers], 0 if stuck else _LOOK_S)
        active = [worker for worker in self._workers if worker.connection in ready and worker.receive()]
        return [worker for worker in stuck if worker not in active]

    def _replace(self, worker: _Worker) -> list[Call]:
        """Start a fresh worker in place of one that hangs or has ended; returns the calls to run again."""
        is_overdue = worker.is_overdue(self._timeout_s)
        seconds = time.monotonic() - worker.active_at
        status = worker.kill()
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        if not worker.has_loaded():
            raise TandemError(f"a reward worker {ended} before any call; see the standard error stream")
        self._workers[self._workers.index(worker)] = _Worker(self._references)
        if len(worker.pending) > 1:
            for call in worker.pending:
                call.runs_alone = True
            return list(worker.pending)
        for call in worker.pending:
            reason, failure = f"its process {ended}", Status.REWARD_ERROR
            if is_overdue:
                reason, failure = f"took longer than reward.timeout_s = {self._timeout_s:g} s", Status.REWARD_TIMEOUT
            call.scores = failed_scores(len(call.completions), reason, failure, seconds)
        return []


class _Worker:
    """One process, in a session of its own: Ctrl-C on the terminal passes it by, and its children die with it."""

    def __init__(self, references: Mapping[str, Mapping[str, Any]]) -> None:
        ours, theirs = socket.socketpair()
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.pending: deque[Call] = deque()
        """Calls that it was given and that have no scores yet."""
        self.active_at = math.inf
        """When it was given calls or sent scores last, in monotonic seconds; infinite until it has loaded."""
        self.process = subprocess.Popen(
            [sys.executable, "-uP", "-c", _START, str(theirs.fileno()), *sys.path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a function prints joins our standard error
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sets of strings iterate alike in every worker and run
            start_new_session=True,
        )
        theirs.close()
        self._send(references)

    def start(self, calls: list[Call]) -> None:
        self.pending.extend(calls)
        self.active_at = time.monotonic()
        self._send(calls)

    def receive(self) -> bool:
        """Take the scores that it has sent; False at end of file."""
        try:
            received = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return False
        self.active_at = time.monotonic()
        for scores in received:
            self.pending.popleft().scores = scores
        return True

    def has_loaded(self) -> bool:
        return self.active_at < math.inf

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def is_idle(self) -> bool:
        return not self.pending and self.has_loaded() and not self.has_ended()

    def is_overdue(self, timeout_s: float) -> bool:
        return bool(self.pending) and time.monotonic() - self.active_at > timeout_s

    def kill(self) -> int:
        """End it and what it started; returns its exit status (negative: the signal)."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()

    def _send(self, message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead, which `has_ended` tells
            self.connection.send(message)


def main() -> None:
    """What a worker runs: load the functions, then score lists of calls until end of file."""
    leave_stopping_to_the_controller()
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    if sys.platform == "linux":  # prctl(PR_SET_PDEATHSIG): a call that never ends must not outlive the trainer
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        functions = {reference: load(reference, arguments=given) for reference, given in connection.recv().items()}
        connection.send([])  # it has loaded
        while True:
            _score(connection, functions, connection.recv())


def _score(connection: Connection[Any, Any], functions: dict[str, RewardFunction], calls: list[Call]) -> None:
    """Send the scores of each call, in order, those of quick calls together."""
    finished: list[list[Score]] = []
    sent_at = time.monotonic()
    for call in calls:
        if call.reference not in functions:
            functions[call.reference] = load(call.reference)
        finished.append(execute(functions[call.reference], call))
        if time.monotonic() - sent_at > FLUSH_S:
            connection.send(finished)
            finished, sent_at = [], time.monotonic()
    connection.send(finished)
