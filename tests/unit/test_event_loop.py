"""The worker's event loop: no time passes for its tasks while it does not run."""

from __future__ import annotations

import asyncio
import time

import pytest

from tandem.workers.event_loop import PausingEventLoop


def test_a_call_that_was_answered_while_the_loop_stood_still_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trained_s, clock = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + trained_s)
    loop = PausingEventLoop()

    async def call(answer: asyncio.Future[str]) -> str:
        async with asyncio.timeout(60):
            return await answer

    try:
        answer: asyncio.Future[str] = loop.create_future()
        calling = loop.create_task(call(answer))
        loop.run_until_complete(asyncio.sleep(0))
        trained_s = 100.0  # a model is trained meanwhile, and the answer comes
        loop.call_soon(loop.call_soon, loop.call_soon, answer.set_result, "in time")  # as bytes that are read in pieces
        assert loop.run_until_complete(calling) == "in time"
    finally:
        loop.close()


def test_time_goes_on_while_it_runs() -> None:
    loop = PausingEventLoop()
    try:
        before = loop.time()
        loop.run_until_complete(asyncio.sleep(0.05))
        assert loop.time() - before >= 0.05
        assert loop.time() == loop.time(), "and stands still now"
    finally:
        loop.close()
