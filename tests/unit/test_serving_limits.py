"""What clients may take of a server: connections, time, bytes, lines of the log."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tandem.serving.complaints import Complaints, LogFilter
from tandem.serving.errors import Stopping
from tandem.serving.fair_order import FairOrder
from tandem.serving.http import HANDLERS, Bodies
from tandem.serving.limits import ServerLimits
from tandem.serving.server import Server, reserve
from tandem.types import Completion, Status
from tests.endpoint import running, wait_until

HEAD = b"POST /read HTTP/1.1\r\nHost: x\r\n"
HALVES = {
    "nothing": b"",
    "half a head": HEAD,
    "half a body": HEAD + b"Content-Length: 100\r\n\r\nhalf",
    "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n64\r\nhalf",
    "a reader": b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n",
    "a reader of many answers": b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000,
}


def an_app(limits: ServerLimits) -> Starlette:
    bodies = Bodies(limits)

    async def read(request: Request) -> Response:
        return JSONResponse(await bodies.of(request, len))

    async def endless(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 2**16
                await asyncio.sleep(0)

        return StreamingResponse(parts())

    async def page(request: Request) -> Response:
        return Response("x" * 5000)

    routes = [Route("/read", read, methods=["POST"]), Route("/endless", endless), Route("/page", page)]
    return Starlette(routes=routes, exception_handlers=HANDLERS)


@contextmanager
def served(limits: ServerLimits) -> Iterator[tuple[int, Server]]:
    """The port of a server in another thread, and the server."""
    own = reserve("127.0.0.1", 0)
    port = own.getsockname()[1]
    server = Server(an_app(limits), own, limits=limits)
    with running([server]):
        yield port, server


def slow(port: int, sent: bytes) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.setblocking(False)
    with suppress(OSError):  # it is full, or cut already
        connection.send(sent)
    return connection


def is_cut(connection: socket.socket) -> bool:
    """Reads what there is."""
    try:
        while connection.recv(2**16):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def ask(port: int, body: bytes = b"123", headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/read", body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("kind", list(HALVES))
def test_who_keeps_the_server_waiting_is_cut(kind: str) -> None:
    with served(ServerLimits(client_timeout_s=0.2)) as (port, server), slow(port, HALVES[kind]) as connection:
        wait_until(lambda: server.server_state.total_requests > 0 or len(server.server_state.connections) == 1)
        wait_until(lambda: not server.server_state.connections)
        wait_until(lambda: is_cut(connection))
        assert ask(port) == (200, b"3")


@pytest.mark.parametrize("kind", ["nothing", "half a head", "half a body", "a reader"])
def test_clients_that_hold_every_place_leave_one_to_who_asks(kind: str) -> None:
    count = 10 if kind == "a reader" else 30  # for others a reader goes after a second
    with served(ServerLimits(connections=8, client_timeout_s=600)) as (port, server), ExitStack() as stack:
        held = [stack.enter_context(slow(port, HALVES[kind])) for _ in range(count)]
        for _ in range(2):
            assert ask(port) == (200, b"3")
        wait_until(lambda: sum(map(is_cut, held)) >= count - 8)
        assert len(server.server_state.connections) <= 8


def test_connections_take_no_more_than_half_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 4096))
    assert ServerLimits().connections_here == 128 and ServerLimits(connections=20).connections_here == 20
    assert ServerLimits(connections=20).silent_connections == 10


@pytest.mark.parametrize("kind", list(HALVES))
def test_a_server_ends_whatever_its_clients_do(kind: str) -> None:
    with ExitStack() as stack:
        with served(ServerLimits(client_timeout_s=600)) as (port, server):
            held = [stack.enter_context(slow(port, HALVES[kind])) for _ in range(5)]
            wait_until(lambda: len(server.server_state.connections) == 5)
        for connection in held:
            wait_until(lambda connection=connection: is_cut(connection))


def test_bodies_have_a_limit_and_so_have_all_long_ones_together() -> None:
    limits = ServerLimits(body_mib=0.25, client_timeout_s=600)
    with served(limits) as (port, server), ExitStack() as stack:
        assert ask(port, b"x" * 2**18) == (200, str(2**18).encode())
        for chunked in ({}, {"Transfer-Encoding": "chunked"}):
            body = b"x" * (2**18 + 1)
            sent = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n" if chunked else body
            status, told = ask(port, sent, chunked)
            assert status == 413 and f"longer than {2**18} bytes".encode() in told
        part = HEAD + f"Content-Length: {2**18}\r\n\r\n".encode() + b"x" * (2**18 - 10)
        held = [stack.enter_context(slow(port, part)) for _ in range(16)]
        wait_until(lambda: len(server.server_state.tasks) == 16)
        wait_until(lambda: ask(port, b"x" * 2**18)[0] == 503)
        assert ask(port) == (200, b"3"), "short ones are read all the same"
        held[0].close()
        held[1].close()
        wait_until(lambda: ask(port, b"x" * 2**18)[0] == 200)


def test_heads_have_a_limit() -> None:
    with served(ServerLimits()) as (port, server):
        assert ask(port, headers={"X-Long": "x" * 60_000})[0] == 200
        with socket.create_connection(("127.0.0.1", port)) as connection:
            with suppress(OSError):  # it is refused before it is whole
                for _ in range(100):
                    connection.sendall(HEAD + b"X-Long: " + b"x" * 2**16)
            wait_until(lambda: not server.server_state.connections)
        assert server.server_state.total_requests == 1


def test_requests_that_are_none_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with served(ServerLimits()) as (port, _):
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"nonsense\r\n\r\n")
                assert b"400" in connection.recv(100)
        for _ in range(20):  # a body that is none, after its answer has begun
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
                connection.recv(100)
                connection.sendall(b"zz\r\n")
                wait_until(lambda connection=connection: is_ended(connection))
    assert 0 < len(caplog.records) <= 10, caplog.records


def is_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(2**20)
    except OSError:
        return True


# Complaints.


def test_the_same_complaint_is_written_five_times_a_minute() -> None:
    now = [0.0]
    complaints = Complaints(lambda: now[0])
    told = [complaints.note("a") for _ in range(100)]
    assert told[:4] == [""] * 4 and "left out" in str(told[4]) and set(told[5:]) == {None}
    assert complaints.note("b") == ""
    now[0] = 61.0
    assert complaints.note("a") == " (95 more of these were left out)" and complaints.note("a") == ""


def test_complaints_that_all_differ_are_limited_together() -> None:
    complaints = Complaints(lambda: 0.0)
    assert sum(complaints.note(kind) is not None for kind in range(10_000)) == 100


def test_a_log_leaves_out_what_clients_repeat_and_nothing_else() -> None:
    passes = LogFilter(Complaints(lambda: 0.0)).filter

    def record(name: str, message: str, error: Exception | None = None) -> logging.LogRecord:
        info = None if error is None else (type(error), error, error.__traceback__)
        return logging.LogRecord(name, logging.WARNING, "", 0, message, (), info)

    assert sum(passes(record("uvicorn.error", "Invalid HTTP request received.")) for _ in range(100)) == 5
    assert sum(passes(record("mcp.server", "failed", ValueError())) for _ in range(100)) == 5
    assert passes(record("mcp.server", "failed", KeyError())), "another one"
    assert sum(passes(record("ours", "failed")) for _ in range(100)) == 100


# FairOrder.


async def samples(count: int, gate: asyncio.Event, begun: list[str], name: str) -> AsyncIterator[Completion]:
    """What an engine answers, when the gate is open."""
    begun.append(name)
    await gate.wait()
    nothing = np.zeros(0, np.int32)
    for sample in range(count):
        yield Completion(sample, nothing, nothing.astype(np.float32), nothing, Status.COMPLETED)


class Asked:
    """Requests of several owners to an engine that has so much room."""

    def __init__(self, room: int) -> None:
        self.turns = FairOrder(lambda: room)
        self.begun: list[str] = []

    def ask(self, owner: str, count: int = 1, gate: asyncio.Event | None = None) -> asyncio.Task[int]:
        gate = gate or asyncio.Event()

        async def count_all() -> int:
            outputs = samples(count, gate, self.begun, owner)
            return len([output async for output in self.turns.take(owner, count, outputs)])

        return asyncio.create_task(count_all())

    async def settle(self) -> list[str]:
        for _ in range(20):
            await asyncio.sleep(0)
        return self.begun


def test_a_request_of_one_prompt_does_not_wait_for_all_of_another() -> None:
    async def scene() -> None:
        asked, gates = Asked(4), [asyncio.Event() for _ in range(8)]
        greedy = [asked.ask("greedy", gate=gate) for gate in gates]
        assert (await asked.settle()).count("greedy") < 8
        small = asked.ask("small")
        assert (await asked.settle())[-1] == "small", "room is kept for it"
        more = [asked.ask("other") for _ in range(2)]
        count = asked.begun.count("greedy")
        gates[0].set()
        assert (await asked.settle())[-1] == "other" and asked.begun.count("greedy") == count
        for task in (small, *more, *greedy):
            task.cancel()
        await asyncio.gather(*greedy, small, *more, return_exceptions=True)
        assert await asyncio.wait_for(asked.ask("next", 3, gates[0]), 60) == 3, "who has left takes no room"

    asyncio.run(scene())


def test_a_sample_that_ends_makes_room_before_its_request_does() -> None:
    async def scene() -> None:
        turns, ends, begun = FairOrder(lambda: 2), asyncio.Event(), asyncio.Event()

        async def one_and_then_another() -> AsyncIterator[Completion]:
            nothing = np.zeros(0, np.int32)
            for sample in range(2):
                yield Completion(sample, nothing, nothing.astype(np.float32), nothing, Status.COMPLETED)
                await ends.wait()

        async def next_one() -> AsyncIterator[Completion]:
            begun.set()
            return
            yield

        first = asyncio.create_task(anext(aiter(turns.take("first", 2, one_and_then_another()))))
        await first
        other = asyncio.create_task(consume(turns.take("other", 1, next_one())))
        await asyncio.wait_for(begun.wait(), 60)
        await other

    asyncio.run(scene())


async def consume(outputs: AsyncIterator[Completion]) -> int:
    return len([output async for output in outputs])


def test_who_waits_for_a_turn_when_the_server_stops_is_told_so() -> None:
    async def scene() -> None:
        asked = Asked(1)
        first, second = asked.ask("first"), asked.ask("second")
        await asked.settle()
        asked.turns.stop()
        with pytest.raises(Stopping):
            await asyncio.wait_for(second, 60)
        with pytest.raises(Stopping):
            await asyncio.wait_for(asked.ask("third"), 60)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert asked.begun == ["first"]

    asyncio.run(scene())
