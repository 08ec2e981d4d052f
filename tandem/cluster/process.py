"""What a worker process of the local cluster runs: a Host that answers what comes over a pipe, until that ends.

consumes       Requests from the controller, in order
produces       one Answer each
unblocked by   a request; the end of the controller, at which the kernel kills us and whatever we started
"""

import faulthandler
import fcntl
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from tandem.cluster.debugger import TerminalPdb
from tandem.cluster.shared_memory import Arena, Place, SharedFile, View
from tandem.errors import TandemError, WorkerError
from tandem.types import IntArray
from tandem.workers.dispatch import Arguments
from tandem.workers.host import Host

TELL_STACKS = signal.SIGUSR1
"""Makes a process write the Python stacks of its threads to `Start.stacks`, whatever it is doing."""
_FOR_EVER_S = 7 * 86_400.0
"""Of a collective: the controller's time-out ends it, unless somebody is debugging."""


class Request(NamedTuple):
    role: str
    place: Place | None
    """Of a Task; None: end."""
    free: list[int]
    """Regions of earlier answers that nobody needs any more."""


class Task(NamedTuple):
    """`Host.<verb>(*subject, arguments)`, written once for the ranks that share `args`."""

    verb: str
    subject: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: Mapping[int, IntArray | None]
    """`Arguments.rows`, by rank."""


class Answer(NamedTuple):
    place: Place
    """Of what was answered, or of the error that was raised."""
    failed: bool
    free: list[int]
    """Regions of requests that this rank needs no more."""


@dataclass(frozen=True)
class Start:
    """What a process is given."""

    name: str
    rank: int
    size: int
    connection: Connection
    outputs: tuple[Connection, Connection]
    """For its standard output and error."""
    requests: SharedFile
    answers: SharedFile
    stacks: SharedFile
    rendezvous: SharedFile
    turn: SharedFile
    """To debug."""
    terminal: str | None
    environment: dict[str, str]


def serve(start: Start) -> None:
    """The process's main function. Its first answer, to no request, tells that it is up."""
    _prepare(start)
    _Server(start).run()


class _Server:
    def __init__(self, start: Start) -> None:
        self._start = start
        self._host = Host(start.rank, start.size)
        self._requests, self._answers = View(start.requests), Arena(start.answers)

    def run(self) -> None:
        self._answer(self._start.name, self._join)
        with suppress(EOFError):
            while (place := (request := self._start.connection.recv()).place) is not None:
                self._answers.free(request.free)
                self._answer(request.role, partial(self._perform, place))
        self._host.close()

    def _join(self) -> str:
        if self._start.size > 1:
            rendezvous = f"file:///proc/self/fd/{self._start.rendezvous.descriptor}"
            self._host.join(rendezvous, self._start.rank, _FOR_EVER_S)
        return str(self._host)

    def _perform(self, place: Place) -> Any:
        task: Task = self._requests.read(place)
        arguments = Arguments(task.args, task.kwargs, task.rows[self._start.rank])
        return getattr(self._host, task.verb)(*task.subject, arguments)

    def _answer(self, role: str, work: Callable[[], Any]) -> None:
        place, failed = self._write(role, work)
        self._start.connection.send(Answer(place, failed, self._requests.released()))

    def _write(self, role: str, work: Callable[[], Any]) -> tuple[Place, bool]:
        try:
            return self._answers.write(work()), False
        except TandemError as error:
            return self._answers.write(error), True
        except Exception:  # noqa: BLE001 - whatever it is, the controller raises it
            return self._answers.write(WorkerError(f"{role}, {self._host}:\n{traceback.format_exc()}")), True


def _prepare(start: Start) -> None:
    os.setsid()  # Ctrl-C on the terminal is for the controller
    _die_with_controller()
    for number, output in enumerate(start.outputs, 1):
        os.dup2(output.fileno(), number)
        output.close()
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    os.environ |= start.environment
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    faulthandler.enable()
    faulthandler.register(TELL_STACKS, start.stacks.descriptor)

    def stop_here() -> None:
        TerminalPdb(start.terminal, start.turn, start.name).set_trace(sys._getframe(1))

    sys.breakpointhook = stop_here


def _die_with_controller() -> None:
    """The kernel kills this session when the controller's end of the pipe closes: however it ends, whatever we do."""
    controller = multiprocessing.parent_process()
    assert controller is not None
    pipe = controller.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
