"""Endpoints on loopback, for tests to ask with a real client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.jobs.serve import EngineAnswerer, make_server
from tandem.rollout.session import Session
from tandem.serving.capture import Capture, capture_app
from tandem.serving.server import Server, reserve
from tandem.serving.sessions import Sessions

TOKEN = "a token"


@contextmanager
def served(*answerers: EngineAnswerer) -> Iterator[list[str]]:
    """Base URLs of servers in one other thread, which stop at the end."""
    sockets = [reserve("127.0.0.1", 0) for _ in answerers]
    servers = [make_server(answerer, own, TOKEN) for answerer, own in zip(answerers, sockets, strict=True)]
    with running(servers):
        yield [f"http://127.0.0.1:{own.getsockname()[1]}/v1" for own in sockets]


@contextmanager
def captured(
    make: Callable[[], Session], limit_s: float = 600, most: int = 1000
) -> Iterator[tuple[str, Sessions, asyncio.AbstractEventLoop]]:
    """The base URL of an endpoint that records, without /v1, its sessions, and the event loop that they live in."""
    sessions, own = Sessions(limit_s, most), reserve("127.0.0.1", 0)
    server = Server(capture_app(Capture(sessions, TOKEN, make, "policy")), own)
    with running([server]) as loop:
        yield f"http://127.0.0.1:{own.getsockname()[1]}", sessions, loop


@contextmanager
def running(servers: list[Server]) -> Iterator[asyncio.AbstractEventLoop]:
    """The event loop of servers in one other thread."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await asyncio.gather(*(server.run_until_stopped() for server in servers))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        wait_until(lambda: all(server.started for server in servers))
        yield loops[0]
    finally:
        for server in servers:
            loops[0].call_soon_threadsafe(server.stop)
        thread.join()


def wait_until(true: Callable[[], bool], limit_s: float = 60) -> None:
    until = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < until, f"it has not become true within {limit_s} s"
        time.sleep(0.002)
