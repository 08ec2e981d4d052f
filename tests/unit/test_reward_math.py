r"""MATH answers: pairs of equal and of unequal forms, and where the answer is found."""

import json
from pathlib import Path

import pytest

from tandem.config.tree import RewardConfig
from tandem.errors import UserError
from tandem.reward.functions import check_functions
from tandem.reward.rules.math import boxed, dapo, equal, last_boxed

PAIRS = Path(__file__).parent / "math_pairs.json"
"""Written by hand: fractions, intervals, sets, matrices, units, texts, percent, thousands separators, expressions."""
CASES = json.loads(PAIRS.read_text(encoding="utf-8"))


def test_there_are_enough_pairs() -> None:
    assert len(CASES["equal"]) >= 60 and len(CASES["unequal"]) >= 40


@pytest.mark.parametrize(("truth", "answer"), CASES["equal"])
def test_equal_forms(truth: str, answer: str) -> None:
    assert equal(truth, answer) and equal(answer, truth)


@pytest.mark.parametrize(("truth", "answer"), CASES["unequal"])
def test_unequal_forms(truth: str, answer: str) -> None:
    assert not equal(truth, answer) and not equal(answer, truth)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed 5$ and {more}", "5"),
        (r"\fbox{7}", "7"),
        (r"so \boxed 5", "5"),
        (r"so \boxed", ""),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{1", None),
        ("no box {1}", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def test_the_reward() -> None:
    assert boxed("math", r"It is $\boxed{\dfrac12}$.", r"\frac{1}{2}") == {"score": 1.0, "acc": 1.0, "pred": r"\frac12"}
    assert boxed("math", r"\boxed{0.5}", r"$\boxed{\frac{1}{2}}$")["score"] == 1.0
    assert boxed("math", r"It is \frac12.", r"\frac12") == {"score": 0.0, "acc": 0.0, "pred": None}
    assert boxed("math", r"<think>\boxed{1}</think> It is 1.", "1")["score"] == 0.0
    assert boxed("math", r"\boxed{}", "1")["score"] == 0.0
    with pytest.raises(ValueError, match="ground truth is empty"):
        boxed("math", r"\boxed{1}", " ")


def test_dapo_is_one_or_minus_one() -> None:
    assert dapo("math_dapo", "So.\nAnswer: 34", "34") == {"score": 1.0, "acc": 1.0, "pred": "34"}
    assert dapo("math_dapo", "Answer: 1\nAnswer: $\\boxed{34}$", 34)["score"] == 1.0
    assert dapo("math_dapo", "Answer: 35", "34") == {"score": -1.0, "acc": 0.0, "pred": "35"}
    assert dapo("math_dapo", "34", "34") == {"score": -1.0, "acc": 0.0, "pred": None}


def test_a_run_without_math_verify_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_functions(RewardConfig(), ["math"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"reward\.functions: the MATH reward needs math-verify"):
        check_functions(RewardConfig(), ["math"])
