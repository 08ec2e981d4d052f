"""The tool `python`: code of the policy, in the sandbox, with a namespace that lasts as long as the trajectory."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.errors import TandemError
from tandem.rollout.environment import EnvironmentFailed, ToolSchema
from tandem.rollout.threads import in_thread
from tandem.rollout.tools.base import CallLimits, ToolError, ToolResult
from tandem.rollout.tools.builtin.python import PythonToolConfig
from tandem.sandbox.base import Limits
from tandem.sandbox.interpreter import LEFT_OUT, CellTimeout, Interpreter, InterpreterEnded, Interpreters
from tandem.sandbox.local import LocalSandbox
from tandem.sandbox.visible_packages import find_packages
from tandem.types import Prompt

_OWN_PROCESSES = 2
"""The supervisor and the interpreter."""
_LOST = "Everything that was defined, and every file, is gone; the next call starts afresh."
_SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code, as a cell of a notebook: what it defines stays for later calls. Returns what "
        "the code prints, and the value of its last expression. There is no network; /tmp is writable.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}


class PythonTools:
    """The containers of a run."""

    def __init__(self, config: PythonToolConfig, limits: CallLimits, result_characters: int) -> None:
        """Raises UserError where this machine has no sandbox, and for packages that are not installed."""
        self.limits = limits
        self.containers = asyncio.Semaphore(config.containers_at_once)
        kernel = Limits(
            timeout_s=limits.timeout_s,
            memory_mib=config.memory_mib,
            processes=config.processes + _OWN_PROCESSES,
            file_mib=config.file_mib,
            scratch_mib=config.scratch_mib,
        )
        contained = not config.run_untrusted_code_without_sandbox
        sandbox = LocalSandbox(kernel, contained, find_packages(config.packages))
        room = max(0, result_characters - len(LEFT_OUT.format(10**12)))
        self.interpreters = Interpreters(sandbox, limits.timeout_s, config.cpu_s, output_characters=room)

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        return [_SCHEMA]

    async def open(self) -> None: ...

    def session(self, prompt: Prompt) -> "_PythonSession":
        return _PythonSession(self)

    async def close(self) -> None:
        await in_thread(self.interpreters.close)


class _PythonSession:
    """The container of one trajectory, from its first call on."""

    def __init__(self, tools: PythonTools) -> None:
        self._tools = tools
        self._interpreter: Interpreter | None = None
        self._one_by_one = asyncio.Lock()
        """The calls of a turn, in their order."""

    async def start(self) -> str | None:
        return None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        code = _code_of(arguments)
        async with self._one_by_one:
            if self._interpreter is None:
                await self._tools.containers.acquire()
                self._interpreter = self._tools.interpreters.make()
            try:
                async with self._tools.limits.slots:  # the interpreter keeps the time: its end has to be told, too
                    cell = await in_thread(self._interpreter.run, code)
            except InterpreterEnded as error:
                self._let_go()
                kind = TimeoutError if isinstance(error, CellTimeout) else ToolError
                printed = f" It had printed:\n{error.output}" if error.output else ""
                raise kind(f"{error}. {_LOST}{printed}") from error
            except TandemError as error:
                raise EnvironmentFailed(str(error)) from error
        text = cell.output.removesuffix("\n") or "(no output)"
        return ToolResult(text, numbers={"python_errors": float(cell.raised)})

    async def close(self) -> float | None:
        if self._interpreter is not None:
            try:
                await in_thread(self._interpreter.end)
            except TandemError as error:
                raise EnvironmentFailed(str(error)) from error
            finally:
                self._let_go()
        return None

    def _let_go(self) -> None:
        """Of the interpreter, which is gone, and of its place; also where `close` and a call that it ends both do."""
        if self._interpreter is not None:
            self._interpreter = None
            self._tools.containers.release()


def _code_of(arguments: Mapping[str, Any]) -> str:
    """Raises ToolError."""
    code = arguments.get("code")
    if not isinstance(code, str) or len(arguments) != 1:
        raise ToolError("python takes one argument, `code`, which is text")
    return code
