"""A solution and its tests -> which of them pass."""

import inspect
import json
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from tandem.sandbox import collected, harness, json_values, proxies
from tandem.sandbox.base import Sandbox

TOLERANCE = 1e-6
"""How far a number may be from one that is expected and has a fraction: of that number, or of 1 where it is smaller."""
_NUMBER = re.compile(r"[+-]?(\d{1,300}\.?\d{0,300}|\.\d{1,300})([eE][+-]?\d{1,3})?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d{1,300}", re.ASCII)


def run_tests(
    sandbox: Sandbox,
    solution: str,
    tests: Sequence[str],
    test_timeout_s: float = 10.0,
    preamble: str = "",
    modules: Sequence[str] = (),
) -> tuple[list[str], str | None]:
    """For each test the reason why it failed, `""` if it passed; and what the run as a whole was stopped for.

    Each test is Python source that raises where the solution is wrong. It runs in a process of its own, in which the
    names of the solution stand for what the solution's process has (see `proxies.py`). What pytest or unittest would
    call in it is called. The preamble runs before both. The solution has `modules`, and what is in them, without
    importing them.
    """
    secret = secrets.token_hex(16)
    task = {"preamble": preamble, "solution": solution, "tests": len(tests), "packages": sandbox.modules}
    times = {"test_timeout_s": test_timeout_s, "total_s": sandbox.limits.timeout_s - 1}
    whole = task | times | {"modules": modules}
    run = sandbox.run(PROGRAM, "".join(map(json_values.framed, [whole, *tests, secret])))
    _, found, verdicts = run.stdout.rpartition(secret)
    if found and not run.stopped:
        return json.loads(verdicts), None
    stopped = run.stopped or f"ended with exit status {run.exit_code}: {run.stderr[-300:]}"
    return [f"the run {stopped}"] * len(tests), stopped


def run_programs(
    sandbox: Sandbox, program: str, inputs: Sequence[str], outputs: Sequence[str], test_timeout_s: float = 10.0
) -> list[str]:
    """For each input the reason why what the program prints for it is not the output, `""` where it is.

    The last line of an input ends as the others do. What counts in outputs is in `same_output`; they never enter the
    sandbox.
    """
    deadline = time.monotonic() + sandbox.limits.timeout_s
    reasons: list[str] = []
    for given, expected in zip(inputs, outputs, strict=True):
        timeout_s = min(test_timeout_s, deadline - time.monotonic())
        if timeout_s <= 0:
            reasons.append("no time was left for it")
            continue
        run = sandbox.run(program, given if given.endswith("\n") or not given else given + "\n", timeout_s)
        if run.stopped or run.exit_code:
            reasons.append(run.stopped or f"ended with exit status {run.exit_code}: {run.stderr[-300:]}")
        else:
            reasons.append("" if same_output(run.stdout, expected) else f"it printed {run.stdout[:100]!r}")
    return reasons


def same_output(printed: str, expected: str) -> bool:
    """Whether both have the same words in the same lines; empty lines before and behind all others do not count.

    Numbers are the same by value: within TOLERANCE where the expected one is written with a point or an exponent, else
    exactly.
    """
    lines = [[line.split() for line in text.strip().splitlines()] for text in (printed, expected)]
    return [*map(len, lines[0])] == [*map(len, lines[1])] and all(
        _same_word(one, other) for pair in zip(*lines, strict=True) for one, other in zip(*pair, strict=True)
    )


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    whole = [_WHOLE.fullmatch(word) for word in (printed, expected)]
    if all(whole) or not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    number = float(printed)
    if whole[1]:
        return number == int(expected)
    return abs(number - float(expected)) <= TOLERANCE * max(1, abs(float(expected))) < float("inf")


def call_test(function: str, arguments: Sequence[Any], expected: Sequence[Any]) -> str:
    """The test that a function, or a method of the class `Solution`, returns what equals one of `expected` as JSON.

    Arrays and numbers of numpy count as the lists and numbers in them, numbers with a fraction within TOLERANCE. An
    argument whose keys are all whole numbers has them as such, since JSON has them as texts.
    """
    given = json.dumps([list(arguments), list(expected)])
    return f"""
import json, solution
def plain(value):
    if type(value).__module__ == "numpy":
        return value.tolist()
    raise TypeError(f"it returned a {{type(value).__name__}}, which is no data of JSON's")
def same(found, expected):
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict):
        return isinstance(found, dict) and found.keys() == expected.keys() and all(
            same(found[key], expected[key]) for key in expected
        )
    if isinstance(expected, float) and isinstance(found, (int, float)) and abs(expected) < float("inf"):
        return abs(found - expected) <= {TOLERANCE} * max(1, abs(expected))
    return found == expected
def whole(key):
    return len(key) < 19 and key.removeprefix("-").isdecimal() and str(int(key)) == key
def with_whole_keys(value):
    if isinstance(value, dict) and all(whole(key) for key in value):
        return {{int(key): item for key, item in value.items()}}
    return value
try:
    function = solution.{function}
except AttributeError:
    function = solution.Solution().{function}
arguments, expected = json.loads({given!r})
result = json.loads(json.dumps(function(*map(with_whole_keys, arguments)), default=plain))
assert any(same(result, value) for value in expected), f"it returned {{result!r:.100}}"
"""


PROGRAM = (
    "\n".join(
        re.sub(r"^from tandem.*\n", "", inspect.getsource(module), flags=re.MULTILINE)
        for module in (json_values, proxies, collected, harness)
    )
    + "\nmain()\n"
)
"""One text, for in there is nothing of ours to import."""
