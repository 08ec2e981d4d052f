"""The program that runs cells, as a notebook does: sent into the sandbox as text.

    host --{code, keep}--> supervisor --code--> interpreter (runs each cell in the same namespace)
         <--a report------     ^--------output, and how the cell ended---------'

The interpreter is a process of its own, stopped between cells. It holds no descriptor to the host: what a cell can
forge is its own report. The supervisor reads what a cell prints while it prints it, and keeps
the beginning and the end.
"""

import ast
import codecs
import ctypes
import json
import linecache
import os
import select
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from types import CodeType
from typing import Any

CHANNEL = 0
"""The supervisor's descriptor to the host."""
LOOK_MS = 100
"""Between looks for processes that ended."""
ONE_READ = 1 << 16


def main() -> None:
    """Serve the host until it is gone."""
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: no cell reads or writes this process
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which does nothing to the first process of a container
    supervisor = Supervisor()
    _tell(CHANNEL, "ready")
    with os.fdopen(os.dup(CHANNEL), encoding="utf-8") as requests:
        for line in requests:
            _tell(CHANNEL, supervisor.run(json.loads(line)))
    leave()


def _leave_if_alone(wait_ms: int = 0) -> None:
    """The host says nothing while a cell runs, so that it is gone where there is something to read."""
    poll = select.poll()
    poll.register(CHANNEL, select.POLLIN)
    if poll.poll(wait_ms):
        leave()


def leave() -> None:
    """End, with all that was started: nobody is there to ask for more."""
    os.killpg(0, signal.SIGKILL)
    os._exit(0)


class BothEnds:
    """The beginning and the end of a text of any length."""

    def __init__(self, characters: int) -> None:
        """Of each."""
        self._most = characters
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.head = self.tail = ""
        self.left_out = 0

    def add(self, data: bytes, final: bool = False) -> None:
        text = self._decoder.decode(data, final)
        room = self._most - len(self.head)
        self.head += text[:room]
        tail = self.tail + text[room:]
        cut = max(0, len(tail) - self._most)
        self.tail = tail[cut:]
        self.left_out += cut


class Supervisor:
    """Starts the interpreter, and lets it run only while a cell does."""

    def __init__(self) -> None:
        code, self._code = os.pipe()
        self._ends, ends = os.pipe()
        self._output, output = os.pipe()
        self._exit_code: int | None = None
        """Exit code of the interpreter, once it has ended."""
        self._interpreter = os.fork()
        if not self._interpreter:
            _become_interpreter(code, ends, output)
        for descriptor in (code, ends, output):
            os.close(descriptor)
        for descriptor in (self._code, self._output, self._ends):
            os.set_blocking(descriptor, False)

    def run(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run a cell to its end. What it printed, whether it raised, and how the interpreter ended if it did."""
        kept = BothEnds(request["keep"])
        with suppress(BlockingIOError):
            os.read(self._ends, ONE_READ)  # what the last cell may have written beyond its end
        with suppress(ProcessLookupError):
            os.kill(self._interpreter, signal.SIGCONT)
        raised = self._follow(kept, memoryview(_line(request["code"])))
        self._rest()
        for _ in range(64):  # a pipe holds less than that; where nobody is contained, somebody may still fill it
            if not self._read(kept):
                break
        kept.add(b"", final=True)
        report = {"head": kept.head, "tail": kept.tail, "left_out": kept.left_out, "raised": raised}
        return report | {"exit_code": self._exit_code}

    def _follow(self, kept: BothEnds, code: memoryview) -> bool:
        """Send a cell, and read what it prints until it ends; whether it raised."""
        poll = select.poll()
        for descriptor in (CHANNEL, self._output, self._ends):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._code, select.POLLOUT)
        while self._exit_code is None:
            ready = [descriptor for descriptor, _ in poll.poll(LOOK_MS)]
            _leave_if_alone()
            if self._code in ready:
                code = self._send(code)
                if not code:
                    poll.unregister(self._code)
            if self._output in ready and not self._read(kept):
                poll.unregister(self._output)  # closed by everybody; the end of the interpreter will tell
            if self._ends in ready:
                if how := os.read(self._ends, 1):
                    return how == b"!"
                poll.unregister(self._ends)
            self._reap()
        return True

    def _send(self, code: memoryview) -> memoryview:
        """What is left to send; nothing where nobody reads it any more."""
        try:
            return code[os.write(self._code, code) :]
        except BlockingIOError:
            return code
        except BrokenPipeError:
            return code[:0]

    def _read(self, kept: BothEnds) -> int:
        """Take in what is there now; how many bytes that was."""
        try:
            data = os.read(self._output, ONE_READ)
        except BlockingIOError:
            return 0
        kept.add(data)
        return len(data)

    def _rest(self) -> None:
        """Stop the interpreter, and end what the cell has left behind."""
        if self._exit_code is None:
            os.kill(self._interpreter, signal.SIGSTOP)
        self._end_others()
        while self._exit_code is None:
            process, status = os.waitpid(self._interpreter, os.WUNTRACED | os.WNOHANG)
            if process and os.WIFSTOPPED(status):
                break
            self._exit_code = os.waitstatus_to_exitcode(status) if process else None
            _leave_if_alone(wait_ms=1)
        self._end_others()  # those that its threads have started before they stopped

    def _end_others(self) -> None:
        while os.getpid() == 1 and (left := self._left_behind()):
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._reap()
            _leave_if_alone()

    def _left_behind(self) -> list[int]:
        """Running processes of this container that are neither this one nor the interpreter, which alone may wait for
        those that have ended."""
        ours = (1, self._interpreter if self._exit_code is None else 1)
        others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in ours]
        return [process for process in others if _is_running(process)]

    def _reap(self) -> None:
        """Wait for processes that have ended, those of others too: this is the first process of its container."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._interpreter:
                    self._exit_code = os.waitstatus_to_exitcode(ended[1])


def _is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in b"ZX"
    except OSError:
        return False


def _become_interpreter(code: int, ends: int, output: int) -> None:
    """Run cells until there are no more. Never returns."""
    leave = os._exit  # a cell may replace ours
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        kept = [*sorted((code, ends, output)), 1 << 16]
        for after, before in zip([2, *kept], kept, strict=False):
            os.closerange(after + 1, before)
        run_cells(code, ends, output)
    finally:
        leave(0)


def run_cells(code: int, ends: int, output: int) -> None:
    names, own, leave = type(sys)("__main__"), os.getpid(), os._exit
    sys.modules["__main__"] = names
    with os.fdopen(code, encoding="utf-8") as cells:
        for number, line in enumerate(cells, 1):
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            printed = sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
            raised = run_cell(json.loads(line), f"<cell {number}>", names.__dict__)
            for stream in {printed, sys.stdout, sys.stderr}:
                with suppress(Exception):  # a cell may have put anything there
                    stream.flush()
            if os.getpid() != own:  # a cell has forked, and its child has come to the cell's end
                leave(0)
            os.write(ends, b"!" if raised else b".")


def run_cell(source: str, name: str, names: dict[str, Any]) -> bool:
    """Run a cell, print the value of its last expression, or the traceback; whether it raised."""
    lines = [f"{line}\n" for line in source.split("\n")]
    linecache.cache[name] = (len(source), None, lines, name)  # for tracebacks
    try:
        body, last = compiled(source, name)
    except BaseException as error:  # noqa: BLE001 - SyntaxError, ValueError, RecursionError, MemoryError
        traceback.print_exception(error.with_traceback(None))
        return True
    try:
        exec(body, names)
        value = None if last is None else eval(last, names)
        if value is not None:
            print(repr(value))
    except BaseException as error:  # noqa: BLE001 - a cell may raise anything
        shown = error.__traceback__
        traceback.print_exception(error.with_traceback(shown.tb_next if shown else None))
        return True
    return False


def compiled(source: str, name: str) -> tuple[CodeType, CodeType | None]:
    """The statements of a cell, and its last one apart where that is an expression."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = compile(ast.Expression(last.value), name, "eval", dont_inherit=True) if isinstance(last, ast.Expr) else None
    return compile(tree, name, "exec", dont_inherit=True), value


def _tell(descriptor: int, message: Any) -> None:
    left = memoryview(_line(message))
    while left:
        left = left[os.write(descriptor, left) :]


def _line(message: Any) -> bytes:
    return f"{json.dumps(message)}\n".encode()
