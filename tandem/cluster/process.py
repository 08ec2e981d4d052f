"""What a process of the local cluster runs: a Host that does what comes over a pipe.

    (role, place, free) --> serve --> (place, failed, free)

At the places, in shared memory, are the call and what it answered or raised; `free` are places of the other side that
this one needs no more. The first answer is to no call: the process is up. None ends it, and so does the end of the
controller, at which the kernel kills us and whatever we started.
"""

import ctypes
import faulthandler
import fcntl
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from tandem.cluster.debugger import TerminalPdb
from tandem.cluster.shared_memory import Arena, Place, SharedFile, View
from tandem.errors import TandemError, WorkerError
from tandem.workers.dispatch import Arguments
from tandem.workers.host import Host

TELL_STACKS = signal.SIGUSR1
"""Makes a process print the Python stacks of its threads, whatever it is doing."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_FOR_EVER_S = 7 * 86_400.0
"""Of a collective: the controller's time-out ends it, unless somebody is debugging."""


@dataclass(frozen=True)
class Start:
    """What a process is given."""

    name: str
    rank: int
    size: int
    connection: Connection
    output: Connection
    environment: dict[str, str]
    answers: SharedFile
    requests: SharedFile
    rendezvous: SharedFile
    turn: SharedFile
    terminal: str | None


def serve(start: Start) -> None:
    """The process's main function."""
    _prepare(start)
    host = Host(start.rank, start.size)
    requests, answers = View(start.requests), Arena(start.answers)

    def join() -> None:
        if start.size > 1:
            host.join(f"file:///proc/self/fd/{start.rendezvous.descriptor}", start.rank, _FOR_EVER_S)

    def perform(place: Place) -> Any:
        verb, subject, args, kwargs, rows = requests.read(place)
        return getattr(host, verb)(*subject, Arguments(args, kwargs, rows[start.rank]))

    def answer(role: str, work: Callable[[], Any]) -> None:
        try:
            place, failed = answers.write(work()), False
        except TandemError as error:
            place, failed = answers.write(error), True
        except Exception:  # noqa: BLE001 - whatever it is, the controller raises it
            place, failed = answers.write(WorkerError(f"{role}, {host}:\n{traceback.format_exc()}")), True
        start.connection.send((place, failed, requests.released()))

    answer(start.name, join)
    with suppress(EOFError):
        while request := start.connection.recv():
            role, place, free = request
            answers.free(free)
            answer(role, partial(perform, place))
    host.close()


def _prepare(start: Start) -> None:
    os.setsid()  # Ctrl-C on the terminal is for the controller
    controller = multiprocessing.parent_process()
    assert controller is not None
    pipe = controller.sentinel  # when its other end closes, the kernel kills this session, whatever it is doing
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    for number in (1, 2):
        os.dup2(start.output.fileno(), number)
    start.output.close()
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    os.environ |= start.environment
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mallopt = ctypes.CDLL(None).mallopt  # freed memory is kept: page faults cost more than the copies of a batch
    mallopt(_M_MMAP_THRESHOLD, 1 << 25)
    mallopt(_M_TRIM_THRESHOLD, 1 << 28)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    faulthandler.enable()
    faulthandler.register(TELL_STACKS)
    sys.breakpointhook = lambda: TerminalPdb(start.name, start.terminal, start.turn).set_trace(sys._getframe(1))
