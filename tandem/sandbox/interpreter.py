"""Python that keeps its state between cells, each interpreter in a container of its own.

consumes       cells, from any thread
produces       a Cell each, or InterpreterEnded
waits for      the container's report; looks at the clock and at what the container uses meanwhile
unblocked by   the report, a limit, `end` from another thread, the container's end
"""

import inspect
import json
import math
import os
import re
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tandem.errors import TandemError
from tandem.sandbox import cells
from tandem.sandbox.local import Container, LocalSandbox

START_S = 60.0
"""For a container to be there."""
FIRST_LOOK_S, LAST_LOOK_S = 0.01, 0.1
"""Between looks at a container while a cell runs: more and more, for most cells are short."""
LEFT_OUT = "\n… ({:,} characters left out) …\n"
_BYTES_OF_A_CHARACTER = 12
"""The most that one takes in JSON."""
_BYTES_OF_A_REPORT = 1024
"""The most of all else in a report."""
_PROGRAM = re.sub(r"^from tandem.*\n", "", inspect.getsource(cells), flags=re.MULTILINE) + "\nmain()\n"


@dataclass(frozen=True, slots=True)
class Cell:
    """How a cell ended."""

    output: str
    """Standard output and error in their order, the value of a last expression, and the traceback where it raised."""
    raised: bool


class InterpreterEnded(Exception):
    """The interpreter is gone, with all that it remembered; the message is why."""

    def __init__(self, why: str, output: str = "") -> None:
        super().__init__(why)
        self.output = output
        """What the cell had printed, where that is known."""


class CellTimeout(InterpreterEnded):
    """A cell took too long."""


class Interpreters:
    """The interpreters of a process; all end with it, however it ends, and with `close`."""

    def __init__(self, sandbox: LocalSandbox, timeout_s: float, cpu_s: float, output_characters: int) -> None:
        """`timeout_s`: of a cell, by the clock. `cpu_s`: of CPU, all processes of a cell together. Longer output is cut
        in the middle."""
        self.sandbox = sandbox
        self.timeout_s = timeout_s
        self.cpu_s = cpu_s
        self.output_characters = output_characters
        self.starter = ThreadPoolExecutor(1, "sandbox")
        """The thread that starts containers: it has to last as long as they do."""
        self._made: set[Interpreter] = set()

    def make(self) -> "Interpreter":
        """One that starts with its first cell."""
        interpreter = Interpreter(self)
        self._made.add(interpreter)
        return interpreter

    def forget(self, interpreter: "Interpreter") -> None:
        self._made.discard(interpreter)

    def close(self) -> None:
        """End every interpreter."""
        for interpreter in list(self._made):
            interpreter.end()
        self.starter.shutdown()


class Interpreter:
    """One namespace, and the container that it lives in."""

    def __init__(self, owner: Interpreters) -> None:
        self._owner = owner
        self._container: Container | None = None
        self._channel, self._theirs = socket.socketpair()
        self._running = threading.Lock()
        """Held while a cell runs."""
        self._ending = threading.Lock()
        self._is_over = False

    def run(self, code: str) -> Cell:
        """Run a cell.

        Raises InterpreterEnded when a limit was passed or the container is gone, CellTimeout when that was the time;
        and TandemError when no container can be made.
        """
        try:
            with self._running:
                if self._is_over:
                    raise InterpreterEnded("the interpreter was ended")
                if self._container is None:
                    self._container = self._start()
                report = self._report(self._container, code)
        except BaseException:
            self.end()
            raise
        exit_code = report["exit_code"]
        if exit_code is not None:
            self.end()
            how = f"ended with exit status {exit_code}" if exit_code >= 0 else f"was killed by signal {-exit_code}"
            raise InterpreterEnded(f"the interpreter {how}", self._output(report))
        return Cell(self._output(report), raised=bool(report["raised"]))

    def end(self) -> None:
        """Returns when the container is gone. A cell that is running ends at once."""
        with self._ending:
            if self._is_over:
                return
            self._is_over = True
            if self._container is not None:
                self._container.kill()
            with self._running:
                self._channel.close()
                self._theirs.close()
                self._owner.forget(self)
                if self._container is not None:
                    self._container.end()

    def _start(self) -> Container:
        with tempfile.TemporaryFile() as errors:
            os.fchmod(errors.fileno(), 0o666)
            theirs = self._theirs.fileno()
            start = self._owner.starter.submit(
                self._owner.sandbox.start, _PROGRAM, (theirs, theirs, errors.fileno()), math.inf
            )
            container = start.result()
            self._theirs.close()
            self._container = container  # so that `end` ends it
            try:
                deadline = time.monotonic() + START_S
                ready = self._line(container, deadline, most=_BYTES_OF_A_REPORT)
            except InterpreterEnded as error:
                errors.seek(0)
                said = errors.read(2000).decode(errors="replace").strip()
                raise TandemError(f"a sandbox did not start: {said or error}") from error
        if ready != "ready":
            raise TandemError(f"a sandbox did not start: it said {ready!r:.200}")
        return container

    def _report(self, container: Container, code: str) -> dict[str, Any]:
        """What the supervisor says of a cell. It is believed, for it is of this very trajectory; but not its form."""
        half = self._owner.output_characters // 2
        deadline = time.monotonic() + self._owner.timeout_s
        cpu_s = container.usage().cpu_s + self._owner.cpu_s
        request = memoryview(f"{json.dumps({'code': code, 'keep': half})}\n".encode())
        most = 2 * half * _BYTES_OF_A_CHARACTER + _BYTES_OF_A_REPORT
        report = self._line(container, deadline, most, request, cpu_s)
        kinds = {"head": str, "tail": str, "left_out": int, "raised": bool, "exit_code": int | None}
        if not isinstance(report, dict) or any(not isinstance(report.get(key), kinds[key]) for key in kinds):
            raise InterpreterEnded("the interpreter's answer could not be read")
        return report

    def _line(
        self, container: Container, deadline: float, most: int, left: memoryview | None = None, cpu_s: float = math.inf
    ) -> Any:
        """Send what is left to send, and receive a line of JSON. Raises InterpreterEnded and CellTimeout."""
        received, look_s = bytearray(), FIRST_LOOK_S
        while not received.endswith(b"\n"):
            self._channel.settimeout(look_s)
            try:
                if left:
                    left = left[self._channel.send(left) :]
                    continue
                more = self._channel.recv(1 << 16)
            except TimeoutError:
                self._look(container, deadline, cpu_s)
                look_s = min(2 * look_s, LAST_LOOK_S)
                continue
            except OSError:
                more = b""
            received += more
            if not more or len(received) > most:
                raise InterpreterEnded("the interpreter's container ended" if not more else "its answer was too long")
        try:
            return json.loads(received)
        except (ValueError, RecursionError):
            raise InterpreterEnded("the interpreter's answer could not be read") from None

    def _look(self, container: Container, deadline: float, cpu_s: float) -> None:
        """Raise where a limit has been passed."""
        if time.monotonic() > deadline:
            raise CellTimeout(f"the code took longer than {self._owner.timeout_s:g} s")
        usage, memory_mib = container.usage(), self._owner.sandbox.limits.memory_mib
        if usage.resident_bytes > memory_mib << 20:
            raise InterpreterEnded(f"the code used more than {memory_mib} MiB of memory")
        if usage.cpu_s > cpu_s:
            raise InterpreterEnded(f"the code used more than {self._owner.cpu_s:g} s of CPU time")

    def _output(self, report: dict[str, Any]) -> str:
        left_out = LEFT_OUT.format(report["left_out"]) if report["left_out"] else ""
        text = f"{report['head']}{left_out}{report['tail']}"
        return text.encode(errors="replace").decode()  # half of a surrogate pair is no text for a tokenizer
