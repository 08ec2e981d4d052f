"""Tools of an MCP server.

call --> its connection, opened anew where it died --> a slot of the server --> sent, once --> text
"""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import mcp_types

from tandem.errors import UserError
from tandem.rollout.conversation_images import Content, appended
from tandem.rollout.environment import EnvironmentFailed, ToolSchema
from tandem.rollout.tools.base import CallLimits, ToolError, ToolResult, ToolSession
from tandem.rollout.tools.mcp_connection import ConnectionEnded, McpConnection, RequestRefused
from tandem.rollout.tools.mcp_servers import McpServer
from tandem.types import Prompt

_LONGEST_SCHEMA = 100_000
"""Characters of a tool's description and parameters, which every prompt would hold."""
_PAUSE_S = 0.5
"""Between tries to reach a server that is gone."""


class McpTools:
    """The tools of one server: a ToolSet."""

    def __init__(self, server: McpServer, limits: CallLimits) -> None:
        self._server = server
        self._limits = limits
        self._own_timeout_s = server.timeout_s if (server.timeout_s or math.inf) < limits.timeout_s else None
        self._slots = asyncio.Semaphore(server.calls_at_once)
        self._next_send = 0.0
        self._shared = _Line(server)
        self._schemas: list[ToolSchema] = []

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        return self._schemas

    async def open(self) -> None:
        """Connect, and list the tools. Raises UserError."""
        connection = McpConnection(self._server)
        try:
            self._schemas = wanted_schemas(await self._listed(connection), self._server)
        except UserError:
            await connection.close()
            raise
        if self._server.per_trajectory:
            await connection.close()
        else:
            self._shared.connection = connection

    def session(self, prompt: Prompt) -> ToolSession:
        line = _Line(self._server, renewed=False) if self._server.per_trajectory else self._shared
        return _McpSession(self, line)

    async def close(self) -> None:
        await self._shared.close()

    async def call(self, line: "_Line", name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """As ToolSession.call."""
        while True:
            connection = await line.ready()
            async with self._slots:
                if not connection.usable:
                    continue  # it ended while this call waited for its turn
                await self._keep_the_rate()
                result = await self._send(connection, name, arguments)
            if result.is_error:
                raise ToolError(text_of(result))
            return ToolResult(content_of(result))

    async def _listed(self, connection: McpConnection) -> list[mcp_types.Tool]:
        try:
            await connection.open(self._server.connect_timeout_s)
            async with asyncio.timeout(self._server.connect_timeout_s):
                return await connection.tools()
        except (ConnectionEnded, RequestRefused, TimeoutError) as error:
            raise UserError(
                f"MCP server {self._server.name}: {error or 'no list of its tools in time'}; see that it runs, and is "
                "named as it must be (what a server prints that is started here stands above)"
            ) from None

    async def _keep_the_rate(self) -> None:
        if self._server.calls_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        send = max(now, self._next_send)
        self._next_send = send + 1 / self._server.calls_per_s
        await asyncio.sleep(send - now)

    async def _send(
        self, connection: McpConnection, name: str, arguments: Mapping[str, Any]
    ) -> mcp_types.CallToolResult:
        """What the server says. Whatever fails, the call may have run: nobody sends it again."""
        try:
            async with self._limits.sent(), asyncio.timeout(self._own_timeout_s):
                return await connection.call(name, dict(arguments))
        except TimeoutError:
            connection.in_doubt = True
            raise TimeoutError(f"no answer within {self._own_timeout_s or self._limits.timeout_s:g} s") from None
        except ConnectionEnded as error:
            connection.in_doubt = True
            raise EnvironmentFailed(f"MCP server {self._server.name}: gone during {name}: {error}") from None
        except RequestRefused as error:
            raise ToolError(str(error)) from None


class _McpSession:
    """One trajectory's calls."""

    def __init__(self, tools: McpTools, line: "_Line") -> None:
        self._tools = tools
        self._line = line

    async def start(self) -> str | None:
        return None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._tools.call(self._line, name, arguments)

    async def close(self) -> float | None:
        if not self._line.renewed:
            await self._line.close()
        return None


class _Line:
    """A connection that is there when it is needed."""

    def __init__(self, server: McpServer, *, renewed: bool = True) -> None:
        """`renewed`: one that ended is replaced by another. Else what it ended with is lost, and so is the world."""
        self.renewed = renewed
        self.connection: McpConnection | None = None
        self._server = server
        self._connecting: asyncio.Task[McpConnection] | None = None

    async def ready(self) -> McpConnection:
        """A connection that is usable. Raises EnvironmentFailed where there is none in time; all who wait for it learn
        it at once."""
        if self.connection is not None and self.connection.usable:
            return self.connection
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._connecting)

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        if self.connection is not None:
            await self.connection.close()

    async def _connect(self) -> McpConnection:
        before = self.connection
        if before is not None:
            if before.in_doubt and await before.answers():
                return before
            await before.close()
            if not self.renewed:
                raise EnvironmentFailed(f"MCP server {self._server.name}: the trajectory's connection ended")
        self.connection = await self._reach()
        return self.connection

    async def _reach(self) -> McpConnection:
        """A new connection; tries until `connect_timeout_s` is over, since the server may be starting again."""
        now = asyncio.get_running_loop().time
        end = now() + self._server.connect_timeout_s
        while True:
            connection = McpConnection(self._server)
            try:
                await connection.open(max(end - now(), _PAUSE_S))
                return connection
            except ConnectionEnded as error:
                if now() + _PAUSE_S >= end:
                    raise EnvironmentFailed(f"MCP server {self._server.name}: {error}") from None
            await asyncio.sleep(_PAUSE_S)


def wanted_schemas(tools: Sequence[mcp_types.Tool], server: McpServer) -> list[ToolSchema]:
    """Of the tools that the policy gets. Raises UserError where one is missing, or cannot be described."""
    names = {tool.name for tool in tools}
    for name in sorted((server.include or frozenset()) - names):
        raise UserError(f"MCP server {server.name}: has no tool {name!r}, only {', '.join(sorted(names)) or 'none'}")
    wanted = [
        tool
        for tool in tools
        if (server.include is None or tool.name in server.include) and tool.name not in server.exclude
    ]
    if not wanted:
        raise UserError(
            f"MCP server {server.name}: none of its tools is left: {', '.join(sorted(names)) or 'it has none'}"
        )
    return [_schema(tool, server) for tool in wanted]


def _schema(tool: mcp_types.Tool, server: McpServer) -> ToolSchema:
    """As chat templates take it, with a `type` and `properties` where the server left them out."""
    parameters = {"type": "object", "properties": {}, **tool.input_schema}
    schema = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    lies = None
    if parameters["type"] != "object":
        lies = f"its arguments are of type {parameters['type']!r}, not an object"
    elif not isinstance(parameters["properties"], dict):
        lies = f"its `properties` are {parameters['properties']!r:.40}, not an object"
    elif wrong := [name for name, of_one in parameters["properties"].items() if not isinstance(of_one, dict)]:
        lies = f"its argument {wrong[0]!r} is described by {parameters['properties'][wrong[0]]!r:.40}, not by an object"
    elif (length := len(json.dumps(schema))) > _LONGEST_SCHEMA:
        lies = f"its schema has {length:,} characters, which every prompt would hold"
    if lies is not None:
        raise UserError(f"MCP server {server.name}: tool {tool.name!r}: {lies}; mend the server, or `exclude` the tool")
    return {"type": "function", "function": schema}


def text_of(result: mcp_types.CallToolResult) -> str:
    """All parts, a line break between them; of those that are no text, what they are."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_text_of_part, result.content))


def content_of(result: mcp_types.CallToolResult) -> Content:
    """As `text_of`, with the pictures among the parts in their places."""
    content: Content = ""
    for number, part in enumerate(result.content):
        picture = _picture_of(part)
        between = "\n" if number else ""
        content = appended(content, between + ("" if picture else _text_of_part(part)))
        content = appended(content, [picture] if picture else "")
    return content or text_of(result)


def _picture_of(part: mcp_types.ContentBlock) -> dict[str, Any] | None:
    """A part of a message, where it is a picture. A `data:` URL: no server can name a file of this machine."""
    if not isinstance(part, mcp_types.ImageContent):
        return None
    kind, size = part.mime_type, len(part.data) * 3 // 4
    return {"type": "image", "image": f"data:{kind};base64,{part.data}", "description": _described(kind, size)}


def _text_of_part(part: mcp_types.ContentBlock) -> str:
    if isinstance(part, mcp_types.TextContent):
        return part.text
    if isinstance(part, mcp_types.ResourceLink):
        return f"[{part.mime_type or 'resource'} at {part.uri}: not shown]"
    if not isinstance(part, mcp_types.EmbeddedResource):
        return _not_shown(part.mime_type, part.data)
    resource = part.resource
    if isinstance(resource, mcp_types.TextResourceContents):
        return resource.text
    return _not_shown(resource.mime_type or "resource", resource.blob)


def _not_shown(kind: str, base64: str) -> str:
    return f"[{_described(kind, len(base64) * 3 // 4)}: not shown]"


def _described(kind: str, size: int) -> str:
    return f"{kind}, {f'{size / 1000:.0f} kB' if size >= 1000 else f'{size} bytes'}"
