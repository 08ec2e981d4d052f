"""Code with unit tests: does the program in the answer pass them, in a sandbox?"""

import re
from collections.abc import Mapping
from typing import Any

from tandem.reward.sandbox.tests import make_sandbox, run_tests

_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def unit_tests(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    partial: bool = False,
    test_timeout_s: float = 10.0,
    **sandbox: Any,
) -> dict[str, Any]:
    """1 when every test passes, else 0 (`partial`: the share that passes), with the first failure as the reason.

    `ground_truth`: tests in Python, each run in the solution's namespace after it, or {tests, preamble}, the preamble
    being what the solution needs before it. `sandbox`: arguments of `make_sandbox`.
    """
    truth = ground_truth if isinstance(ground_truth, Mapping) else {"tests": ground_truth}
    if not truth["tests"] or isinstance(truth["tests"], str):
        raise ValueError(f"the ground truth {ground_truth!r:.200} is not a list of tests")
    preamble, solution = truth.get("preamble") or "", extract_code(solution_str)
    reasons, stopped = run_tests(make_sandbox(**sandbox), solution, truth["tests"], test_timeout_s, preamble)
    passed = reasons.count("") / len(reasons)
    return {
        "score": passed if partial else float(passed == 1),
        "acc": float(passed == 1),
        "tests_passed": passed,
        "stopped": float(stopped is not None),
        "reason": next((f"test {i + 1} failed: {reason}" for i, reason in enumerate(reasons) if reason), None),
    }


def check(*, partial: bool = False, test_timeout_s: float = 10.0, **sandbox: Any) -> None:
    """Before a run: raises UserError where there is no sandbox."""
    make_sandbox(**sandbox)


def extract_code(text: str) -> str:
    """The last fenced block after the reasoning, also one that was cut off; without any, the whole text."""
    answer = text.rpartition("</think>")[2]
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer
