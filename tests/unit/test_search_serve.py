"""`tandem search serve`: the same passages over MCP and plain HTTP, by the command as it is run."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.rollout.tools.base import CallLimits
from tandem.rollout.tools.mcp_servers import McpServer
from tandem.rollout.tools.mcp_tools import McpTools
from tandem.search.index import Passage, build_index, open_index, shown
from tandem.types import Prompt
from tests.endpoint import wait_until

PROMPT = Prompt(0, np.array([1], np.int32), "?", "test", None)
PASSAGES = [Passage(str(n), f"River {n}", f"It is number {n} and blue.") for n in range(20)]
COMMAND = (sys.executable, "-W", "error", "-c", "import sys; from tandem.cli import main; sys.exit(main(sys.argv[1:]))")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("search") / "index"
    build_index(PASSAGES, directory)
    return directory


@pytest.fixture(scope="module")
def url(index: Path) -> Iterator[str]:
    """Of a server whose token is `t0ken`; at the end SIGTERM ends it with 0 and one line."""
    environment = {**os.environ, "TANDEM_API_KEY": "t0ken"}
    command = [*COMMAND, "search", "serve", str(index), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.endswith("  20 passages\n"), process.stderr and process.stderr.read()
    yield line.split()[0].removesuffix("/search")
    process.send_signal(signal.SIGTERM)
    assert (*process.communicate(timeout=30), process.returncode) == ("stopped\n", "", 0)


def post(url: str, body: Any, token: str = "t0ken") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_plain_http(url: str) -> None:
    status, found = post(f"{url}/search", {"query": "river number 7", "k": 2})
    assert status == 200 and len(found["results"]) == 2
    first = found["results"][0]
    assert first.pop("score") > 0 and first == {"id": "7", "title": "River 7", "text": "It is number 7 and blue."}
    assert len(post(f"{url}/search", {"query": "river"})[1]["results"]) == 3
    with urllib.request.urlopen(f"{url}/health", timeout=30) as response:
        assert json.load(response) == {"status": "ok"}


def test_the_published_shape_of_retrieval_servers(url: str) -> None:
    asked = {"queries": ["number 7", "number 8", "?"], "topk": 1, "return_scores": True}
    status, found = post(f"{url}/retrieve", asked)
    (seven,), (eight,), nothing = found["result"]
    assert status == 200 and nothing == []
    assert seven["document"] == {"id": "7", "contents": '"River 7"\nIt is number 7 and blue.'} and seven["score"] > 0
    assert eight["document"]["id"] == "8"
    plain = post(f"{url}/retrieve", {"queries": ["number 7"], "topk": 1})[1]
    assert plain == {"result": [[seven["document"]]]}


@pytest.mark.parametrize(
    ("path", "body", "token", "status", "said"),
    [
        ("/search", {"query": "a"}, "other", 401, "API key"),
        ("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, "other", 401, "API key"),
        ("/search", {"query": "a", "k": 0}, "t0ken", 400, "k: "),
        ("/search", {"query": "a", "k": 101}, "t0ken", 400, "k: "),
        ("/search", {"query": 3}, "t0ken", 400, "query: "),
        ("/search", {"query": "a", "top": 3}, "t0ken", 400, "top: "),
        ("/search", [], "t0ken", 400, "valid dictionary"),
        ("/search", b"{", "t0ken", 400, "not valid JSON"),
        ("/search", b"[" * 2**19, "t0ken", 400, "not valid JSON"),
        ("/search", b" " * (2**24 + 1), "t0ken", 413, "longer than"),
        ("/retrieve", {"queries": "a"}, "t0ken", 400, "queries: "),
    ],
)
def test_refusals(url: str, path: str, body: Any, token: str, status: int, said: str) -> None:
    answered, told = post(url + path, body, token)
    assert answered == status and said in told["error"]["message"]


@pytest.mark.parametrize("way", ["stdio", "http"])
def test_mcp_finds_what_the_index_finds(way: str, url: str, index: Path) -> None:
    server = McpServer("search", command=(*COMMAND, "search", "serve", str(index), "--stdio"))
    if way == "http":
        server = McpServer("search", url=f"{url}/mcp", headers={"Authorization": "Bearer t0ken"})

    async def scene() -> list[str]:
        tools = McpTools(server, CallLimits(64, 30.0))
        await tools.open()
        try:
            (schema,) = tools.schemas
            assert schema["function"]["parameters"]["required"] == ["query"]
            session = tools.session(PROMPT)
            calls = (session.call("search", {"query": f"number {n}", "k": 2}) for n in range(20))
            return [result.content for result in await asyncio.gather(*calls)]
        finally:
            await tools.close()

    direct = open_index(index)
    assert asyncio.run(scene()) == [shown(direct.search(f"number {n}", 2)) for n in range(20)]


def test_queries_that_ask_for_too_many_passages_are_refused(url: str) -> None:
    status, told = post(f"{url}/retrieve", {"queries": ["river"] * 200, "topk": 100})
    assert status == 400 and "10,000 passages" in told["error"]["message"]
    status, found = post(f"{url}/retrieve", {"queries": [f"number {n}" for n in range(50)], "topk": 1})
    assert status == 200 and [hits[0]["id"] for hits in found["result"]][:20] == [str(n) for n in range(20)]


def test_a_server_goes_on_when_clients_or_its_machine_leave_it_no_files(index: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [*COMMAND, "search", "serve", str(index), "--port", "0", "--client-timeout", "600"]
    environment = {**os.environ, "TANDEM_API_KEY": "t0ken"}
    with log.open("w") as errors:
        process = subprocess.Popen(
            ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    with ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        url = process.stdout.readline().split()[0].removesuffix("/search")
        port = int(url.split(":")[2])
        for _ in range(200):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(b"POST /search HTTP/1.1\r\n")
        assert post(f"{url}/search", {"query": "number 7"})[0] == 200
        most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, most[1]))  # every further file is one too many
        waiting = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)]
        wait_until(lambda: "no connection can be taken now" in log.read_text())
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, most)
        for connection in waiting:
            connection.close()
        assert post(f"{url}/search", {"query": "number 7"})[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        process.stdout.close()
    assert len(log.read_bytes()) < 2000
