"""Server-sent events, and clients that leave before they have all of them."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

Result = TypeVar("Result")


class EventStream(Response):
    """Objects as server-sent events, the last of them `[DONE]` unless one was an error."""

    def __init__(self, objects: AsyncGenerator[dict[str, Any]]) -> None:
        super().__init__()
        self._objects = objects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._objects):
            try:
                await while_connected(receive, send_events(send, self._objects))
            except (ClientDisconnect, OSError):
                return  # closing the objects ends what makes them


async def send_events(send: Send, objects: AsyncGenerator[dict[str, Any]]) -> bool:
    """Send a whole response of these events. Returns whether none of them was an error."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    failed = False
    async with aclosing(objects):
        async for item in objects:
            failed = "error" in item
            await send(_event(json.dumps(item)))
    if not failed:
        await send(_event("[DONE]"))
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return not failed


def _event(data: str) -> Message:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`. When the client leaves before, `work` is cancelled and ClientDisconnect raised."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_until_left(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
