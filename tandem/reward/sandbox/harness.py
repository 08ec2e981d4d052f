"""The program that tests a solution inside a sandbox: sent there as text, so it stands alone.

Every test runs in a process of its own that has just run the solution. It claims a pass by repeating a token; the
verdicts are printed behind a secret that is read when all tests have ended, so no solution can print them itself. A
solution that searches the interpreter for its token can still claim a pass: it shares a process with its test.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time
import types
from contextlib import suppress


def main(solution: str, tests: list[str], test_timeout_s: float, total_s: float) -> None:
    """Print the secret and, as JSON, `""` for each test that passed and else the reason."""
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: tests read neither our memory nor our descriptors
    end = time.monotonic() + total_s
    reasons = [verdict(solution, test, min(test_timeout_s, end - time.monotonic())) for test in tests]
    print(sys.stdin.readline().strip() + json.dumps(reasons), flush=True)


def verdict(solution: str, test: str, timeout_s: float) -> str:
    if timeout_s <= 0:
        return "no time was left for it"
    token = os.urandom(16).hex()
    ours, theirs = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(ours)
        attempt(solution, test, theirs, token)
    os.close(theirs)
    answered = select.select([ours], [], [], timeout_s)[0]
    said = os.read(ours, 1000).decode(errors="replace") if answered else f"took longer than {timeout_s:.3g} s"
    os.close(ours)
    for kill in (os.killpg, os.kill):  # the group does not exist before its first act
        with suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "" if said == token else said or "its process ended before the test did"


def attempt(solution: str, test: str, answer: int, token: str) -> None:
    """Run both and answer with the token, or with what was raised; never returns."""
    write, leave, execute, raised = os.write, os._exit, exec, BaseException  # a solution may replace ours
    try:
        os.setsid()
        for descriptor, name in enumerate((os.devnull, "/tmp/output", "/tmp/output")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
        codes = [compile(solution, "solution.py", "exec"), compile(test, "test.py", "exec")]
        module = sys.modules["solution"] = types.ModuleType("solution")
        for code in codes:
            execute(code, module.__dict__)
    except raised as error:
        token = f"{type(error).__name__}: {error}"[:300]
    write(answer, token.encode(errors="replace"))
    leave(0)
