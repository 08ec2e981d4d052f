"""Code with unit tests: does the program in the answer pass them, in a sandbox?"""

import re
from collections.abc import Iterator
from typing import Any

from tandem.reward.rules.code_blocks import extract_code
from tandem.reward.rules.code_checks import require_modules
from tandem.reward.rules.code_truth import CallTests, ProgramTests, SourceTests, read_tests
from tandem.reward.rules.own_words import Turns, own_words
from tandem.sandbox.build import make_sandbox
from tandem.sandbox.harness import ASKED_NOTHING
from tandem.sandbox.local import LocalSandbox
from tandem.sandbox.tests import call_test, run_programs, run_tests

LEETCODE_MODULES = (
    *("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
"""What LeetCode gives a solution unasked, with all that is in them."""
_SOLUTION_CLASS = re.compile(r"^class Solution\b", re.MULTILINE)


def unit_tests(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    turns: Turns = (),
    *,
    partial: bool = False,
    test_timeout_s: float = 10.0,
    **sandbox: Any,
) -> dict[str, Any]:
    """1 when every test passes, else 0 (`partial`: the share that passes), with the first failure as the reason.

    `ground_truth` is one of these, or JSON of one; `code_truth.py` reads what data sets call otherwise:

    - tests: Python source, each raising where the solution is wrong; or {tests, preamble}, the preamble being what runs
      before the solution.
    - {inputs, outputs}: what the program reads from its standard input, and prints for it.
    - {inputs, outputs, fn_name}: arguments of a function or of a method of `Solution`, and what it returns; with a
      preamble, too.

    `sandbox` are arguments of `make_sandbox`. Raises ValueError where the ground truth tests nothing.
    """
    tests = read_tests(ground_truth)
    runs_in, stopped = make_sandbox(**sandbox), None
    solution = extract_code(own_words(solution_str, turns))
    if isinstance(tests, SourceTests) and isinstance(runs_in, LocalSandbox):
        require_modules(tests.tests, tests.preamble, runs_in.modules)
    if isinstance(tests, ProgramTests):
        reasons = run_programs(runs_in, solution, tests.inputs, tests.outputs, test_timeout_s)
    else:
        calls = isinstance(tests, CallTests)
        modules = LEETCODE_MODULES if calls or _SOLUTION_CLASS.search(solution) else ()
        sources = list(_call_tests(tests)) if calls else tests.tests
        reasons, stopped = run_tests(runs_in, solution, sources, test_timeout_s, tests.preamble, modules)
    if ASKED_NOTHING in reasons:
        number = reasons.index(ASKED_NOTHING) + 1
        raise ValueError(f"test {number} of the ground truth tests nothing: {ASKED_NOTHING}: {ground_truth!r:.200}")
    passed = reasons.count("") / len(reasons)
    return {
        "score": passed if partial else float(passed == 1),
        "acc": float(passed == 1),
        "tests_passed": passed,
        "stopped": float(stopped is not None),
        "reason": next((f"test {i + 1} failed: {reason}" for i, reason in enumerate(reasons) if reason), None),
    }


def evalplus(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    turns: Turns = (),
    *,
    test_timeout_s: float = 20.0,
    **sandbox: Any,
) -> dict[str, Any]:
    """`unit_tests` for HumanEval+ and MBPP+ (Liu et al. 2023, arXiv:2305.01210): a test has up to thousands of inputs,
    and imports numpy."""
    if "sandbox_fusion_url" not in sandbox:
        sandbox = {"packages": ["numpy"], **sandbox}
    return unit_tests(
        data_source, solution_str, ground_truth, extra_info, turns, test_timeout_s=test_timeout_s, **sandbox
    )


def check(*, partial: bool = False, test_timeout_s: float = 10.0, **sandbox: Any) -> None:
    """Before a run: raises UserError where there is no sandbox."""
    make_sandbox(**sandbox)


def _call_tests(tests: CallTests) -> Iterator[str]:
    for arguments, expected in zip(tests.arguments, tests.expected, strict=True):
        yield call_test(tests.function, arguments, expected)
