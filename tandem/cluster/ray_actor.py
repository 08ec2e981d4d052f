"""A process of a pool on Ray: an actor that holds a WorkerHost, and how values are packed on their way to it."""

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pickle import PickleBuffer
from typing import Any, NamedTuple

import psutil
import ray
from ray import ObjectRef, cloudpickle

from tandem.cluster.process import keep_freed_memory
from tandem.cluster.rank_rpc import RankServer
from tandem.cluster.shared_memory import Arena, SharedFile, View
from tandem.controller.pools import ResourcePool
from tandem.errors import TandemError, WorkerError
from tandem.signals import leave_stopping_to_the_controller
from tandem.workers.host import WorkerHost
from tandem.workers.registration import Arguments

_COLLECTIVE_S = 7 * 86_400.0  # of torch.distributed; the cluster's own time-out ends a call that hangs, with all stacks
_OUT_OF_BAND_BYTES = 1 << 14  # smaller arrays are copied into the pickle
_IN_A_MESSAGE_BYTES = 1 << 16
dumps = cloudpickle.dumps  # pyright: ignore[reportPrivateImportUsage]
Packed = tuple[bytes, list[Any]]  # a pickle and its large buffers, which Ray passes without copying


class Ends(NamedTuple):
    """The server's ends of a channel: descriptors of the controller's process."""

    node: str
    """Ray's, that the controller is on."""
    process: int
    secret: bytes
    """What the file for answers begins with until an arena is made of it."""
    answers: int
    requests: int
    incoming: int
    outgoing: int


def pack(value: Any) -> Packed:
    buffers: list[PickleBuffer] = []

    def keep_in_band(buffer: PickleBuffer) -> bool:
        large = buffer.raw().nbytes >= _OUT_OF_BAND_BYTES
        if large:
            buffers.append(buffer)
        return not large

    return dumps(value, buffer_callback=keep_in_band), buffers


def unpack(packed: Packed, own: bool = True) -> Any:
    """`own`: arrays are copied out of the object store, where they could only be read."""
    data, buffers = packed
    return cloudpickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers] if own else buffers)


def put(packed: Packed) -> Packed | ObjectRef:
    """What carries it to actors: the object store, from where each of their nodes fetches it once; small, a message."""
    data, buffers = packed
    return packed if len(data) < _IN_A_MESSAGE_BYTES and not buffers else ray.put(packed)


class _Process:
    """What an actor is: a WorkerHost."""

    def __init__(self, pool: ResourcePool, rank: int, local_rank: int) -> None:
        leave_stopping_to_the_controller()
        keep_freed_memory()
        self._server: RankServer | None = None
        self._pool, self._rank, self._local_rank = pool, rank, local_rank
        self._address = ray.util.get_node_ip_address()
        self._steps = 0
        """How often a call has got on, as from one optimizer step to the next."""
        self._host = WorkerHost(rank, pool.size, self._address, goes_on=self._goes_on)
        for name, addresses in psutil.net_if_addrs().items():  # gloo would go by what the host's name stands for
            if any(address.address == self._address for address in addresses):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

    def __repr__(self) -> str:  # Ray puts it before each line that the process prints
        return f"{self._pool.name} rank {self._rank}"

    def rendezvous(self) -> Packed:
        if len(self._pool.processes_on_nodes) == 1:
            return pack(f"file:///proc/{os.getpid()}/fd/{os.memfd_create('tandem')}")
        with socket.socket() as free:
            free.bind(("", 0))
            return pack(f"tcp://{self._address}:{free.getsockname()[1]}")

    def join(self, rendezvous: str) -> Packed:
        if self._pool.size > 1:
            self._host.join(rendezvous, self._local_rank, _COLLECTIVE_S)
        return pack(f"pool {self._pool.name}, {self._host}")

    def attach(self, ends: Ends) -> Packed:
        """Whether this process is on the controller's node and has opened the ends: then `serve` comes next."""
        if ray.get_runtime_context().get_node_id() != ends.node:
            return pack(False)
        try:
            answers = SharedFile(_opened(ends.process, ends.answers))
            if os.pread(answers.descriptor, len(ends.secret), 0) != ends.secret:
                return pack(False)  # the number is that of another process here
            requests = SharedFile(_opened(ends.process, ends.requests))
            incoming = Connection(_opened(ends.process, ends.incoming, os.O_RDONLY), writable=False)
            outgoing = Connection(_opened(ends.process, ends.outgoing, os.O_WRONLY), readable=False)
        except OSError:
            return pack(False)
        self._server = RankServer(incoming, outgoing, View(requests), Arena(answers, dumps))
        self._host.calls = incoming.fileno()
        return pack(True)

    def serve(self) -> None:
        """Do what comes over the channel until its end, which a failure is, too."""
        assert self._server is not None
        try:
            self._server.serve(self._host)
        finally:
            self._server.close()

    def create(self, name: str, packed: Packed) -> Packed | TandemError:
        return self._guarded(name, lambda: self._host.create(name, *unpack(packed)))

    def perform(self, name: str, packed: Packed) -> Packed | TandemError:
        def call() -> Any:
            method, args, kwargs = unpack(packed, own=False)
            return self._host.call(name, method, Arguments(args, kwargs))

        return self._guarded(name, call)

    def _guarded(self, name: str, work: Callable[[], Any]) -> Packed | TandemError:
        """What `work` returns, or the error that it raised, for the controller to raise."""
        try:
            return pack(work())
        except TandemError as error:
            return error
        except Exception:  # noqa: BLE001  whatever it is
            return WorkerError(f"{name}, {self._host}:\n{traceback.format_exc()}")

    def close(self) -> None:
        self._host.close()

    def _goes_on(self) -> None:
        self._steps += 1
        if self._server is not None:
            self._server.goes_on()

    @ray.method(concurrency_group="watch")
    def steps(self) -> int:
        """How often a call has got on: a sign of life."""
        return self._steps

    @ray.method(concurrency_group="watch")
    def stacks(self) -> str:
        """The stacks of every thread but this."""
        frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
        return "\n".join(f"thread {ident}:\n{''.join(traceback.format_stack(frames[ident]))}" for ident in frames)


Actor: Any = ray.remote(concurrency_groups={"watch": 1})(_Process)  # pyright: ignore[reportCallIssue]


def _opened(process: int, descriptor: int, how: int = os.O_RDWR) -> int:
    """A descriptor of another process's file."""
    return os.open(f"/proc/{process}/fd/{descriptor}", how | os.O_CLOEXEC)
