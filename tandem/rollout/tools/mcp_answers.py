"""What an MCP server writes in the place of an answer: the client (mcp 2.3) drops it, and the call would wait.

requests --noted--> server --messages, and lines that are none--> which request was meant? --an error--> its call

Over stdio alone a line may be no message. One that could only be a broken answer ends the request that it names; where
it names none, the requests that are still without an answer when all others have theirs. Any other text is a print that
does not belong there: it is told once, and answers nothing.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self, cast

import mcp_types
from pydantic import ValidationError

Item = Any
"""What a stream of the client brings: a message in its wrapping, or the exception that a line was none."""
NO_CONNECTION = "no connection"
"""The `data` of errors that our side of the connection makes; a server's own -32000 (CONNECTION_CLOSED) has another."""
_OF_A_STREAM = "SSE stream "
"""What errors begin with that the client makes where a stream of events ends."""
_NAMED = re.compile(r'"id"\s*:\s*"?(\d+)')
_SHOWN = 200
"""Characters of a line that a message shows."""


class Exchange:
    """The requests of one connection, and what has come of them."""

    def __init__(self, server: str, wrapped: Callable[[mcp_types.JSONRPCMessage], Item]) -> None:
        """`server`: what messages call it. `wrapped`: a message as the client's streams have it."""
        self._server = server
        self._wrapped = wrapped
        self._asked: dict[int | str | None, str] = {}
        """The method of each request that has no answer yet, by the request's id."""
        self._last = 0
        """The largest id that was ever asked with."""
        self._unclaimed: list[str] = []
        """What is wrong with each broken answer that names no request."""
        self._has_told = False

    def sent(self, message: mcp_types.JSONRPCMessage) -> None:
        """Note what goes to the server."""
        if isinstance(message, mcp_types.JSONRPCRequest):
            self._asked[message.id] = message.method
            if isinstance(message.id, int):
                self._last = max(self._last, message.id)
        elif isinstance(message, mcp_types.JSONRPCNotification) and message.method == "notifications/cancelled":
            self._asked.pop(_number((message.params or {}).get("requestId")), None)

    def came(self, item: Item) -> list[Item]:
        """What the client is to see of it, with the errors that end requests."""
        if isinstance(item, Exception):
            return [item, *self._broken(item)]
        message = item.message
        if not isinstance(message, mcp_types.JSONRPCResponse | mcp_types.JSONRPCError):
            return [item]
        number = _number(message.id)
        method = self._asked.pop(number, None)
        if isinstance(message, mcp_types.JSONRPCError) and method in ("tools/call", "tools/list"):
            _tell_apart(message.error)
        if method is None and self._is_nobodys(number):
            said = f": {message.error.message}" if isinstance(message, mcp_types.JSONRPCError) else ""
            self._unclaimed.append(f"it answers the request {number!r}, which was not made{said}")
        return [item, *self._ends()]

    def _is_nobodys(self, number: int | str | None) -> bool:
        """Whether no request ever had this id; else the answer is late, and its call has ended."""
        return not isinstance(number, int) or number > self._last

    def _broken(self, error: Exception) -> list[Item]:
        """The errors that end the requests that were meant by a line that is no message."""
        ended: list[Item] = []
        for line in _lines(error):
            if not _is_broken_answer(line):
                self._tell(line)
                continue
            reason, number = f"what came was {_shown(line)}", _named(line)
            if number in self._asked:
                ended.append(self._end(number, reason))
            elif self._is_nobodys(number):
                self._unclaimed.append(reason)
        return [*ended, *self._ends()]

    def _ends(self) -> list[Item]:
        """Those of requests that nothing can answer any more: broken answers are as many as they."""
        self._unclaimed = self._unclaimed[: len(self._asked)]
        if not self._unclaimed or len(self._unclaimed) < len(self._asked):
            return []
        reasons, self._unclaimed = self._unclaimed, []
        return [self._end(number, reason) for number, reason in zip(list(self._asked), reasons, strict=True)]

    def _end(self, number: int | str | None, reason: str) -> Item:
        assert number is not None
        del self._asked[number]
        told = mcp_types.ErrorData(
            code=mcp_types.PARSE_ERROR, message=f"its answer is not what the protocol says: {reason}"
        )
        return self._wrapped(mcp_types.JSONRPCError(jsonrpc="2.0", id=number, error=told))

    def _tell(self, line: Any) -> None:
        if not self._has_told and str(line).strip():
            self._has_told = True
            print(
                f"MCP server {self._server}: its standard output is for messages of the protocol, and it wrote "
                f"{_shown(line)} there (told once); let it print to standard error",
                file=sys.stderr,
                flush=True,
            )


def _tell_apart(error: mcp_types.ErrorData) -> None:
    """Give a server's own error another code than the client's for a lost connection."""
    is_ours = error.data == NO_CONNECTION or error.message.startswith(_OF_A_STREAM)
    if error.code == mcp_types.CONNECTION_CLOSED and not is_ours:
        error.code = mcp_types.INTERNAL_ERROR


def _lines(error: Exception) -> Sequence[Any]:
    """What was no message: a text that is no JSON, or a value. Several where it was a list."""
    if not isinstance(error, ValidationError):
        return [str(error)]
    kinds = {one["type"]: one["input"] for one in reversed(error.errors(include_url=False))}
    found = kinds.get("json_invalid", kinds.get("missing", error.errors(include_url=False)[0]["input"]))
    return cast(list[Any], found) if isinstance(found, list) else [found]


def _is_broken_answer(line: Any) -> bool:
    """Whether it can only have been meant as a message: no print of a program looks like that."""
    if isinstance(line, dict):
        return "jsonrpc" in line or ("id" in line and ("result" in line or "error" in line))
    text = str(line)
    garbled = "\ufffd" in text or any(not one.isprintable() and not one.isspace() for one in text if one != "\x1b")
    return '"jsonrpc"' in text or text.lstrip().startswith('{"') or garbled


def _named(line: Any) -> int | str | None:
    """The id of the request that a broken answer names."""
    if isinstance(line, dict):
        return _number(cast(dict[str, Any], line).get("id"))
    found = _NAMED.search(str(line))
    return int(found[1]) if found else None


def _number(given: Any) -> int | str | None:
    """An id as the client has it: it takes digits for the number."""
    if isinstance(given, str):
        return int(given) if given.isascii() and given.isdecimal() else given
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def _shown(line: Any) -> str:
    text = repr(line)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class Watched(AbstractAsyncContextManager[Any]):
    """A transport of the client, seen by an exchange."""

    def __init__(self, transport: AbstractAsyncContextManager[Any], exchange: Exchange) -> None:
        self._transport = transport
        self._exchange = exchange

    async def __aenter__(self) -> Any:
        read, write = await self._transport.__aenter__()
        return _Read(read, self._exchange), _Write(write, self._exchange)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._transport.__aexit__(kind, error, trace)


class _Stream:
    """One of the two, which is closed as it would be without us."""

    def __init__(self, stream: Any, exchange: Exchange) -> None:
        self._stream = stream
        self._exchange = exchange

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stream.__aexit__(*error)


class _Read(_Stream):
    def __init__(self, stream: Any, exchange: Exchange) -> None:
        super().__init__(stream, exchange)
        self._due: Iterable[Item] = iter(())

    async def receive(self) -> Item:
        while (item := next(iter(self._due), None)) is None:
            self._due = iter(self._exchange.came(await self._stream.receive()))
        return item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        while (item := next(iter(self._due), None)) is None:
            self._due = iter(self._exchange.came(await self._stream.__anext__()))
        return item


class _Write(_Stream):
    async def send(self, item: Item, /) -> None:
        self._exchange.sent(item.message)
        await self._stream.send(item)
