"""MCP servers as tools: what they say, and every way that they fail in."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from pydantic import ValidationError

from tandem.config.conversation import ToolsEnvironmentConfig
from tandem.errors import UserError
from tandem.rollout.conversation_images import shown
from tandem.rollout.environment import Answer, EnvironmentFailed, ToolCall
from tandem.rollout.make import make_environments
from tandem.rollout.tools.base import CallLimits, ToolError, ToolSession
from tandem.rollout.tools.builtin.mcp import McpToolsConfig
from tandem.rollout.tools.builtin.mcp_file import McpFileConfig
from tandem.rollout.tools.mcp_connection import McpConnection
from tandem.rollout.tools.mcp_servers import McpServer, mcp_file_servers, mcp_server, verl_mcp_servers
from tandem.rollout.tools.mcp_tools import McpTools, _Line
from tandem.types import Prompt
from tests.mcp_server import LIES

SERVER = str(Path(__file__).parents[1] / "mcp_server.py")
PROMPT = Prompt(0, np.array([1], np.int32), "?", "test", None)
Result = TypeVar("Result")
Options = tuple[str, ...]


def run(scene: Awaitable[Result], within_s: float = 120.0) -> Result:
    async def bounded() -> Result:
        async with asyncio.timeout(within_s):
            return await scene

    return asyncio.run(bounded())


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def serving(port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, SERVER, "--http", str(port), *options], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def stdio(*options: str, **settings: Any) -> McpServer:
    return McpServer("bad", command=(sys.executable, SERVER, *options), **settings)


def http(port: int, **settings: Any) -> McpServer:
    return McpServer("bad", url=f"http://127.0.0.1:{port}/mcp", **settings)


@asynccontextmanager
async def opened(server: McpServer, timeout_s: float = 60.0) -> AsyncIterator[McpTools]:
    tools = McpTools(server, CallLimits(64, timeout_s))
    await tools.open()
    try:
        yield tools
    finally:
        await tools.close()


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """Servers over HTTP that no test ends."""
    ports = {"http": free_port(), "old http": free_port()}
    with serving(ports["http"]), serving(ports["old http"], "--old"):
        yield ports


@pytest.fixture(params=["stdio", "http", "old http"])
def server(request: pytest.FixtureRequest, ports: dict[str, int]) -> Callable[..., McpServer]:
    """Makes a McpServer for the same server on each way to it."""
    if request.param == "stdio":
        return lambda **settings: stdio(**settings)
    return lambda **settings: http(ports[request.param], **settings)


async def fails(call: Awaitable[Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        await call
    return str(raised.value)


def test_tools_are_listed_called_and_say_what_went_wrong(server: Callable[..., McpServer]) -> None:
    async def scene() -> None:
        async with opened(server(exclude=frozenset({"die"}))) as tools:
            schemas = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
            assert "die" not in schemas
            assert schemas["echo"]["parameters"]["properties"]["text"]["type"] == "string"
            assert schemas["echo"]["parameters"]["required"] == ["text"]
            session = tools.session(PROMPT)
            assert await session.start() is None
            assert (await session.call("echo", {"text": "grüß ❤"})).content == "grüß ❤"
            assert "tool fail" in await fails(session.call("fail", {"text": "no good"}), ToolError)
            assert "text" in await fails(session.call("echo", {"txt": "a"}), ToolError)
            assert "nobody" in await fails(session.call("nobody", {}), ToolError)
            picture = await shown((await session.call("picture", {})).content, None)
            assert picture == "look:\n[image/png, 12 kB: not shown]\n[resource at file:///more.txt: not shown]"
            assert len((await session.call("flood", {"megabytes": 1.5})).content) == 3 * 2**19
            assert await session.close() is None

    run(scene())


def test_a_call_that_hangs_ends_at_its_limit_and_others_go_on(server: Callable[..., McpServer]) -> None:
    async def scene() -> None:
        async with opened(server()) as tools:
            session = tools.session(PROMPT)
            tools._limits.timeout_s = 1.0
            hanging = asyncio.create_task(fails(session.call("hang", {"seconds": 600.0}), TimeoutError))
            await asyncio.sleep(0)  # it is sent, with its limit
            tools._limits.timeout_s = 60.0
            assert (await session.call("echo", {"text": "still here"})).content == "still here"
            assert (await hanging).startswith("no answer within ")
            assert (await session.call("echo", {"text": "after"})).content == "after"

    run(scene())


def test_a_server_that_dies_ends_its_trajectories_and_is_opened_again(tmp_path: Path) -> None:
    """Over stdio: the call that it died under is not sent again, those beside it fail, the next one works."""

    async def scene() -> None:
        async with opened(stdio("--log", str(tmp_path / "calls"))) as tools:
            session = tools.session(PROMPT)
            slow = session.call("echo", {"text": "a", "seconds": 600.0})
            beside = asyncio.create_task(fails(slow, EnvironmentFailed))
            while not (tmp_path / "calls").exists():
                await asyncio.sleep(0.01)
            assert "die" in await fails(session.call("die", {}), EnvironmentFailed)
            await beside
            again = await asyncio.gather(*(session.call("echo", {"text": str(n)}) for n in range(40)))
            assert [result.content for result in again] == [str(n) for n in range(40)]

    run(scene())
    assert (tmp_path / "calls").read_text().split("\n").count("die") == 1


@pytest.mark.parametrize("age", [(), ("--old",)])
def test_an_http_server_that_dies_and_comes_back(age: Options, tmp_path: Path) -> None:
    port, log = free_port(), ("--log", str(tmp_path / "calls"))

    async def scene() -> None:
        async with opened(http(port, connect_timeout_s=60.0)) as tools:
            session = tools.session(PROMPT)
            await fails(session.call("die", {}), EnvironmentFailed)
            waiting = asyncio.create_task(session.call("echo", {"text": "back"}))
            await asyncio.sleep(0.5)
            with serving(port, *log, *age):
                assert (await waiting).content == "back"

    with serving(port, *log, *age):
        run(scene())
    assert (tmp_path / "calls").read_text().split() == ["die", "echo", "back"]


def test_a_server_that_stays_away_fails_every_waiting_trajectory_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it together, not one after the other."""
    port, waits, reach = free_port(), list[str](), _Line._reach
    server = http(port, calls_at_once=2)

    def counted(line: _Line) -> Awaitable[McpConnection]:
        waits.append("one")
        return reach(line)

    monkeypatch.setattr(_Line, "_reach", counted)

    async def scene() -> None:
        async with opened(server) as tools:
            session = tools.session(PROMPT)
            await fails(session.call("die", {}), EnvironmentFailed)
            tools._shared._server = replace(server, connect_timeout_s=1.0)
            calls = [fails(session.call("echo", {"text": str(n)}), EnvironmentFailed) for n in range(30)]
            assert all("bad" in said for said in await asyncio.gather(*calls))
            assert len(waits) == 1

    with serving(port):
        run(scene())


@pytest.mark.nightly
def test_a_server_that_hangs_altogether_is_started_anew() -> None:
    async def scene() -> None:
        async with opened(stdio()) as tools:
            session = tools.session(PROMPT)
            tools._limits.timeout_s = 1.0
            await fails(session.call("hang_altogether", {}), TimeoutError)
            tools._limits.timeout_s = 60.0
            assert (await session.call("echo", {"text": "anew"})).content == "anew"

    run(scene())


def test_the_limit_counts_from_when_a_call_is_sent(server: Callable[..., McpServer]) -> None:
    """Of 24 calls of .2 s, 2 at once, the last one waits 2.2 s for its turn, which is more than the limit of 2 s."""

    async def scene() -> None:
        async with opened(server(calls_at_once=2), timeout_s=2.0) as tools:
            session = tools.session(PROMPT)
            calls = (session.call("echo", {"text": str(n), "seconds": 0.2}) for n in range(24))
            assert [result.content for result in await asyncio.gather(*calls)] == [str(n) for n in range(24)]

    run(scene())


def test_a_caller_that_leaves_disturbs_nobody(server: Callable[..., McpServer]) -> None:
    async def scene() -> None:
        async with opened(server()) as tools:
            session = tools.session(PROMPT)
            leaving = [asyncio.create_task(session.call("echo", {"text": "a", "seconds": 5.0})) for _ in range(8)]
            await asyncio.sleep(0.2)
            for task in leaving:
                task.cancel()
            assert (await session.call("echo", {"text": "b"})).content == "b"
            assert {type(result) for result in await asyncio.gather(*leaving, return_exceptions=True)} == {
                asyncio.CancelledError
            }

    run(scene())


def test_a_connection_a_trajectory_keeps_its_state_apart(server: Callable[..., McpServer]) -> None:
    """Where the server keeps state by connection, as one over stdio does; where it does not, all is as before."""

    async def remembered(session: ToolSession, text: str) -> str:
        return (await session.call("remember", {"text": text})).content

    async def scene() -> None:
        made = server(per_trajectory=True)
        async with opened(made) as tools:
            one, other = tools.session(PROMPT), tools.session(PROMPT)
            await remembered(one, "a")
            await remembered(other, "x")
            if made.url is None:
                assert await remembered(one, "b") == "a b"
                await fails(one.call("die", {}), EnvironmentFailed)
                assert "ended" in await fails(remembered(one, "c"), EnvironmentFailed)
                assert await remembered(other, "y") == "x y"
            await asyncio.gather(one.close(), other.close())

    run(scene())


def test_a_tool_that_cannot_be_described_is_told_at_start() -> None:
    async def told(kind: str) -> str:
        return await fails(McpTools(stdio("--lie", kind), CallLimits(1, 5.0)).open(), UserError)

    async def scene() -> None:
        kinds = [kind for kind in LIES if kind != "wrong types"]
        for kind, said in zip(kinds, await asyncio.gather(*map(told, kinds)), strict=True):
            assert "tools.0.inputSchema" in said or ("'echo'" in said and "`exclude` the tool" in said), (kind, said)

    run(scene())


def test_other_lies_reach_the_policy_which_is_told_what_comes_back() -> None:
    async def scene() -> None:
        async with opened(stdio("--lie", "wrong types")) as tools:
            (schema,) = tools.schemas
            assert schema["function"]["parameters"] == LIES["wrong types"]
            session = tools.session(PROMPT)
            assert (await session.call("echo", {"text": "a"})).content == "a"  # although it promises {n: integer}
            assert "not what the protocol says" in await fails(session.call("echo", {"text": "junk"}), ToolError)

    run(scene())


BROKEN = {
    "cut short": '{"jsonrpc": "2.0", "id": ID, "resul',
    "no result": '{"jsonrpc": "2.0", "id": ID}',
    "a result that is no object": '{"jsonrpc": "2.0", "id": ID, "result": "a"}',
    "another protocol": '{"id": ID, "result": {"content": []}}',
    "a list": '[{"jsonrpc": "2.0", "id": ID, "result": {}}]',
    "an id that nobody has": '{"jsonrpc": "2.0", "id": 9999, "result": {"content": []}}',
    "no id": '{"jsonrpc": "2.0", "id": null, "error": {"code": -32700, "message": "cannot read it"}}',
    "without an id": '{"jsonrpc": "2.0", "result": {"content": []}}',
    "bytes": "\x00\x01\x02",
}


@pytest.fixture(scope="module")
def liar() -> Iterator[int]:
    port = free_port()
    with serving(port, "--lie", "wrong types"):
        yield port


@pytest.mark.parametrize("way", ["stdio", "http"])
def test_a_broken_answer_ends_its_own_call_at_once(way: str, liar: int) -> None:
    """A call beside it, which the server never answers, goes on."""

    async def scene() -> None:
        async with opened(stdio("--lie", "wrong types") if way == "stdio" else http(liar)) as tools:
            session, connection = tools.session(PROMPT), tools._shared.connection
            for kind, answer in BROKEN.items():
                said = await fails(session.call("echo", {"text": f"raw {answer}"}), ToolError)
                assert "protocol" in said or "JSON" in said or "cannot read it" in said, (kind, said)
            if way == "stdio":
                waiting = asyncio.create_task(session.call("echo", {"text": "nothing"}))
                await asyncio.sleep(0)
                await fails(session.call("echo", {"text": f"raw {BROKEN['no result']}"}), ToolError)
                assert not waiting.done()
                waiting.cancel()
            assert (await session.call("echo", {"text": "after"})).content == "after"
            assert tools._shared.connection is connection

    run(scene())


@pytest.mark.parametrize("way", ["stdio", "http"])
def test_an_error_of_the_servers_own_is_no_lost_connection(way: str, liar: int) -> None:
    async def scene() -> None:
        async with opened(stdio("--lie", "wrong types") if way == "stdio" else http(liar)) as tools:
            session, connection = tools.session(PROMPT), tools._shared.connection
            for message in ("busy", "Connection closed", *(["Session terminated"] if way == "stdio" else [])):
                error = json.dumps({"code": -32000, "message": message})
                answer = f'raw {{"jsonrpc": "2.0", "id": ID, "error": {error}}}'
                assert message in await fails(session.call("echo", {"text": answer}), ToolError)
            assert (await session.call("echo", {"text": "after"})).content == "after"
            assert tools._shared.connection is connection

    run(scene())


def test_a_print_of_the_server_is_told_once_and_answers_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        async with opened(stdio("--lie", "wrong types")) as tools:
            session = tools.session(PROMPT)
            answer = '{"jsonrpc": "2.0", "id": ID, "result": {"content": [{"type": "text", "text": "a"}]}}'
            for printed in ("searching", '{"level": "info"}', "{'a': 1}", ""):
                assert (await session.call("echo", {"text": f"raw {printed}\n{answer}"})).content == "a"

    run(scene())
    said = capfd.readouterr().err
    assert said.count("MCP server bad") == 1 and "This does not belong here." in said


def test_half_a_surrogate_pair_ends_no_connection(server: Callable[..., McpServer]) -> None:
    async def scene() -> None:
        async with opened(server()) as tools:
            session = tools.session(PROMPT)
            assert "surrogate" in await fails(session.call("echo", {"text": "a\ud800"}), ToolError)
            assert (await session.call("echo", {"text": "after"})).content == "after"

    run(scene())


def test_mistakes_at_start(ports: dict[str, int]) -> None:
    silent = McpServer("a", command=(sys.executable, "-c", "input(); input(); input()"), connect_timeout_s=1.0)
    mistakes = {
        "no-such-program": McpServer("a", command=("no-such-program",)),
        "Connection closed": McpServer("a", command=(sys.executable, "-c", "pass")),
        "within 1 s": silent,
        "ConnectError": http(free_port()),
        "no tool 'ecko', only": http(ports["http"], include=frozenset({"ecko"})),
        "none of its tools is left": http(ports["http"], include=frozenset({"echo"}), exclude=frozenset({"echo"})),
    }

    async def scene() -> list[str]:
        opening = (McpTools(server, CallLimits(1, 5.0)).open() for server in mistakes.values())
        return await asyncio.gather(*(fails(one, UserError) for one in opening))

    for mistake, said in zip(mistakes, run(scene()), strict=True):
        assert mistake in said


def test_tokens_and_variables_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_TOKEN", "s3cret")
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"

    async def variable() -> str:
        config = McpToolsConfig(
            type="mcp", command=[sys.executable, SERVER], env={"COLOUR": "red"}, pass_variables=["SEARCH_TOKEN"]
        )
        async with opened(mcp_server(config)) as tools:
            names = ("COLOUR", "SEARCH_TOKEN", "PYTHONPATH")
            said = [(await tools.session(PROMPT).call("variable", {"name": name})).content for name in names]
            return " ".join(said)

    async def listed(server: McpServer) -> int:
        async with opened(server) as tools:
            return len(tools.schemas)

    assert run(variable()) == "red s3cret not set"
    with serving(port, "--token", "s3cret"):
        with_token = mcp_server(McpToolsConfig(type="mcp", url=url, token_variable="SEARCH_TOKEN"))
        assert run(listed(with_token)) > 5
        assert "s3cret" not in repr(with_token)
        with pytest.raises(UserError, match="HTTP 401"):
            run(listed(mcp_server(McpToolsConfig(type="mcp", url=url))))
    monkeypatch.delenv("SEARCH_TOKEN")
    with pytest.raises(UserError, match="SEARCH_TOKEN is not set"):
        mcp_server(McpToolsConfig(type="mcp", url=url, token_variable="SEARCH_TOKEN"))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"url": "http://a/mcp", "command": ["a"]},
        {"url": "a/mcp"},
        {"url": "http://a/mcp", "env": {"A": "b"}},
        {"command": ["a"], "token_variable": "A"},
    ],
)
def test_what_no_configuration_can_say(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        McpToolsConfig.model_validate({"type": "mcp", **given})


def test_the_tools_of_a_configuration_from_every_place_at_once(tmp_path: Path, ports: dict[str, int]) -> None:
    """A server by its command, one of a JSON file, and verl's YAML, behind one environment; results are cut."""
    running = {"url": f"http://127.0.0.1:{ports['http']}/mcp"}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"two": running}}))
    verl = {"class_name": "x", "config": {"type": "mcp", "timeout": 0.5}}
    verl["mcp"] = {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["hang"]}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [verl]}))
    config = ToolsEnvironmentConfig.model_validate(
        {
            "tools": [
                {"type": "mcp", "command": [sys.executable, SERVER], "include": ["echo"]},
                {"type": "mcp_file", "path": str(tmp_path / "servers.json"), "include": ["flood"]},
                {"type": "verl", "path": str(tmp_path / "tools.yaml")},
            ],
            "limits": {"result_characters": 100},
        }
    )

    async def scene() -> list[str]:
        environments = make_environments(config)
        await environments.open()
        environment = environments.make(PROMPT)
        await environment.start(PROMPT)
        assert [schema["function"]["name"] for schema in environment.tools] == ["echo", "flood", "hang"]
        calls = (
            ToolCall("1", "echo", {"text": "a"}),
            ToolCall("2", "flood", {"megabytes": 1}),
            ToolCall("3", "hang", {}),
        )
        reply = await environment.step(Answer("", tuple(calls)))
        await environment.close()
        await environments.close()
        return [message["content"] for message in reply.messages]

    cut = f"{'x' * 100}… (1,048,476 more characters)"
    assert run(scene()) == ["a", cut, "error: no answer within 0.5 s"]


SERVERS = {
    "mcpServers": {
        "Tavily Expert": {"url": "https://example.invalid/mcp", "auth_token": "${TAVILY:-nothing}"},
        "local": {"command": "python", "args": ["-m", "server"], "env": {"KEY": "${TAVILY:-nothing}"}},
    }
}
"""The shape that verl publishes, our content."""


def test_servers_of_a_json_file_and_of_verl_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAVILY", "key")
    (tmp_path / "servers.json").write_text(json.dumps(SERVERS))
    remote, local = mcp_file_servers(McpFileConfig(type="mcp_file", path=tmp_path / "servers.json", calls_at_once=3))
    assert (remote.name, remote.url, remote.calls_at_once) == ("Tavily Expert", "https://example.invalid/mcp", 3)
    assert remote.headers == {"Authorization": "Bearer key"}
    assert (local.command, local.env) == (("python", "-m", "server"), {"KEY": "key"})
    entry = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"rate_limit": 120, "timeout": 2.5, "type": "mcp"},
        "mcp": {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["tavily_search_tool"]},
    }
    remote, local = verl_mcp_servers(entry, tmp_path / "tools.yaml")
    assert remote.include == local.include == {"tavily_search_tool"}
    assert (local.calls_per_s, local.timeout_s) == (120, 2.5)
    with pytest.raises(UserError, match="timeout: 'long' is no number above 0"):
        verl_mcp_servers({**entry, "config": {"timeout": "long"}}, tmp_path / "tools.yaml")
    with pytest.raises(UserError, match="mcp_servers_config_path"):
        verl_mcp_servers({"config": {"type": "mcp"}}, tmp_path / "tools.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("{}", "holds no servers"),
        ('{"mcpServers": {"a": 3}}', "no object with a url or a command"),
        ('{"mcpServers": {"a": {}}}', "one of url and command"),
        ('{"mcpServers": {"a": {"url": "u", "command": "c"}}}', "one of url and command"),
        ('{"mcpServers": {"a": {"url": "u", "tokn": "c"}}}', "unknown key 'tokn'"),
        ('{"mcpServers": {"a": {"url": "u", "type": "sse"}}}', "transport 'sse' is not supported"),
        ('{"mcpServers": {"a": {"command": "c", "args": "x"}}}', "args: is no list"),
        ('{"mcpServers": {"a": {"url": "u", "auth_token": "${NO_SUCH_VARIABLE}"}}}', "NO_SUCH_VARIABLE is not set"),
    ],
)
def test_files_of_servers_that_are_wrong(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text(text)
    with pytest.raises(UserError, match=said):
        mcp_file_servers(McpFileConfig(type="mcp_file", path=tmp_path / "servers.json"))


def test_calls_keep_the_rate_of_the_server() -> None:
    async def scene() -> float:
        async with opened(stdio(calls_per_s=20.0)) as tools:
            session = tools.session(PROMPT)
            start = time.monotonic()
            await asyncio.gather(*(session.call("echo", {"text": "a"}) for _ in range(11)))
            return time.monotonic() - start

    assert run(scene()) >= 0.5
