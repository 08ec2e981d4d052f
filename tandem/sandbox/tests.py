"""A solution and its tests -> which of them pass."""

import inspect
import json
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from tandem.sandbox import harness, proxies, wire
from tandem.sandbox.base import Sandbox


def run_tests(
    sandbox: Sandbox, solution: str, tests: Sequence[str], test_timeout_s: float = 10.0, preamble: str = ""
) -> tuple[list[str], str | None]:
    """For each test the reason why it failed, `""` if it passed; and what the run as a whole was stopped for.

    Each test is Python source that raises where the solution is wrong. It runs in a process of its own, in which the
    names of the solution stand for what the solution's process has (see `proxies.py`). The preamble runs before both.
    """
    secret = secrets.token_hex(16)
    task = {"preamble": preamble, "solution": solution, "tests": len(tests), "packages": sandbox.modules}
    times = {"test_timeout_s": test_timeout_s, "total_s": sandbox.limits.timeout_s - 1}
    run = sandbox.run(PROGRAM, "".join(map(wire.framed, [task | times, *tests, secret])))
    _, found, verdicts = run.stdout.rpartition(secret)
    if found and not run.stopped:
        return json.loads(verdicts), None
    stopped = run.stopped or f"ended with exit status {run.exit_code}: {run.stderr[-300:]}"
    return [f"the run {stopped}"] * len(tests), stopped


def run_programs(
    sandbox: Sandbox, program: str, inputs: Sequence[str], outputs: Sequence[str], test_timeout_s: float = 10.0
) -> list[str]:
    """For each input the reason why what the program prints for it is not the output, `""` where it is.

    Spaces within and around lines, and empty lines at the end, do not count. The outputs never enter the sandbox.
    """
    deadline = time.monotonic() + sandbox.limits.timeout_s
    reasons: list[str] = []
    for given, expected in zip(inputs, outputs, strict=True):
        timeout_s = min(test_timeout_s, deadline - time.monotonic())
        if timeout_s <= 0:
            reasons.append("no time was left for it")
            continue
        run = sandbox.run(program, given, timeout_s)
        if run.stopped or run.exit_code:
            reasons.append(run.stopped or f"ended with exit status {run.exit_code}: {run.stderr[-300:]}")
        else:
            reasons.append("" if _words(run.stdout) == _words(expected) else f"it printed {run.stdout[:100]!r}")
    return reasons


def call_test(function: str, arguments: Sequence[Any], expected: Any) -> str:
    """The test that a function, or a method of the class `Solution`, returns what equals `expected` as JSON.

    Arrays and numbers of numpy count as the lists and numbers in them.
    """
    given = json.dumps([list(arguments), expected])
    return f"""
import json, solution
def plain(value):
    if type(value).__module__ == "numpy":
        return value.tolist()
    raise TypeError(f"it returned a {{type(value).__name__}}, which is no data of JSON's")
try:
    function = solution.{function}
except AttributeError:
    function = solution.Solution().{function}
arguments, expected = json.loads({given!r})
result = json.loads(json.dumps(function(*arguments), default=plain))
assert result == expected, f"it returned {{result!r:.100}}"
"""


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


PROGRAM = (
    "\n".join(
        re.sub(r"^from tandem.*\n", "", inspect.getsource(module), flags=re.MULTILINE)
        for module in (wire, proxies, harness)
    )
    + "\nmain()\n"
)
"""One text, for in there is nothing of ours to import."""
