"""CURE: programs and tests rewarded from the execution matrix, by hand and through a run."""

from typing import Any

import numpy as np
import pytest

from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tandem.reward.manager import RewardManager
from tandem.types import Prompt, Status, Trajectory
from tests.conftest import ROOT, load_file
from tests.sandboxes import sandboxed

rewards = load_file(ROOT / "examples/cure/rewards.py")
prepare = load_file(ROOT / "examples/cure/prepare.py")

OWN = ["assert f(1) == 2", "assert f(2) == 3"]
PROGRAMS = ["def f(x): return x + 1", "def f(x): return 1 + x", "def f(x): return 2", "def f(x): return -1"]
TESTS = {
    "assert f(5) == 6": 2.0,  # right programs pass, both wrong ones fail
    "assert f(1) == 2": 1.0,  # one wrong program passes too: 2 - 1
    "assert f(0) is not None": 0.0,  # all pass: 2 - 2
    "assert f(5) == 7": 0.0,  # right programs fail, wrong ones too
    "assert f(5) in (2, -1)": -2.0,  # right programs fail, wrong ones pass
    "f(1)": 0.0,  # no assert: nobody passes
}


@pytest.mark.parametrize(
    ("passed", "expected"), [("1100", 2.0), ("1110", 1.0), ("1111", 0.0), ("0000", 0.0), ("1011", -2.0), ("0010", -1.0)]
)
def test_the_reward_of_a_test(passed: str, expected: float) -> None:
    right = np.array([True, True, False, False])
    assert rewards.test_reward(np.array([int(p) for p in passed]), right) == expected


@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("```python\nassert f(1) == 2\n```", "assert f(1) == 2"),
        ("assert f(1) == 2", "assert f(1) == 2"),
        ("```python\nassert True\n```", None),
        ("```python\nassert f(1)\nassert f(2)\n```", None),
        ("```python\nimport os; os._exit(0)\n```", None),
        ("I test it.", None),
    ],
)
def test_a_test_is_one_assert(text: str, test: str | None) -> None:
    assert rewards.single_assert(text) == test


def siblings(role: str, texts: list[str], index: int) -> list[Trajectory]:
    none = np.zeros(0, np.int32)
    row: dict[str, Any] = {"extra_info": {"problem": 7, "role": role}}
    prompt = Prompt(index, none, "", "mbpp_cure", {"preamble": "", "tests": OWN}, row)
    mask, logprobs = none.astype(np.bool_), none.astype(np.float32)
    return [Trajectory(prompt, i, none, mask, logprobs, none, text, Status.COMPLETED) for i, text in enumerate(texts)]


@sandboxed
def test_both_are_rewarded_from_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the recipe's paths start
    config = load_config(TrainConfig, ROOT / "recipes/mbpp_cure.yaml", ["reward.workers=1"]).reward
    manager = RewardManager(config)
    blocks = [f"```python\n{test}\n```" for test in TESTS]
    try:
        coder, tester = manager.score([siblings("coder", PROGRAMS, 0), siblings("tester", blocks, 1)])
        nobody, unknown = manager.score([siblings("coder", PROGRAMS[2:], 0), siblings("tester", blocks[:2], 1)])
    finally:
        manager.close()
    assert [s.value for s in coder.scores] == [1.0, 1.0, 0.5, 0.0]
    assert [s.parts["acc"] for s in coder.scores] == [1.0, 1.0, 0.0, 0.0]
    assert [s.value for s in tester.scores] == list(TESTS.values())
    assert [s.parts["tester_sound"] for s in tester.scores] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert [s.value for s in nobody.scores] == [0.5, 0.0]
    assert {s.failure for s in unknown.scores} == {Status.NOT_SCORED}


def test_a_problem_becomes_two_rows_side_by_side() -> None:
    truth = {"preamble": "", "tests": OWN}
    problem = {
        "data_source": "mbpp", "prompt": [], "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 601, "question": "Add one.", "answer": "…", "split": "train"},
    }  # fmt: skip
    coder, tester = prepare.rows_of(problem)
    assert [row["extra_info"]["role"] for row in (coder, tester)] == ["coder", "tester"]
    assert [row["extra_info"]["problem"] for row in (coder, tester)] == [601, 601]
    asked = [row["prompt"][0]["content"] for row in (coder, tester)]
    assert all(OWN[0] in content and OWN[1] not in content for content in asked)
