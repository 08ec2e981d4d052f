"""An MCP server of the official SDK that behaves badly on demand.

python tests/mcp_server.py                          over stdio
python tests/mcp_server.py --http PORT [--old]      over streamable HTTP; --old: with sessions and event streams
python tests/mcp_server.py --lie KIND [--http PORT] with a list of tools that lies: see LIES
    --log FILE                                      each call that it gets is a line of the file
    --token TOKEN                                   wants it
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import mcp_types
from mcp.server import MCPServer

LIES: dict[str, dict[str, Any]] = {
    "not an object": {"type": "array", "items": {"type": "string"}},
    "no properties": {},
    "wrong properties": {"type": "object", "properties": ["text"]},
    "wrong property": {"type": "object", "properties": {"text": "a string"}},
    "wrong types": {"type": "object", "properties": {"text": {"type": "integer"}}, "required": ["nothing"]},
    "huge": {"type": "object", "properties": {"text": {"type": "string", "description": "x" * 200_000}}},
}


def make_server(log: str | None) -> MCPServer:
    server = MCPServer("bad", log_level="CRITICAL")

    def note(call: str) -> None:
        if log is not None:
            with open(log, "a") as lines:
                lines.write(f"{call}\n")

    @server.tool()
    async def echo(text: str, seconds: float = 0.0) -> str:
        """Say the text again.

        Args:
            text: What to say.
            seconds: When.
        """
        note(f"echo {text}")
        await asyncio.sleep(seconds)
        return text

    @server.tool()
    def die() -> str:
        """The process ends."""
        note("die")
        os._exit(3)

    @server.tool()
    def hang(seconds: float = 3600.0) -> str:
        """Answer late."""
        note("hang")
        time.sleep(seconds)
        return "late"

    @server.tool()
    async def hang_altogether(seconds: float = 3600.0) -> str:
        """Answer nothing at all meanwhile."""
        note("hang_altogether")
        time.sleep(seconds)
        return "late"

    add_odd_tools(server)
    return server


def add_odd_tools(server: MCPServer) -> None:
    remembered: list[str] = []

    @server.tool()
    def remember(text: str) -> str:
        """All texts that it was told."""
        remembered.append(text)
        return " ".join(remembered)

    @server.tool(structured_output=False)
    def flood(megabytes: float) -> str:
        """A long text."""
        return "x" * int(megabytes * 2**20)

    @server.tool()
    def fail(text: str) -> str:
        """Raise."""
        raise ValueError(text)

    @server.tool(structured_output=False)
    def picture() -> list[mcp_types.ContentBlock]:
        """A picture, and a word on it."""
        return [
            mcp_types.TextContent(text="look:"),
            mcp_types.ImageContent(data="A" * 16_000, mime_type="image/png"),
            mcp_types.ResourceLink(name="more", uri="file:///more.txt"),
        ]

    @server.tool(structured_output=False)
    def variable(name: str) -> str:
        """An environment variable."""
        return os.environ.get(name, "not set")


def lie(kind: str) -> None:
    """Speak over stdio without the SDK, which checks what servers say."""
    print("This does not belong here.", flush=True)
    for line in sys.stdin:
        if (said := lying_answer(kind, json.loads(line))) is not None:
            print(said, flush=True)


def lying_answer(kind: str, asked: dict[str, Any]) -> str | None:
    """Of one tool `echo`, whose schema is not its own, and which promises results that it does not bring. The text
    "raw …" is itself what is said, with the request's id in the place of ID."""
    promise = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = {"name": "echo", "inputSchema": LIES[kind], "outputSchema": promise}
    greeting = {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "l", "version": "1"},
    }
    method, text = asked["method"], f"{asked.get('params', {}).get('arguments', {}).get('text')}"
    if "id" not in asked or text == "nothing":
        return None
    if text.startswith("raw "):
        return text.removeprefix("raw ").replace("ID", str(asked["id"]))
    said: dict[str, Any] = {"content": "junk" if text == "junk" else [{"type": "text", "text": text}]}
    results = {"initialize": greeting, "tools/list": {"tools": [tool]}, "tools/call": said}
    answer = {"result": results[method]} if method in results else {"error": {"code": -32601, "message": "no"}}
    return json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer})


def lie_over_http(kind: str, port: int) -> None:
    class Liar(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            said = (lying_answer(kind, asked) or "").encode()
            self.send_response(200 if said else 202)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *arguments: Any) -> None: ...

    ThreadingHTTPServer(("127.0.0.1", port), Liar).serve_forever()


def old(app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The server as it was before 2026: it does not know `server/discover`."""

    async def without_discover(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or (b"mcp-method", b"server/discover") not in scope["headers"]:
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return without_discover


def guarded(app: Callable[..., Awaitable[None]], token: str) -> Callable[..., Awaitable[None]]:
    async def guard(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or (b"authorization", f"Bearer {token}".encode()) in scope["headers"]:
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'{"error": "no"}'})

    return guard


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--http", "--lie", "--log", "--token"):
        parser.add_argument(option)
    parser.add_argument("--old", action="store_true")
    given = parser.parse_args()
    if given.lie:
        lie_over_http(given.lie, int(given.http)) if given.http else lie(given.lie)
        return
    server = make_server(given.log)
    if given.http is None:
        server.run("stdio")
        return
    import uvicorn

    app: Any = server.streamable_http_app(host="127.0.0.1")
    if given.old:
        app = old(app)
    if given.token:
        app = guarded(app, given.token)
    uvicorn.run(app, host="127.0.0.1", port=int(given.http), log_level="critical")


if __name__ == "__main__":
    sys.exit(main())
