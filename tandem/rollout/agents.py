"""Agent programs: they are told where a policy answers, and run until they end.

A program knows nothing of us but a base URL and a key, as of any OpenAI-compatible interface.
"""

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from tandem.errors import UserError
from tandem.files import load_named, users_traceback
from tandem.rollout.environment import EnvironmentFailed, finite
from tandem.rollout.users_code import call

_TAIL = 4096
"""Bytes of what a command writes that are kept: its reward is in the last line, and why it failed in the last ones."""
_LAST_WORDS_S = 2.0
"""For reading on after a command has ended."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where the policy answers."""

    base_url: str
    key: str


@dataclass(frozen=True, slots=True)
class AgentsWord:
    """What an agent says in the end."""

    reward: float | None = None
    """None: it gives none."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers, which become metrics."""


class Agent(Protocol):
    """A program that solves a row's task by asking the policy."""

    async def run(self, row: Mapping[str, Any], text: str, access: Access) -> AgentsWord:
        """From its start to its end; cancelling it ends it. `text`: the row's prompt.

        Raises EnvironmentFailed where it fails.
        """
        ...


class FunctionAgent:
    """`function(row, base_url, api_key)`, plain, which runs in a thread of its own, or async. It returns a reward, an
    object with `reward` and further numbers, or None."""

    def __init__(self, reference: str, what: str) -> None:
        """`reference`: `path/to/file.py:function` or `package.module:function`. `what`: the key, for messages."""
        function = load_named(reference, what)
        if not callable(function):
            raise UserError(f"{what} {reference!r}: there is no function of that name")
        self._function, self._reference = function, reference

    async def run(self, row: Mapping[str, Any], text: str, access: Access) -> AgentsWord:
        given = (dict(row), access.base_url, access.key)
        try:
            said = await call(self._function, *given)
        except Exception as error:  # the user's code may raise anything
            shown = users_traceback(error, os.path.dirname(__file__))
            raise EnvironmentFailed(f"{self._reference} raised:\n{shown}") from error
        return word_of(said, self._reference)


_DIE_WITH_US = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
_DYING_WITH_US = (sys.executable, "-ISc", _DIE_WITH_US) if sys.platform == "linux" else ()
"""What becomes the command, after prctl(PR_SET_PDEATHSIG): a run that is killed leaves none running."""


class CommandAgent:
    """A command: the row is on its standard input as JSON, the prompt in TANDEM_PROMPT, where to ask in OPENAI_BASE_URL
    and OPENAI_API_KEY. The last line that it writes may be a reward, or an object with `reward` and further numbers."""

    def __init__(self, command: str) -> None:
        """Raises UserError where there is no such program."""
        self._command = command
        self._arguments = shlex.split(command)
        if shutil.which(self._arguments[0]) is None:
            program = self._arguments[0]
            raise UserError(f"conversation.environment.command {command!r}: there is no program {program!r} to be run")

    async def run(self, row: Mapping[str, Any], text: str, access: Access) -> AgentsWord:
        given = _as_json(row)
        async with _TailOfPipe() as said, _TailOfPipe() as complaint:
            process = await self._start(text, access, said, complaint)
            try:
                await _give(process, given)
                status = await process.wait()
            finally:
                with suppress(ProcessLookupError):  # all of its group, also what it has left behind
                    os.killpg(process.pid, signal.SIGKILL)
            if status != 0:
                raise EnvironmentFailed(f"{self._command} ended with status {status}: {await complaint.text()}")
            return word_of(_last_json(await said.text()), self._command)

    async def _start(
        self, text: str, access: Access, said: "_TailOfPipe", complaint: "_TailOfPipe"
    ) -> asyncio.subprocess.Process:
        own = {"OPENAI_BASE_URL": access.base_url, "OPENAI_API_KEY": access.key, "TANDEM_PROMPT": text}
        try:
            return await asyncio.create_subprocess_exec(
                *_DYING_WITH_US,
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=said.to_write,
                stderr=complaint.to_write,
                env={**os.environ, **own},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a prompt with a null character
            raise EnvironmentFailed(f"{self._command} cannot be started: {error}") from error
        finally:
            said.written_elsewhere()
            complaint.written_elsewhere()


async def _give(process: asyncio.subprocess.Process, given: bytes) -> None:
    """Write to its standard input, which it need not read."""
    assert process.stdin
    with suppress(ConnectionError):
        process.stdin.write(given)
        await process.stdin.drain()
    process.stdin.close()


class _TailOfPipe:
    """The end of what a command writes. A pipe of our own: asyncio would take a command for running as long as
    something that it has left behind holds one of asyncio's."""

    async def __aenter__(self) -> Self:
        to_read, self.to_write = os.pipe()
        reader = asyncio.StreamReader()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(to_read, "rb", 0)
        )
        self._tail = b""
        self._reading = asyncio.create_task(self._keep_the_tail(reader))
        return self

    def written_elsewhere(self) -> None:
        """The command has its own descriptor, or there is no command."""
        os.close(self.to_write)

    async def text(self) -> str:
        """When all that could write has ended; a process that was started to outlive the command is not waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await asyncio.shield(self._reading)
        return self._tail.decode(errors="replace").strip()

    async def _keep_the_tail(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(65536):
            self._tail = (self._tail + part)[-_TAIL:]

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        self._transport.close()


def word_of(said: Any, who: str) -> AgentsWord:
    """Raises EnvironmentFailed where it is neither a number, an object of numbers, nor None."""
    if said is None:
        return AgentsWord()
    given = dict(said) if isinstance(said, Mapping) else {"reward": said}
    numbers: dict[str, float] = {}
    for name, value in given.items():
        if name != "reward" or value is not None:
            numbers[str(name)] = finite(value, f"{who}: {name}")
    return AgentsWord(numbers.pop("reward", None), numbers)


def _last_json(said: str) -> Any:
    """The value of the last line, where it is a number or an object; other lines are a program's own matter."""
    lines = said.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | int | float) else None


def _as_json(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(row), ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"a row cannot be given to an agent's command as JSON: {error}; drop that column") from error
