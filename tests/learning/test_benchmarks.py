"""Published benchmarks: rows as published -> `tandem data` -> the protocol's scorer and recipe, on a tiny model."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tandem.cli import main
from tandem.data.preprocess import CONVERTERS
from tandem.data.preprocess.convert import Place
from tandem.data.rows import BadRow
from tandem.errors import UserError
from tandem.reward.rules import BUILT_IN
from tandem.reward.rules.ifeval import check
from tandem.sandbox.build import make_sandbox
from tests.conftest import ROOT, load_file

HARNESS = ROOT / ".venv-lm-eval/bin/python"
CHECK = (
    "import numpy as np\n\ndef check(candidate):\n"
    "    for given, expected in zip([[[1, 2]], [[]], [[-3]]], [[2, 4], [], [-6]]):\n"
    "        assert np.array_equal(candidate(*given), expected)\n"
)
PUBLISHED: dict[str, dict[str, Any]] = {
    "aime": {"ID": "2024-II-4", "Problem": "What is 70 + 3?", "Solution": "It is 73.", "Answer": "073"},
    "math500": {
        "problem": "Convert $(0,3)$ to polar coordinates.",
        "solution": r"So $r = 3$, and it is $\boxed{\left( 3, \frac{\pi}{2} \right)}$.",
        "answer": r"\left( 3, \frac{\pi}{2} \right)",
        "subject": "Precalculus",
        "level": 2,
    },
    "gsm8k": {"question": "Ann has 1,000 apples and buys 5. How many has she?", "answer": "1000 + 5.\n#### 1,005"},
    "humanevalplus": {
        "task_id": "HumanEval/0",
        "prompt": 'from typing import List\n\n\ndef double(xs: List[int]) -> List[int]:\n    """Twice each."""\n',
        "entry_point": "double",
        "canonical_solution": "    return [2 * x for x in xs]\n",
        "test": CHECK,
    },
    "mbppplus": {
        "task_id": 2,
        "prompt": "Write a function to double each number.",
        "code": "def double(xs):\n    return [2 * x for x in xs]",
        "test_imports": ["import math"],
        "test_list": ["assert double([1, 2]) == [2, 4]"],
        "test": f"{CHECK}\ncheck(double)\nassert math.pi > 3",
    },
    "ifeval": {
        "key": 1000,
        "prompt": "Describe Rome in at least 3 words without commas.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None, "relation": None}, {"num_words": 3, "relation": "at least"}],
    },
}
DOUBLES = "def double(xs):\n    return [2 * x for x in xs]"
ANSWERS: dict[str, list[tuple[str, float]]] = {
    "aime": [
        (r"So \boxed{073}.", 1),
        (r"\boxed{72}. No: \boxed{73}", 1),
        (r"<think>\boxed{72}</think>\boxed{ 73 }", 1),
        (r"<think>\boxed{73}</think>It is 73.", 0),
        (r"\boxed{73} or \boxed{74}", 0),
        (r"\boxed{730}", 0),
    ],
    "math500": [
        (r"\boxed{(3,\frac{\pi}{2})}", 1),
        (r"\boxed{\left(3, \pi/2\right)}", 1),
        (r"\boxed{(\frac{\pi}{2},3)}", 0),
        (r"\boxed{3,\frac{\pi}{2}", 0),
    ],
    "gsm8k": [("#### 1005", 1), ("#### 1,005.00", 1), ("#### $1005", 1), ("1005", 0), ("#### 1005\n#### 5", 0)],
    "humanevalplus": [
        (f"Here:\n```python\n{DOUBLES}\n```\nDone.", 1),
        (f"```python\nimport nothing\n```\nRather:\n```python\n{DOUBLES}\n```", 1),
        (f"```python\n{DOUBLES}", 1),
        ("```python\ndef double(xs: List[int]):\n    return [2 * x for x in xs]\n```", 0),
        ("```python\ndef double(xs):\n    return [2 * x for x in xs] or None\n```", 0),
        ("```python\ndef double(xs):\n    return [abs(2 * x) for x in xs]\n```", 0),
        ("```python\nimport sys\nsys.exit(0)\n```", 0),
    ],
    "mbppplus": [(f"```python\n{DOUBLES}\n```", 1), ("```python\ndef double(xs):\n    return [2, 4]\n```", 0)],
}
"""By benchmark: answers, and whether they are right."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny = load_file(ROOT / "examples/hh/tiny.py")
    tiny.__dict__["POSITIONS"] = 4096
    tiny.write_model(directory, ["2+3? 5"], tokens=300, width=64)
    return directory


def made(name: str, **changed: Any) -> dict[str, Any]:
    """The row of the published one."""
    ((split, row),) = CONVERTERS[name]({**PUBLISHED[name], **changed}, Place("test", 0))
    assert split == "test"
    return row


def score(row: dict[str, Any], answer: str) -> dict[str, Any]:
    module, _, function = BUILT_IN[row["data_source"]].partition(":")
    rule = getattr(importlib.import_module(module), function)
    verdict: dict[str, Any] = rule(row["data_source"], answer, row["reward_model"]["ground_truth"])
    return verdict


def needs_a_sandbox(name: str) -> None:
    if name in ("humanevalplus", "mbppplus"):
        try:
            make_sandbox()
        except UserError as error:
            pytest.skip(f"no sandbox on this machine: {error}")


@pytest.mark.parametrize("name", ANSWERS)
def test_right_and_wrong_answers_are_told_apart(name: str) -> None:
    needs_a_sandbox(name)
    row = made(name)
    told = [row["extra_info"]["answer"], *(answer for answer, _ in ANSWERS[name])]
    assert [score(row, answer)["acc"] for answer in told] == [1, *(right for _, right in ANSWERS[name])]


def test_questions_are_those_of_the_protocols() -> None:
    asked = {name: made(name)["prompt"][0]["content"] for name in PUBLISHED}
    assert asked["aime"] == ("What is 70 + 3?\nPlease reason step by step, and put your final answer within \\boxed{}.")
    assert asked["humanevalplus"].endswith('markdown code block:\n```\nfrom typing import List\n\n\n'
        'def double(xs: List[int]) -> List[int]:\n    """Twice each."""\n```')  # fmt: skip
    assert asked["mbppplus"].endswith(
        '```\n"""\nWrite a function to double each number.\nassert double([1, 2]) == [2, 4]\n"""\n```'
    )
    assert asked["ifeval"] == PUBLISHED["ifeval"]["prompt"]


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("aime", {"Answer": "1000"}, "no number from 0 to 999: '1000'"),
        ("aime", {"Answer": None}, "no number from 0 to 999: ''"),
        ("mbppplus", {"test_list": []}, "`test_list` is empty"),
        ("ifeval", {"kwargs": [{}]}, "2 instructions in `instruction_id_list`, and 1 in `kwargs`"),
    ],
)
def test_rows_that_are_not_as_published_are_refused(name: str, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRow, match=told):
        made(name, **changed)


def evaluation(name: str, model: Path, tmp_path: Path) -> list[str]:
    """Arguments of `tandem eval` for the benchmark's recipe, on rows that `tandem data` made of two published ones."""
    published = "\n".join([json.dumps(PUBLISHED[name])] * 2)
    (tmp_path / "test.jsonl").write_text(published + "\n")
    assert main(["data", name, "--in", str(tmp_path / "test.jsonl"), "--out", str(tmp_path / "data")]) == 0
    assert pq.read_metadata(tmp_path / "data/test.parquet").num_rows == 2
    return [
        "eval", f"{ROOT}/recipes/eval_{name}.yaml", f"model.path={model}", "model.dtype=float32",
        f"data.val_files=[{tmp_path}/data/test.parquet]", "generation.max_response_tokens=8",
        "--out", str(tmp_path / "found.json"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_recipe_evaluates_a_model(name: str, model: Path, tmp_path: Path) -> None:
    needs_a_sandbox(name)
    assert main(evaluation(name, model, tmp_path)) == 0
    ((_, found),) = json.loads((tmp_path / "found.json").read_text())["data"].items()
    answers = 32 if name == "aime" else 1
    assert (found["prompts"], found["answers"], found["unscored"]) == (2, 2 * answers, 0)
    assert found["metrics"]["acc/mean"]["value"] == 0
    assert ("acc/best@32" in found["metrics"]) == (name == "aime")


def test_several_benchmarks_are_one_command_and_one_table(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = []
    for name in ("aime", "math500", "gsm8k"):
        (tmp_path / name).mkdir()
        evaluation(name, model, tmp_path / name)
        sets += [f"data.val_sets.{name}.files=[{tmp_path}/{name}/data/test.parquet]"]
        sets += [f"data.val_sets.{name}.max_response_tokens=8"]
    answers = ["--answers", str(tmp_path / "answers.parquet")]
    command = [
        "eval", f"{ROOT}/recipes/eval_math.yaml", f"model.path={model}", "model.dtype=float32",
        "generation.max_response_tokens=8", "data.val_sets.aime.samples=4", *sets,
    ]  # fmt: skip
    assert main([*command, *answers]) == 0
    *_, head, aime, math500, gsm8k = capsys.readouterr().out.splitlines()
    assert head.split() == ["prompts", "answers", "mean", "of", "95%", "interval", "best", "majority"]
    assert aime.split()[:5] == ["aime/aime", "2", "8", "acc", "0.0000"] and "best@4 0.0000" in aime
    assert math500.split()[:4] == ["math500/HuggingFaceH4/MATH-500", "2", "2", "acc"]
    assert gsm8k.split()[:4] == ["gsm8k/openai/gsm8k", "2", "2", "acc"]
    assert len({line.index(end) for line, end in ((head, "mean of"), (aime, "    acc"), (gsm8k, "    acc"))}) == 1

    assert main([*command, "--against", answers[1]]) == 0
    *_, head, aime, math500, gsm8k = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["difference", "p"]
    assert all(line.split()[-2:] == ["+0.0000", "1.0000"] for line in (aime, math500, gsm8k))


SCORES = """
import json, sys
from tandem.reward.rules.ifeval import check, strict
check()
answers = ["Rome is old.", "Rome, old and large.", "Rome, yes:\\nRome is old.", "", "<think>a, b</think>Rome is old."]
for answer in answers:
    print(json.dumps(strict("google/IFEval", answer, sys.argv[1])))
"""


def in_harness(directory: Path, *arguments: str) -> str:
    """What it prints in the environment that has lm-evaluation-harness."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "NLTK_DATA": str(directory)}
    ended = subprocess.run(
        [str(HARNESS), *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.skipif(not HARNESS.exists(), reason="no lm-evaluation-harness; scripts/lm-eval-env installs it")
def test_instructions_are_checked_by_their_authors_checks(tmp_path: Path) -> None:
    printed = in_harness(tmp_path, "-c", SCORES, made("ifeval")["reward_model"]["ground_truth"]).splitlines()
    right, comma, loosely, empty, thought = (json.loads(line) for line in printed if line.startswith("{"))
    assert right == thought == {"score": 1, "acc": 1, "loose": 1, "instructions": 1, "instructions_loose": 1}
    assert (comma["acc"], comma["instructions"], comma["loose"]) == (0, 0.5, 0)
    assert (loosely["acc"], loosely["loose"]) == (0, 1), "without its first line it is right"
    assert (empty["acc"], empty["instructions"]) == (0, 0)


@pytest.mark.nightly
@pytest.mark.skipif(not HARNESS.exists(), reason="no lm-evaluation-harness; scripts/lm-eval-env installs it")
def test_instructions_are_checked_in_an_evaluation(model: Path, tmp_path: Path) -> None:
    in_harness(tmp_path, "-m", "tandem", *evaluation("ifeval", model, tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())["data"]["google/IFEval"]
    assert (found["answers"], found["unscored"]) == (2, 0)


def test_where_the_checks_of_instructions_are_missing_the_mend_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"the IFEval reward needs lm-evaluation-harness; pip install -e '.\[ifeval\]'"):
        check()
