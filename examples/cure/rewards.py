"""Coder and tester, both rewarded from who passes what (CURE: Wang et al. 2025, arXiv:2506.03136, section 3).

All programs of a problem run against its own tests and against all tests that the model wrote in the same step. With
`B[j, k]` = 1 where program j passes written test k, and `I[j]` = 1 where it passes all of the problem's own tests:

    program j:  the share of the problem's own tests that it passes
    test k:     - sum_j (1 - I[j]) B[j, k]  +  (prod over j with I[j] = 1 of B[j, k]) * sum_j (1 - I[j])

So a test earns a point for every wrong program that it catches, provided that no right program fails it; a test that
right programs fail loses a point for every wrong program that it lets pass.
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tandem.reward.rules.code_blocks import extract_code
from tandem.sandbox.build import make_sandbox
from tandem.sandbox.tests import run_tests


def cure(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    ground_truth: Sequence[Mapping[str, Any]],
    extra_info: Sequence[Mapping[str, Any]],
    *,
    test_timeout_s: float = 2.0,
    sandbox: Mapping[str, Any] | None = None,
) -> list[dict[str, float] | None]:
    """Rewards of one problem's answers, of coder and tester alike (`extra_info.role`).

    None, not applicable, for tests where no program is right: then nobody knows which tests are. `sandbox`: arguments
    of `make_sandbox`.
    """
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    coders = [i for i, extra in enumerate(extra_info) if extra["role"] == "coder"]
    testers = [i for i, extra in enumerate(extra_info) if extra["role"] == "tester"]
    own = list(ground_truth[0]["tests"])
    tests = [single_assert(texts[i]) for i in testers]
    runs_in = make_sandbox(**sandbox or {})
    passed = np.zeros((len(coders), len(own) + len(tests)))
    for row, i in enumerate(coders):
        every = own + [test or "assert False" for test in tests]
        reasons, _ = run_tests(runs_in, extract_code(texts[i]), every, test_timeout_s, ground_truth[0]["preamble"])
        passed[row] = [reason == "" for reason in reasons]
    right = passed[:, : len(own)].all(axis=1)
    rewards: list[dict[str, float] | None] = [None] * len(texts)
    for row, i in enumerate(coders):
        rewards[i] = {"score": float(passed[row, : len(own)].mean()), "acc": float(right[row])}
    for column, i in enumerate(testers if right.any() else []):
        score = test_reward(passed[:, len(own) + column], right)
        sound = float(passed[right, len(own) + column].all())
        rewards[i] = {"score": score, "tester_sound": sound, "tester_valid": float(tests[column] is not None)}
    return rewards


def test_reward(passed: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    """Of one written test: `passed` and `right` have one entry a program."""
    wrong = ~right
    return float(passed[right].all() * wrong.sum() - passed[wrong].sum())


def single_assert(text: str) -> str | None:
    """The test in an answer; None where it is no single assert statement that calls something."""
    code = extract_code(text).strip()
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = len(statements) == 1 and any(isinstance(node, ast.Call) for node in ast.walk(statements[0]))
    return code if calls and isinstance(statements[0], ast.Assert) else None
