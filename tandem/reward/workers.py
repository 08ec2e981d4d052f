"""Reward functions run in processes of their own, each call with a time limit.

    consumes       lists of RewardCall, many at once, in one queue
    produces       their scores: what the function returned, or the failure of a call that hung or took its process down
    waits for      nothing: whoever waits for `connections` calls `poll`, when one is readable and every second at least
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from tandem.errors import StepGivenUp, TandemError, UserError
from tandem.reward.functions import RewardCall, RewardFunction, execute, failed_scores, load
from tandem.signals import REWARDS_S, leave_stopping_to_the_controller, waits_in_vain
from tandem.types import Score, Status

MAX_CHUNK = 256
FLUSH_S = 0.02
"""How long a worker keeps scores back, and about how long it works on a chunk of calls."""
_FAILURES = (Status.REWARD_ERROR, Status.REWARD_TIMEOUT)
_LOOK_S = 0.05
"""The time between looks at silent workers in `run`: how much later than its time-out a call may end."""
_MEAN_OF = 32
"""About how many of the latest calls the mean time of a call is taken over."""
_START = "import sys; sys.path[:] = sys.argv[2:]; from tandem.reward.workers import main; main()"
"""The worker finds modules exactly where its parent does, and does not run the parent's `__main__` again."""


@dataclass
class _Batch:
    """Calls that were added together."""

    unscored: int
    """How many of them have no scores yet."""
    done: Callable[[], None]


def _nothing() -> None:
    pass


class WorkerPool:
    """`count` processes that have loaded `references`, each with its arguments; others they load when called.

    They end with this process, at the latest after the call that they run.
    """

    def __init__(
        self,
        references: Mapping[str, Mapping[str, Any]],
        count: int,
        timeout_s: float,
        import_timeout_s: float = math.inf,
    ) -> None:
        """`import_timeout_s`: for a process to load `references`."""
        self._references = references
        self._timeout_s = timeout_s
        self._import_timeout_s = import_timeout_s
        self.failed = 0
        """Calls that have failed, of all that were ever added."""
        self._workers = [_Worker(self._references) for _ in range(count)]
        self._waiting: deque[RewardCall] = deque()
        """Calls that no worker has been given, of all batches; ahead of the others those that run alone."""
        self._batches: dict[int, _Batch] = {}
        """The batch of each call without scores, by the call's `id`."""
        self._complete: deque[Callable[[], None]] = deque()
        """What the next poll calls: `done` of batches whose calls all have scores."""
        self._has_new = False
        """Whether calls were added since the last poll."""
        self._readable, other_end = Pipe(duplex=False)
        """Always readable, for its other end is closed."""
        other_end.close()
        self._mean_call_s = math.inf
        """What a call took lately, on average; infinite until one has scores."""

    def run(self, calls: Sequence[RewardCall], look: Callable[[], None] = _nothing) -> None:
        """Fill in the scores of each call, and of other batches as they come. `look` is called between turns, and may
        raise. Raises what `poll` raises, and StepGivenUp where the run is to stop and scores do not come."""
        done: list[bool] = []
        since = time.monotonic()
        self.add(calls, lambda: done.append(True))
        try:
            while not done:
                wait(self.connections(), _LOOK_S)
                self.poll()
                look()
                if not done and waits_in_vain(since):
                    raise StepGivenUp(f"the rewards are not there {REWARDS_S:g} s later")
        except BaseException:
            self._withdraw(calls)
            raise

    def add(self, calls: Sequence[RewardCall], done: Callable[[], None]) -> None:
        """Have the scores of each call filled in; a later `poll` calls `done` when all have them.

        The next `poll` hands them out, so that batches that are added together share chunks.
        """
        batch = _Batch(len(calls), done)
        self._batches |= {id(call): batch for call in calls}
        self._waiting += calls
        self._has_new = True
        if not calls:
            self._complete.append(done)

    def connections(self) -> Sequence[Any]:
        """What to wait for: one of them is readable when `poll` has something to do. Empty: nothing is under way."""
        working = [worker.connection for worker in self._workers] if self._batches else []
        return [*working, self._readable] if self._has_new or self._complete else working

    def poll(self) -> None:
        """Take in the scores that have arrived, hand out calls, tell of complete batches. Never waits.

        It finds overdue calls as well, so it is to be called often. Raises TandemError when a worker cannot start, and
        what `done` raises.
        """
        self._has_new = False
        for worker in self._receive_scores():
            self._waiting.extendleft(reversed(self._replace(worker)))
        self._hand_out()
        while self._complete:
            self._complete.popleft()()

    def _withdraw(self, calls: Sequence[RewardCall]) -> None:
        """Nobody wants these calls any more: those that no worker has been given are not made."""
        gone = {id(call) for call in calls}
        self._waiting = deque(call for call in self._waiting if id(call) not in gone)
        given = {id(call) for worker in self._workers for call in worker.pending}
        for call in gone & self._batches.keys():
            if call in given:
                self._batches[call].done = _nothing
            else:
                del self._batches[call]

    def forget(self) -> None:
        """Nobody wants what was added: calls that no worker has been given are not made, and no `done` is called."""
        given = {id(call) for worker in self._workers for call in worker.pending}
        self._batches = {call: batch for call, batch in self._batches.items() if call in given}
        for batch in self._batches.values():
            batch.done = _nothing
        self._waiting.clear()
        self._complete.clear()
        self._has_new = False

    def close(self) -> None:
        """End the workers and whatever they started; nobody hears of calls without scores. Safe to repeat."""
        for worker in self._workers:
            worker.kill()
        self._readable.close()
        self._workers = []
        self._waiting.clear()
        self._batches.clear()
        self._complete.clear()
        self._has_new = False

    def _hand_out(self) -> None:
        for worker in self._workers:
            if self._waiting and worker.is_idle():
                size = self._chunk_size()
                worker.start([self._waiting.popleft() for _ in range(size)])

    def _chunk_size(self) -> int:
        """How many of the waiting calls a worker is given: slow ones one by one, so that all workers end together."""
        if self._waiting[0].runs_alone:
            return 1
        size = int(FLUSH_S / max(self._mean_call_s, 1e-6))
        return min(MAX_CHUNK, len(self._waiting), max(1, size))

    def _receive_scores(self) -> list[_Worker]:
        """Take in the scores that have arrived; returns the workers that have ended or are overdue."""
        # They are looked for before scores are read: one that still sent some is not given up.
        stuck = [worker for worker in self._workers if worker.has_ended() or self._is_overdue(worker)]
        ready = wait([worker.connection for worker in self._workers], 0)
        for worker in self._workers:
            scored = worker.receive() if worker.connection in ready else None
            if scored is not None:
                self._count(scored)
                stuck = [other for other in stuck if other is not worker]
        return stuck

    def _is_overdue(self, worker: _Worker) -> bool:
        return worker.is_overdue(self._timeout_s) or worker.loads_longer_than(self._import_timeout_s)

    def _count(self, scored: Sequence[RewardCall]) -> None:
        """Note that these calls have scores now."""
        for call in scored:
            self.failed += any(score.failure in _FAILURES for score in call.scores)
            batch = self._batches.pop(id(call))
            batch.unscored -= 1
            if not batch.unscored:
                self._complete.append(batch.done)
            seconds = sum(score.seconds for score in call.scores)
            is_first = self._mean_call_s == math.inf
            self._mean_call_s = seconds if is_first else self._mean_call_s + (seconds - self._mean_call_s) / _MEAN_OF

    def _replace(self, worker: _Worker) -> list[RewardCall]:
        """Start a fresh worker in place of one that hangs or has ended; returns the calls to run again."""
        is_overdue = worker.is_overdue(self._timeout_s)
        if worker.loads_longer_than(self._import_timeout_s):
            worker.kill()
            raise UserError(
                f"{_importing(worker)} takes a reward worker longer than reward.import_timeout_s = "
                f"{self._import_timeout_s:g} s; see what the file waits for when it is imported, or raise the limit"
            )
        seconds = time.monotonic() - worker.active_at
        status = worker.kill()
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        if not worker.has_loaded():
            self._raise_not_loaded(worker, ended, status)
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
        self._count(worker.pending)
        return []

    def _raise_not_loaded(self, worker: _Worker, ended: str, status: int) -> NoReturn:
        if not worker.loading:
            raise TandemError(f"a reward worker {ended} before any call; see the standard error stream")
        kind = UserError if status >= 0 else TandemError
        raise kind(
            f"{_importing(worker)}: a reward worker {ended} at that; what it has printed is in the standard error "
            "stream. A file of reward functions must not end the process that imports it"
        )


def _importing(worker: _Worker) -> str:
    place, _, name = worker.loading.rpartition(":")
    return f"reward.functions: importing {place} for its function {name}"


class _Worker:
    """One process, in a session of its own: Ctrl-C on the terminal passes it by, and its children die with it."""

    def __init__(self, references: Mapping[str, Mapping[str, Any]]) -> None:
        ours, theirs = socket.socketpair()
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.pending: deque[RewardCall] = deque()
        """Calls that it was given and that have no scores yet."""
        self.active_at = math.inf
        """When it was given calls or sent scores last, in monotonic seconds; infinite until it has loaded."""
        self.loading = ""
        """The function that it is importing, or has imported last."""
        self._loading_since = math.inf
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

    def start(self, calls: list[RewardCall]) -> None:
        self.pending.extend(calls)
        self.active_at = time.monotonic()
        self._send([(call.reference, call.seed, call.arguments, call.completions) for call in calls])

    def receive(self) -> list[RewardCall] | None:
        """Take the scores that it has sent; returns the calls that have them now, None at end of file. Raises UserError
        where it could not load a function."""
        try:
            received = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return None
        if isinstance(received, UserError):
            raise received
        if isinstance(received, str):
            self.loading, self._loading_since = received, time.monotonic()
            return []
        self.active_at = time.monotonic()
        scored = [self.pending.popleft() for _ in received]
        for call, scores in zip(scored, received, strict=True):
            call.scores = [Score(*fields) for fields in scores]
        return scored

    def has_loaded(self) -> bool:
        return self.active_at < math.inf

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def is_idle(self) -> bool:
        return not self.pending and self.has_loaded() and not self.has_ended()

    def is_overdue(self, timeout_s: float) -> bool:
        return bool(self.pending) and time.monotonic() - self.active_at > timeout_s

    def loads_longer_than(self, seconds: float) -> bool:
        is_loading = bool(self.loading) and not self.has_loaded()
        return is_loading and time.monotonic() - self._loading_since > seconds

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
        functions: dict[str, RewardFunction] = {}
        for reference, given in connection.recv().items():
            connection.send(reference)
            try:
                functions[reference] = load(reference, arguments=given)
            except UserError as error:  # its import may have gone well elsewhere
                connection.send(error)
                return
        connection.send([])  # it has loaded
        while True:
            _score(connection, functions, connection.recv())


def _score(connection: Connection[Any, Any], functions: dict[str, RewardFunction], calls: list[Any]) -> None:
    """Send the scores of each call, in order, those of quick calls together.

    Calls and scores come and go as tuples of their fields, which pickle in a third of the time.
    """
    finished: list[list[tuple[Any, ...]]] = []
    sent_at = time.monotonic()
    for fields in calls:
        call = RewardCall(*fields)
        if call.reference not in functions:
            functions[call.reference] = load(call.reference)
        finished.append([tuple(vars(score).values()) for score in execute(functions[call.reference], call)])
        if time.monotonic() - sent_at > FLUSH_S:
            connection.send(finished)
            finished, sent_at = [], time.monotonic()
    connection.send(finished)
