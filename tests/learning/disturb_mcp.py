"""Calls tools of an MCP server that hangs, dies, floods and fails again and again. Prints what came of it.

    python tests/learning/disturb_mcp.py WAY TIMES [seed]          WAY: stdio, http, or old (HTTP with sessions)

Each time one trajectory's call is a misfortune, in the midst of calls of others. Every call must end in time, with its
own result or with the reason; none may reach the server twice; the next trajectory must be served; and in the end no
task, and no process, may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

from tandem.rollout.environment import EnvironmentFailed
from tandem.rollout.tools.base import CallLimits, ToolError
from tandem.rollout.tools.mcp_servers import McpServer
from tandem.rollout.tools.mcp_tools import McpTools
from tandem.types import Prompt

SERVER = str(Path(__file__).parents[1] / "mcp_server.py")
PROMPT = Prompt(0, np.array([1], np.int32), "?", "test", None)
TIMEOUT_S = 2.0
CONNECT_S = 60.0
BESIDE = 6
"""Calls of other trajectories around each misfortune."""
MISFORTUNES: dict[str, tuple[type[Exception], ...]] = {
    "die": (EnvironmentFailed,),
    "hang": (TimeoutError,),
    "hang_altogether": (TimeoutError,),
    "flood": (),
    "fail": (ToolError,),
    "nobody": (ToolError,),
}
"""Tool to how its call may end; without: with a result."""
ARGUMENTS = {
    "flood": {"megabytes": 10},
    "fail": {"text": "bad"},
    "hang": {"seconds": 4.0},
    "hang_altogether": {"seconds": 9.0},
}


async def disturb(way: str, times: int, seed: int, say: Callable[[str], None] = print) -> Counter[str]:
    """How the calls ended. Raises AssertionError."""
    rng, ended = random.Random(seed), Counter[str]()
    longest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "calls"
        async with _server(way, log) as server:
            tools = McpTools(server, CallLimits(64, TIMEOUT_S))
            await tools.open()
            for time_ in range(times):
                misfortune = rng.choice(list(MISFORTUNES)) if time_ % len(MISFORTUNES) else "die"
                start = time.monotonic()
                async with asyncio.timeout(CONNECT_S + 30.0):
                    ended += await _once(tools, misfortune, time_, rng)
                longest = max(longest, time.monotonic() - start)
            await tools.close()
        calls = Counter(line for line in log.read_text().splitlines() if line.startswith("echo"))
        assert max(calls.values()) == 1, "a call was sent twice"
    await asyncio.sleep(0.5)
    assert asyncio.all_tasks() == {asyncio.current_task()}, asyncio.all_tasks()
    left = _servers()
    assert not left, left
    say(f"{way}: {times} misfortunes, the longest took {longest:.1f} s: {dict(sorted(ended.items()))}")
    return ended


def _servers() -> list[list[str]]:
    """The commands of the servers below this process that still run; a test run has other children, too."""
    commands: list[list[str]] = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ended meanwhile
            commands.append(child.cmdline())
    return [command for command in commands if any("mcp_server" in word for word in command)]


async def _once(tools: McpTools, misfortune: str, number: int, rng: random.Random) -> Counter[str]:
    session = tools.session(PROMPT)

    async def echo(name: str, delay_s: float) -> str:
        await asyncio.sleep(delay_s)
        try:
            result = await session.call("echo", {"text": name, "seconds": rng.uniform(0, 0.3)})
        except (EnvironmentFailed, TimeoutError) as error:
            return f"echo {type(error).__name__}"
        assert result.content == name, f"{name} got another's result"
        return "echo answered"

    async def suffer() -> str:
        await asyncio.sleep(0.1)
        expected = MISFORTUNES[misfortune]
        try:
            result = await session.call(misfortune, ARGUMENTS.get(misfortune, {}))
        except (EnvironmentFailed, TimeoutError, ToolError) as error:
            assert isinstance(error, (*expected, EnvironmentFailed, TimeoutError)), f"{misfortune}: {error!r}"
            return f"{misfortune} {type(error).__name__}"
        assert not expected and len(result.content) == 10 * 2**20, misfortune
        return f"{misfortune} answered"

    beside = [echo(f"{number}-{one}", rng.uniform(0, 0.3)) for one in range(BESIDE)]
    ended = Counter(await asyncio.gather(suffer(), *beside))
    after = await echo(f"{number}-after", 0.0)
    assert after == "echo answered" or misfortune == "hang_altogether", f"after {misfortune}: {after}"
    return ended + Counter([f"after: {after}"])


@asynccontextmanager
async def _server(way: str, log: Path) -> AsyncIterator[McpServer]:
    options = ("--log", str(log))
    if way == "stdio":
        yield McpServer(way, command=(sys.executable, SERVER, *options), connect_timeout_s=CONNECT_S)
        return
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    options += ("--http", str(port), *(["--old"] if way == "old" else []))
    keeping = asyncio.create_task(_keep_up(options))
    await asyncio.to_thread(_wait_for, port)
    try:
        yield McpServer(way, url=f"http://127.0.0.1:{port}/mcp", connect_timeout_s=CONNECT_S)
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


async def _keep_up(options: tuple[str, ...]) -> None:
    """Start the server, and again whenever it has died."""
    while True:
        process = await asyncio.create_subprocess_exec(sys.executable, SERVER, *options)
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + CONNECT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)


def main() -> None:
    way, times, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    start = time.monotonic()
    asyncio.run(disturb(way, times, seed))
    print(f"done in {time.monotonic() - start:.0f} s; the limit of a call was {TIMEOUT_S:g} s")


if __name__ == "__main__":
    main()
