"""Endpoints on loopback, for tests to ask with a real client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.jobs.serve import EngineAnswerer, make_server
from tandem.serving.server import reserve

TOKEN = "a token"


@contextmanager
def served(*answerers: EngineAnswerer) -> Iterator[list[str]]:
    """Base URLs of servers in one other thread, which stop at the end."""
    sockets = [reserve("127.0.0.1", 0) for _ in answerers]
    servers = [make_server(answerer, own, TOKEN) for answerer, own in zip(answerers, sockets, strict=True)]
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await asyncio.gather(*(server.run_until_stopped() for server in servers))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        wait_until(lambda: all(server.started for server in servers))
        yield [f"http://127.0.0.1:{own.getsockname()[1]}/v1" for own in sockets]
    finally:
        for server in servers:
            loops[0].call_soon_threadsafe(server.stop)
        thread.join()


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.002)
