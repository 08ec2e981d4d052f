"""What a process of the local cluster runs: a WorkerHost that does what comes over a pipe.

    (worker's name, slot, free) --> process_main --> (slot, failed, free), and before that None while a call gets on

In the slots of shared memory lie the call and what it returned or raised; `free` are slots of the other side that this
one needs no more. The first answer is to no call: the process is up. None ends it, and so does the end of the
controller, at which the kernel kills us and whatever we started.
"""

import ctypes
import faulthandler
import fcntl
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tandem.cluster.debugger import TerminalPdb
from tandem.cluster.shared_memory import Arena, SharedFile, Slot, View
from tandem.errors import TandemError, WorkerError
from tandem.signals import leave_stopping_to_the_controller
from tandem.workers.host import Worker, WorkerHost
from tandem.workers.registration import Arguments

TELL_STACKS = signal.SIGUSR1
"""Makes a process print the Python stacks of its threads, whatever it is doing."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TELL_S = 0.2
"""Between two messages that a call has got on."""
_FOR_EVER_S = 7 * 86_400.0
"""The time-out of a collective: the controller's own ends it before, unless somebody is debugging."""


@dataclass(frozen=True)
class ProcessSetup:
    """What a process is given when it starts."""

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


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """Make a worker."""

    kind: type[Worker[Any]]
    spec: Any


@dataclass(frozen=True, slots=True)
class CallRequest:
    """Call a worker's method; ranks that get the same arguments read the same request."""

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def process_main(setup: ProcessSetup) -> None:
    """The process's main function."""
    _prepare(setup)
    told = time.monotonic()

    def goes_on() -> None:
        nonlocal told
        if time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            setup.connection.send(None)

    host = WorkerHost(setup.rank, setup.size, calls=setup.connection.fileno(), goes_on=goes_on)
    requests, answers = View(setup.requests), Arena(setup.answers)

    def join() -> None:
        if setup.size > 1:
            host.join(f"file:///proc/self/fd/{setup.rendezvous.descriptor}", setup.rank, _FOR_EVER_S)

    def perform(name: str, slot: Slot) -> Any:
        request = requests.read(slot)
        if isinstance(request, CreateRequest):
            return host.create(name, request.kind, request.spec)
        return host.call(name, request.method, Arguments(request.args, request.kwargs))

    def answer(name: str, work: Callable[[], Any]) -> None:
        try:
            slot, failed = answers.write(work()), False
        except TandemError as error:
            slot, failed = answers.write(error), True
        except Exception:  # noqa: BLE001 - whatever it is, the controller raises it
            slot, failed = answers.write(WorkerError(f"{name}, {host}:\n{traceback.format_exc()}")), True
        setup.connection.send((slot, failed, requests.released()))

    answer(setup.name, join)
    with suppress(EOFError):
        while request := setup.connection.recv():
            name, slot, free = request
            answers.free(free)
            answer(name, partial(perform, name, slot))
    host.close()


def _prepare(setup: ProcessSetup) -> None:
    os.setsid()  # Ctrl-C on the terminal is for the controller
    leave_stopping_to_the_controller()
    controller = multiprocessing.parent_process()
    assert controller is not None
    pipe = controller.sentinel  # when its other end closes, the kernel kills this session, whatever it is doing
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([pipe], 0):  # closed already, of which no signal tells: the other ranks may never come
        os.kill(os.getpid(), signal.SIGKILL)
    for number in (1, 2):
        os.dup2(setup.output.fileno(), number)
    setup.output.close()
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    os.environ |= setup.environment
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mallopt = ctypes.CDLL(None).mallopt  # freed memory is kept: page faults cost more than the copies of a batch
    mallopt(_M_MMAP_THRESHOLD, 1 << 25)
    mallopt(_M_TRIM_THRESHOLD, 1 << 28)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    faulthandler.enable()
    faulthandler.register(TELL_STACKS)
    sys.breakpointhook = lambda: TerminalPdb(setup.name, setup.terminal, setup.turn).set_trace(sys._getframe(1))
