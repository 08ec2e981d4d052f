"""Calls to a process on the controller's machine: both ends of its pipes, with what is called in shared memory.

    RankClient.request --(worker's name, slot, free)--> RankServer.serve --> WorkerHost
    RankClient.receive <---(slot, failed, free)-------- RankServer.answer,  and before that None while a call gets on

In the slots of shared memory lie the call and what it returned or raised; `free` are slots of the other side that this
one needs no more. None ends the server.
"""

import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tandem.cluster.events import Events, PendingCall
from tandem.cluster.shared_memory import Arena, Slot, View
from tandem.errors import TandemError, WorkerError
from tandem.workers.host import Worker, WorkerHost
from tandem.workers.registration import Arguments

_TELL_S = 0.2
"""Between two messages that a call has got on."""


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """Make a worker."""

    kind: type[Worker[Any]]
    spec: Any


@dataclass(frozen=True)  # no slots, which make pickling slow
class CallRequest:
    """Call a worker's method; ranks that get the same arguments read the same request."""

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class RankClient:
    """The controller's end."""

    def __init__(self, rank: int, incoming: Any, outgoing: Any, requests: Arena, answers: View) -> None:
        """`requests` is the same for all processes of a pool. The two connections may be one."""
        self.rank = rank
        self.connection = incoming
        """What is readable when there is something to receive."""
        self.pending: deque[PendingCall] = deque()
        self.since = time.monotonic()
        """When the process began the first of `pending`, or last said that this one has got on."""
        self._outgoing = outgoing
        self._requests = requests
        self._answers = answers

    def request(self, call: PendingCall, name: str, slot: Slot) -> None:
        """Tell the process of a request that lies in `slot`, for the worker `name`."""
        self.since = self.since if self.pending else time.monotonic()
        self.pending.append(call)
        self._send((name, slot, self._answers.released()))

    def end(self) -> None:
        """Have the server end when it has done what it was asked."""
        self._send(None)

    def receive(self, events: Events) -> None:
        """Take an answer in. Raises what the worker raised; EOFError, ConnectionResetError when the process is dead."""
        message, self.since = self.connection.recv(), time.monotonic()
        if message is None:
            return
        slot, failed, free = message
        self._requests.free(free)
        call = self.pending.popleft()
        answer = self._answers.read(slot)
        if failed:
            raise answer
        events.answered(call, self.rank, answer)

    def close(self) -> None:
        """Safe to repeat."""
        self.connection.close()
        self._outgoing.close()

    def _send(self, message: tuple[Any, ...] | None) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead, which is seen elsewhere
            self._outgoing.send(message)


class RankServer:
    """The process's end."""

    def __init__(self, incoming: Connection, outgoing: Connection, requests: View, answers: Arena) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._requests = requests
        self._answers = answers
        self._told = time.monotonic()

    def goes_on(self) -> None:
        """Tell now and then that the call gets on."""
        if time.monotonic() - self._told > _TELL_S:
            self._told = time.monotonic()
            self._outgoing.send(None)

    def serve(self, host: WorkerHost) -> None:
        """Do what comes, until the end."""
        with suppress(EOFError):
            while request := self._incoming.recv():
                name, slot, free = request
                self._answers.free(free)
                self.answer(name, host, partial(self._perform, host, name, slot))

    def close(self) -> None:
        """The channel's end, for the controller to see."""
        self._incoming.close()
        self._outgoing.close()

    def answer(self, name: str, host: WorkerHost, work: Callable[[], Any]) -> None:
        """Send what `work` returns or raises; `name` and `host` say who failed."""
        try:
            slot, failed = self._answers.write(work()), False
        except TandemError as error:
            slot, failed = self._answers.write(error), True
        except Exception:  # noqa: BLE001 - whatever it is, the controller raises it
            slot, failed = self._answers.write(WorkerError(f"{name}, {host}:\n{traceback.format_exc()}")), True
        self._outgoing.send((slot, failed, self._requests.released()))

    def _perform(self, host: WorkerHost, name: str, slot: Slot) -> Any:
        request = self._requests.read(slot)
        if isinstance(request, CreateRequest):
            return host.create(name, request.kind, request.spec)
        return host.call(name, request.method, Arguments(request.args, request.kwargs))
