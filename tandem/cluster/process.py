"""What a process of the local cluster runs: a WorkerHost that does what comes over a channel (`rank_rpc.py`).

The first answer is to no call: the process is up. The end of the controller ends it, too: the kernel kills us and
whatever we started.
"""

import ctypes
import faulthandler
import fcntl
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch

from tandem.cluster.debugger import TerminalPdb
from tandem.cluster.rank_rpc import RankServer
from tandem.cluster.shared_memory import Arena, SharedFile, View
from tandem.signals import leave_stopping_to_the_controller
from tandem.workers.host import WorkerHost

TELL_STACKS = signal.SIGUSR1
"""Makes a process print the Python stacks of its threads, whatever it is doing."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
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


def process_main(setup: ProcessSetup) -> None:
    """The process's main function."""
    _prepare(setup)
    server = RankServer(setup.connection, setup.connection, View(setup.requests), Arena(setup.answers))
    host = WorkerHost(setup.rank, setup.size, calls=setup.connection.fileno(), goes_on=server.goes_on)

    def join() -> None:
        if setup.size > 1:
            host.join(f"file:///proc/self/fd/{setup.rendezvous.descriptor}", setup.rank, _FOR_EVER_S)

    server.answer(setup.name, host, join)
    server.serve(host)
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
    keep_freed_memory()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    faulthandler.enable()
    faulthandler.register(TELL_STACKS)
    sys.breakpointhook = lambda: TerminalPdb(setup.name, setup.terminal, setup.turn).set_trace(sys._getframe(1))


def keep_freed_memory() -> None:
    """Of this process, for its next use: page faults cost more than the copies of a batch."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, 1 << 25)
    mallopt(_M_TRIM_THRESHOLD, 1 << 28)
