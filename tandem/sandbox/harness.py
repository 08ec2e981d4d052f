"""The program that tests a solution inside a sandbox: sent there as text, behind `json_values.py` and `proxies.py`.

Each test has two fresh processes: one runs the solution, the other the test, which reaches the solution over a socket
(`proxies.py`). This process starts both, and alone hears from the test's whether it ended well.

No process of the solution ever holds a test, an expected value, or a descriptor through which a verdict passes: it is
forked before this process reads the test, and closes what it inherits. None can read another's memory or descriptors,
for none is dumpable. What is read from standard input: settings, each test, and at last the secret behind
which the verdicts are printed, so that nobody else can print them.
"""

import ast
import builtins
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tandem.sandbox.collected import run_collected
from tandem.sandbox.json_values import DIGITS, receive, receive_frame, send, send_frame
from tandem.sandbox.proxies import AnsweringEnd, AskingEnd, Names, SolutionModule

LONGEST_ANSWER = 1 << 12
ASKED_NOTHING = "it ends well without having called or compared anything of the solution"
"""Of a test that every solution passes. No exception is told like that: those have a name and a colon."""


def main() -> None:
    """Print the secret and, as JSON, `""` for each test that passed and else the reason."""
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which does nothing to the first process of a container
    task = receive(0)
    names_of(task["modules"])  # imported once, for the tests' processes are forks of this one
    deadline = time.monotonic() + task["total_s"]
    reasons = [verdict(task, min(task["test_timeout_s"], deadline - time.monotonic())) for _ in range(task["tests"])]
    print(receive(0) + json.dumps(reasons), flush=True)


def verdict(task: Mapping[str, Any], timeout_s: float) -> str:
    """What comes of the next test on standard input: `""` if it passed, else the reason why not."""
    attempt = Attempt()
    try:
        problem = attempt.start(task) if timeout_s > 0 else "no time was left for it"
        test = receive_frame(0)  # not before the solution's process is there, which has a copy of our memory
        problem = problem or attempt.outcome(test, timeout_s)
        test[:] = bytes(len(test))
        return problem
    finally:
        attempt.end()


class Attempt:
    """The two processes of a test."""

    def __init__(self) -> None:
        self._processes: list[int] = []
        self._ends = socket.socketpair()
        """What this process and the test's say to each other: the test, and what comes of it."""

    def start(self, task: Mapping[str, Any]) -> str:
        """Returns why they cannot be started, as when an earlier test's processes left no room; `""` if they were."""
        testers = self._ends[1]
        tester, solution = socket.socketpair()
        try:
            # The test's process first: a solution cannot keep it from starting.
            self._fork(run_test, task, (tester.fileno(), testers.fileno()), os.devnull)
            self._fork(run_solution, task, (solution.fileno(),), "/tmp/output")
        except OSError as error:
            return f"its processes could not be started: {error}"
        finally:
            for end in (tester, solution, testers):
                end.close()
        return ""

    def outcome(self, test: bytearray, timeout_s: float) -> str:
        descriptor = self._ends[0].fileno()
        try:
            send_frame(descriptor, test)
            if not select.select([descriptor], [], [], timeout_s)[0]:
                return f"took longer than {timeout_s:.3g} s"
            answer = os.read(descriptor, LONGEST_ANSWER)  # at once: a test that a model has written may send anything
            reason = json.loads(answer[DIGITS:])
        except (OSError, ValueError, RecursionError):
            return "its process ended before the test did"
        return reason if isinstance(reason, str) else "its process sent something else than a reason"

    def end(self) -> None:
        """Kill both, with what they started as far as it stayed with them."""
        for process in self._processes:
            for kill in (os.killpg, os.kill):  # the group does not exist before the process's first act
                with suppress(ProcessLookupError):
                    kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for end in self._ends:
            end.close()

    def _fork(self, run: Callable[..., None], task: Mapping[str, Any], ends: Sequence[int], output: str) -> None:
        """Start a process that has these descriptors and no other."""
        process = os.fork()
        if process:
            self._processes.append(process)
            return
        leave = os._exit  # a solution may replace ours
        try:
            os.setsid()
            for descriptor, name in enumerate((os.devnull, output, output)):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
            kept = [*sorted(ends), 1 << 16]
            for after, before in zip([2, *kept], kept, strict=False):
                os.closerange(after + 1, before)
            run(task, *ends)
        finally:
            leave(0)


def run_solution(task: Mapping[str, Any], channel: int) -> None:
    """Run the solution, then do what the test asks of it."""
    module = sys.modules["solution"] = types.ModuleType("solution")
    end = AnsweringEnd(channel, module.__dict__)
    try:
        if task["modules"]:  # as builtins: a name of theirs is none of the solution's
            module.__dict__["__builtins__"] = {**vars(builtins), **names_of(task["modules"])}
        for name in ("preamble", "solution"):  # each may begin with an import from __future__
            exec(compile(task[name], f"{name}.py", "exec"), module.__dict__)
    except BaseException as error:  # noqa: BLE001 - a solution may raise anything
        end.report(error)
    else:
        end.report(None)
        end.serve()


def names_of(modules: Sequence[str]) -> dict[str, Any]:
    """The modules, and what `from MODULE import *` gives of each but names of builtins; the later one goes first."""
    found: dict[str, Any] = {}
    for name in modules:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [key for key in vars(module) if key[0] != "_"]
        found |= {key: getattr(module, key) for key in public if not hasattr(builtins, key)}
    return found | {name: sys.modules[name] for name in modules}


def _nothing(*_: Any, **__: Any) -> None:
    """What a test that is a program of its own would run itself by."""


def run_test(task: Mapping[str, Any], channel: int, answer: int) -> None:
    """Run the test and say what came of it."""
    try:
        test = receive(answer)
        end = AskingEnd(channel)
        end.wait_until_loaded()
        sys.modules["solution"] = SolutionModule(end)
        names = test_names(task, end, test)
        end.was_asked = False
        if "unittest" in test:  # its classes are run below, and not by itself
            import unittest

            unittest.main = _nothing
        exec(compile(test, "test.py", "exec"), names)
        run_collected(names, called_by_itself(test))
        reason = "" if end.was_asked else ASKED_NOTHING
    except BaseException as error:  # noqa: BLE001 - SystemExit, too, is no pass
        reason = f"{type(error).__name__}: {error}"[:300]
    send(answer, reason)


def test_names(task: Mapping[str, Any], end: AskingEnd, test: str) -> Names:
    """The names that the test starts with: those of the preamble but its classes, whose objects the solution makes."""
    names = Names(end, task["packages"])
    exec(compile(task["preamble"], "preamble.py", "exec"), names)
    for name, value in list(names.items()):
        if isinstance(value, type) and value.__module__ == "test":
            del names[name]
    names.pythons_come_first = asks_for_more_than_python(test, names)
    calls = [node.func for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    names.called = {function.id for function in calls if isinstance(function, ast.Name)}
    return names


def called_by_itself(test: str) -> set[str]:
    """The functions that a test calls whenever it is run: neither within others, nor where it is the main program."""
    inside = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    parts = [node for node in ast.parse(test).body if not isinstance(node, inside) and not is_main_guard(node)]
    calls = [node.func for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "'__name__'" in ast.dump(node.test)


def asks_for_more_than_python(test: str, names: Collection[str]) -> bool:
    """Whether any name in the test that neither it nor `names` define is no builtin's and no module's of Python."""
    nodes = list(ast.walk(ast.parse(test)))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)} | {
        node.name
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)) and node.name
    }
    imports = [alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    own |= {(alias.asname or alias.name).partition(".")[0] for alias in imports}
    asked = {node.id for node in nodes if isinstance(node, ast.Name)} - own - set(names)
    pythons = {*vars(builtins), *sys.stdlib_module_names}
    return "solution" in own or not asked <= pythons
