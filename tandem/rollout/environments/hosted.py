"""Environments of synchronous libraries, in processes of their own.

    consumes:     calls of conversations: begin, step, close
    produces:     what the library says, as text, with rewards
    waits for:    the process of its environment, which answers one call after the other
    unblocked by: the answer, the end of the process, or the limit of a call, which ends the process

The processes import the libraries, and hold many environments each. One that ended is replaced when it is needed; the
environments that were in it have failed. They end with this process.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from tandem.config.ecosystem import HostedConfig
from tandem.errors import UserError
from tandem.rollout.environment import Answer, Counts, EnvironmentFailed, Reply, ToolSchema
from tandem.rollout.environments.episodes import Episode, need_package, options_of, seed_of
from tandem.rollout.environments.host_process import LENGTH
from tandem.types import Message, Prompt

START_TIMEOUT_S = 300.0
"""For importing a library."""
_START = "import sys; sys.path[:] = sys.argv[2:]; from tandem.rollout.environments.host_process import main; main()"
"""The process finds modules exactly where its parent does, and does not run the parent's `__main__` again."""


class HostedEnvironments:
    """Environments of one library, spread over a few processes."""

    def __init__(self, config: HostedConfig) -> None:
        """Raises UserError where the library is not installed."""
        need_package(config.type, config.type)
        self._config = config
        self._hosts: list[_Host] = []
        self._replacing = asyncio.Lock()
        self._numbers = count()

    async def open(self) -> None:
        """Raises UserError where the library refuses the configuration."""
        self._hosts = [self._new_host() for _ in range(self._config.processes)]
        try:
            await asyncio.gather(*(host.open() for host in self._hosts))
        except EnvironmentFailed as error:
            await self.close()
            raise UserError(f"conversation.environment (type: {self._config.type}): {error}") from None

    def make(self, prompt: Prompt) -> "HostedEnvironment":
        return HostedEnvironment(self)

    async def close(self) -> None:
        for host in self._hosts:
            host.end()
        self._hosts = []

    async def least_busy(self) -> "_Host":
        """The process with the fewest environments; ones that have ended are replaced before."""
        async with self._replacing:
            for place, host in enumerate(self._hosts):
                if host.has_ended:
                    self._hosts[place] = self._new_host()
                    await self._hosts[place].open()
        return min(self._hosts, key=lambda host: len(host.instances))

    def _new_host(self) -> "_Host":
        return _Host(self._config)

    def number(self) -> int:
        return next(self._numbers)


class HostedEnvironment:
    """One instance in its process."""

    tools: Sequence[ToolSchema] = ()

    def __init__(self, environments: HostedEnvironments) -> None:
        self._environments = environments
        self._number = environments.number()
        self._host: _Host | None = None
        self._counts = Counts()
        self._episode = Episode()

    @property
    def numbers(self) -> Mapping[str, float]:
        return self._counts.values

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        seed, options = seed_of(prompt), options_of(prompt)
        self._host = await self._environments.least_busy()
        self._host.instances.add(self._number)
        observation = await self._call("begin", seed=seed, options=options)
        return self._episode.opening(prompt, observation)

    async def step(self, answer: Answer) -> Reply:
        said = await self._call("step", action=answer.content)
        self._counts.add("refused_actions", said["was_refused"])
        return self._episode.reply(said["observation"], said["reward"], said["done"])

    async def close(self) -> float | None:
        if self._host is not None and self._number in self._host.instances:
            self._host.instances.discard(self._number)
            if not self._host.has_ended:
                await self._call("close")
        return self._episode.reward_of_rest()

    async def _call(self, name: str, **arguments: Any) -> Any:
        assert self._host is not None
        return await self._host.call({"call": name, "id": self._number, **arguments})


class _Host:
    """A process, in a session of its own: Ctrl-C on the terminal passes it by, and its children die with it."""

    def __init__(self, config: HostedConfig) -> None:
        self._config = config
        self.instances: set[int] = set()
        """The numbers of the environments in it."""
        self._turn = asyncio.Lock()
        self._ended: str | None = None
        """Why it has ended; None: it runs."""
        ours, theirs = socket.socketpair()
        self._connection = ours
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-uP", "-c", _START, str(theirs.fileno()), *sys.path],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a library prints joins our standard error
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sets of strings iterate alike in every process and run
            start_new_session=True,
        )
        theirs.close()

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    async def open(self) -> None:
        """Have the library imported. Raises EnvironmentFailed where it is not there, or refuses the configuration."""
        self._streams = await asyncio.open_connection(sock=self._connection)
        answer = await self._exchange(self._config.model_dump(mode="json"), START_TIMEOUT_S)
        if "refused" in answer:
            self.end(answer["refused"])
            raise EnvironmentFailed(answer["refused"])

    async def call(self, message: Mapping[str, Any]) -> Any:
        """What the library returns. Raises EnvironmentFailed where it raises, or the process ends.

        A caller that is cancelled leaves the call to its end: its answer is not taken for that of the next one.
        """
        exchange = asyncio.ensure_future(self._exchange(message, self._config.timeout_s))
        exchange.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has seen it
        answer = await asyncio.shield(exchange)
        if "error" in answer:
            raise EnvironmentFailed(answer["error"])
        return answer["result"]

    def end(self, why: str = "closed") -> None:
        """Kill it and what it started. Safe to repeat."""
        if self._ended is not None:
            return
        self._ended = why
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._connection.close()

    async def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        async with self._turn:
            if self._ended is not None:
                raise EnvironmentFailed(f"the process of the environment has ended: {self._ended}")
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._send_and_receive(message)
            except TimeoutError:
                self.end(f"a call took longer than {timeout_s:g} s")
            except (OSError, asyncio.IncompleteReadError):
                self.end(f"{self._exit()} in a call")
        raise EnvironmentFailed(f"the process of the environment has ended: {self._ended}")

    async def _send_and_receive(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._streams is not None
        reader, writer = self._streams
        body = json.dumps(message).encode()
        writer.write(LENGTH.pack(len(body)) + body)
        await writer.drain()
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return json.loads(await reader.readexactly(length))

    def _exit(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout=1)
            return f"signal {-status}" if status < 0 else f"exit status {status}"
        return "its connection was closed"
