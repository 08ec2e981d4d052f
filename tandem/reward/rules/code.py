"""Code with unit tests: does the program in the answer pass them, in a sandbox?"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tandem.reward.rules.own_words import Turns, own_words
from tandem.sandbox.make import make_sandbox
from tandem.sandbox.tests import call_test, run_programs, run_tests

_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


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

    `ground_truth` is one of these, or JSON of one:

    - tests: Python source, each raising where the solution is wrong; or {tests, preamble}, the preamble being what runs
      before the solution.
    - {inputs, outputs}: what the program reads from its standard input, and prints for it.
    - {inputs, outputs, fn_name}: arguments of a function or of a method of `Solution`, and what it returns; with a
      preamble, too.

    `sandbox` are arguments of `make_sandbox`.
    """
    truth = _truth(ground_truth)
    runs_in, stopped = make_sandbox(**sandbox), None
    solution = extract_code(own_words(solution_str, turns))
    if "tests" in truth:
        reasons, stopped = run_tests(runs_in, solution, truth["tests"], test_timeout_s, truth.get("preamble") or "")
    else:
        reasons = run_programs(runs_in, solution, truth["inputs"], truth["outputs"], test_timeout_s)
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


def _truth(ground_truth: Any) -> Mapping[str, Any]:
    """{tests, preamble}, or {inputs, outputs} of a program. Raises ValueError for anything else."""
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    truth = truth if isinstance(truth, Mapping) else {"tests": truth}
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if inputs and outputs and len(inputs) == len(outputs):
        if not (function := truth.get("fn_name")):
            return truth
        pairs = zip(inputs, outputs, strict=True)
        tests = [call_test(function, arguments, expected) for arguments, expected in pairs]
        truth = {"tests": tests, "preamble": truth.get("preamble")}
    if not truth.get("tests") or isinstance(truth["tests"], str):
        raise ValueError(
            f"the ground truth {ground_truth!r:.200} holds no list of tests, nor inputs and as many outputs"
        )
    return truth


def check(*, partial: bool = False, test_timeout_s: float = 10.0, **sandbox: Any) -> None:
    """Before a run: raises UserError where there is no sandbox."""
    make_sandbox(**sandbox)


def extract_code(text: str) -> str:
    """The last fenced block after the reasoning, also one that was cut off; without any, the whole text."""
    answer = text.rpartition("</think>")[2]
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer
