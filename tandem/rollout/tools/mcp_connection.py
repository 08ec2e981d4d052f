"""One connection to an MCP server, held by a task of its own.

open --> owner task: enters the client, and waits there until `close`, or until the server dies
request, in the caller's task --> the client's session --> answer, or ConnectionEnded as soon as the owner ends

When a server dies, the client (mcp 2.3) cancels the task that entered it: that must be nobody's but ours.
"""

import asyncio
import json
import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeVar

import httpx2
import mcp_types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from tandem.rollout.tools.mcp_answers import NO_CONNECTION, Exchange, Watched
from tandem.rollout.tools.mcp_servers import McpServer

for _name in ("mcp.client", "mcp.shared"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # what fails is told by exceptions, once
_CLOSING_S = 10.0
"""For a server to end after it was asked to; the client kills one that it started after 4 s."""
_PROBE_S = 5.0
_MOST_PAGES = 100
_LONGEST_ANSWER = 64 * 2**20
"""Bytes of an answer over HTTP; a longer one is not read on. Over stdio the client has no such bound."""
_NO_SESSION = "Session terminated"
"""What the client says over HTTP where a server that keeps sessions has been started anew."""
Answer = TypeVar("Answer", bound=mcp_types.Result)


class ConnectionEnded(Exception):
    """There is no connection, or none any more; the message says why."""


class RequestRefused(Exception):
    """The server answered, but with an error of the protocol, or with what is no answer; the message says so."""


class McpConnection:
    """Open it once, then any number of requests at once, from any task, then close it."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._owner: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] | None = None
        self._closing = asyncio.Event()
        self._why = "the connection was closed"
        self.in_doubt = False
        """A call on it got no answer: it is not known if the server still answers anything. See `answers`."""

    @property
    def usable(self) -> bool:
        return self._owner is not None and not self._owner.done() and not self._closing.is_set() and not self.in_doubt

    async def open(self, timeout_s: float) -> None:
        """Raises ConnectionEnded where there is none in time."""
        self._client = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._hold(self._client), name=f"MCP server {self._server.name}")
        try:
            await asyncio.wait({self._owner, self._client}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also where the caller is cancelled
            late = not self._owner.done()
            if not self._client.done():
                await self.close()
        if not self._client.done():
            raise ConnectionEnded(f"no answer within {timeout_s:g} s" if late else self._why)

    async def call(self, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Send a call, once. The result is what the server says, whatever it promised in the tool's output schema.

        Raises ConnectionEnded, and RequestRefused.
        """
        try:
            json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # the client would end the connection, and with it the calls of others
            raise RequestRefused("the arguments hold half a surrogate pair (\\ud800 to \\udfff), no text") from None
        # not Client.call_tool: it sends some calls again, and hides results that break their schema
        params = mcp_types.CallToolRequestParams(name=name, arguments=arguments)
        return await self._request(mcp_types.CallToolRequest(params=params), mcp_types.CallToolResult)

    async def tools(self) -> list[mcp_types.Tool]:
        """Every tool that the server lists. Raises ConnectionEnded, and RequestRefused."""
        tools: list[mcp_types.Tool] = []
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page = await self._until_end(self._entered().list_tools(cursor=cursor, cache_mode="bypass"))
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise RequestRefused(f"its list of tools has no end after {_MOST_PAGES} pages")

    async def answers(self) -> bool:
        """Whether the server still answers, which settles the doubt."""
        try:
            async with asyncio.timeout(_PROBE_S):
                await self.tools()
        except (ConnectionEnded, TimeoutError):
            return False
        except RequestRefused:
            pass
        self.in_doubt = False
        return self.usable

    async def close(self) -> None:
        """End the connection, and a server that it started. Calls under way raise ConnectionEnded."""
        self._closing.set()
        if self._owner is None:
            return
        if self._client is None or not self._client.done():
            self._owner.cancel()  # it is still connecting
        _, running = await asyncio.wait({self._owner}, timeout=_CLOSING_S)
        if running:
            self._owner.cancel()

    def _entered(self) -> Client:
        assert self._client is not None and self._owner is not None, "the connection was not opened"
        if not self._client.done() or self._owner.done():
            raise ConnectionEnded(self._why)
        return self._client.result()

    async def _request(self, request: mcp_types.Request[Any, Any], kind: type[Answer]) -> Answer:
        return await self._until_end(self._entered().session.send_request(request, kind))

    async def _until_end(self, request: Any) -> Any:
        """What the request brings; it is left alone when the connection ends, or when its caller is cancelled."""
        assert self._owner is not None
        asking = asyncio.ensure_future(request)
        asking.add_done_callback(_look_at_the_error)
        try:
            await asyncio.wait({asking, self._owner}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
        if not asking.done() or asking.cancelled():
            raise ConnectionEnded(self._why)
        try:
            return asking.result()
        except MCPError as error:
            no_session = self._server.url is not None and error.message == _NO_SESSION
            if error.code == mcp_types.CONNECTION_CLOSED or no_session:
                raise ConnectionEnded(error.message) from None
            raise RequestRefused(str(error)) from None
        except ValidationError as error:
            raise RequestRefused(f"its answer is not what the protocol says: {_first_of(error)}") from None

    async def _hold(self, entered: "asyncio.Future[Client]") -> None:
        """The owner task: nothing else runs in it, and it raises nothing."""
        try:
            async with AsyncExitStack() as stack:
                transport = Watched(await self._transport(stack), Exchange(self._server.name, SessionMessage))
                client = await stack.enter_async_context(Client(transport, cache=None))
                entered.set_result(client)
                await self._closing.wait()
        except BaseException as error:  # noqa: BLE001 - who asks for the connection is told
            self._why = _reason(error)
        finally:
            self._closing.set()

    async def _transport(self, stack: AsyncExitStack) -> AbstractAsyncContextManager[Any]:
        server = self._server
        if server.url is None:
            program, *arguments = server.command
            started = StdioServerParameters(
                command=program, args=arguments, env=dict(server.env), encoding_error_handler="replace"
            )  # strict, a byte that is no UTF-8 would end the calls of everybody
            return stdio_client(started)
        timeout = httpx2.Timeout(server.connect_timeout_s, read=None)  # calls have limits of their own
        http = await stack.enter_async_context(_HttpClient(headers=dict(server.headers), timeout=timeout))
        return streamable_http_client(server.url, http_client=http, max_sse_event_size=_LONGEST_ANSWER)


class _HttpClient(httpx2.AsyncClient):
    """A request that fails brings an answer that says so: raised, it would end every other call on the connection."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            response = await super().send(request, **options)
            if response.status_code in (401, 403):
                await response.aclose()
                reason = f"HTTP {response.status_code} {response.reason_phrase}: it wants another token"
                return _failure(request, mcp_types.INVALID_REQUEST, reason)
            if response.headers.get("content-type", "").startswith("application/json"):
                return _of_the_request(await _read_whole(response))
        except httpx2.TransportError as error:
            return _failure(request, mcp_types.CONNECTION_CLOSED, _reason(error), NO_CONNECTION)
        return response


def _of_the_request(response: httpx2.Response) -> httpx2.Response:
    """The response, where what it holds answers its request or cannot be read; else an error, for the client would wait
    for an answer that comes nowhere else."""
    try:
        asked, said = json.loads(response.request.content), json.loads(response.content)
    except ValueError:
        return response
    number = asked.get("id") if isinstance(asked, dict) else None
    if number is None or not isinstance(said, dict) or str(said.get("id")) == str(number):
        return response
    error = said.get("error")
    if said.get("id") is None and isinstance(error, dict) and isinstance(error.get("message"), str):
        return _failure(response.request, mcp_types.INTERNAL_ERROR, error["message"])
    reason = f"its answer is not what the protocol says: it has the id {said.get('id')!r}, the request's is {number!r}"
    return _failure(response.request, mcp_types.PARSE_ERROR, reason)


async def _read_whole(response: httpx2.Response) -> httpx2.Response:
    """The response with its body. One that is too long is an error of the request."""
    body = bytearray()
    try:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > _LONGEST_ANSWER:
                reason = f"the answer is longer than {_LONGEST_ANSWER >> 20} MiB"
                return _failure(response.request, mcp_types.INTERNAL_ERROR, reason)
    finally:
        await response.aclose()
    headers = [(name, value) for name, value in response.headers.items() if name not in _OF_THE_TRANSFER]
    return httpx2.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)


_OF_THE_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")


def _failure(request: httpx2.Request, code: int, reason: str, data: str | None = None) -> httpx2.Response:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": reason, "data": data}}
    headers = {"content-type": "application/json"}
    return httpx2.Response(502, headers=headers, content=json.dumps(error).encode(), request=request)


def _look_at_the_error(asking: "asyncio.Future[Any]") -> None:
    """One that comes after its caller has left would be printed as never retrieved."""
    if not asking.cancelled():
        asking.exception()


def _reason(error: BaseException) -> str:
    """Of an exception group its first leaf: what happened, and not who was cancelled over it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError):
        return "the server is gone"
    if isinstance(error, MCPError):
        return error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _first_of(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
