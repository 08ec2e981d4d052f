"""`tandem reward test`: what it makes of good and of bad reward functions."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.cli import main
from tandem.config.reward import RewardConfig
from tandem.reward.bench import answers, examine, mutated
from tandem.types import Prompt
from tests.sandboxes import sandboxed

DATA = Path(__file__).parents[3] / "shared" / "data"
MEASURED = [r"So $\boxed{1,500}$.", "x\n#### -7.5", r"\boxed{x^2}", "#### 7 of them"]
FUNCTIONS = """
import time
def naive(completion, ground_truth):
    return float(ground_truth in completion)
def touchy(completion, ground_truth):
    return float(completion.split()[-1] == ground_truth)
def slow(completion, ground_truth):
    if len(completion) > 1000000:
        time.sleep(60)
    return completion.strip().endswith(ground_truth)
def generous(completion, bonus):
    return bonus
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def rows(file: Path) -> Path:
    path = file.with_name("rows.jsonl")
    given = [{"prompt": f"{i}+{i}?", "ground_truth": str(2 * i), "completion": f"It is {2 * i}"} for i in (600, 700)]
    path.write_text("\n".join(map(json.dumps, given)))
    return path


@pytest.mark.parametrize(
    ("golden", "changed"),
    [
        ("<<1+1=2>>2\n#### 1,234", "<<1+1=2>>2\n#### 2,234"),
        ("The answer is (A).", "The answer is (B)."),
        ("The answer is (D).", "The answer is (A)."),
        ("```python\ndef f(): return 1\n```", "```python\ndef f(): return None and 1\n```"),
        ("```python\nprint(int(input()) + 1)\n```", "```python\nprint(None, int(input()) + 1)\n```"),
        ("def f(): return 1", "def f(): return None and 1"),
        ("```python\nx = 1\n```", None),
        ("from 3 and 4 it is\n#### 7", "from 3 and 4 it is\n#### 8"),
        (r"\boxed{\frac{9}{2}}", r"\boxed{\frac{9}{3}}"),
        ("no number", None),
    ],
)
def test_a_changed_answer_has_another_outcome(golden: str, changed: str | None) -> None:
    assert mutated(golden) == changed


def test_kinds_of_answers() -> None:
    kinds = {kind: (right, text) for kind, right, text in answers("so 1200", "so 7")}
    assert kinds["thousands separators"] == (True, "so 1,200")
    assert "with a unit" not in kinds
    assert kinds["right answer, then another"][0] is False and kinds["right answer, then another"][1].endswith("so 7")
    assert len(kinds["two megabytes of noise"][1]) >= 2_000_000
    assert "answer to another row" not in {kind for kind, _, _ in answers("so 1200", None)}
    latex = {kind: text for kind, _, text in answers(r"\boxed{(\frac{1}{2},3)}", None)}
    measured = [dict((kind, text) for kind, _, text in answers(a, None)).get("with a unit") for a in MEASURED]
    assert measured == [r"So $\boxed{1,500\text{ cm}}$.", "x\n#### -7.5 cm", None, None]
    assert latex["LaTeX spelled otherwise"] == r"\boxed{\left(\dfrac{1}{2},3\right)}"


def test_mistakes_are_counted_by_kind(file: Path) -> None:
    prompts = [Prompt(i, np.zeros(0, np.int32), "", "default", str(i), {}) for i in (1200, 1400)]
    config = RewardConfig(functions=[f"{file}:naive"], workers=1)
    lines = {line.kind: line for line in examine(config, prompts, ["It is 1200", "It is 1400"], pass_above=0.5)}
    wrong = {kind: line.mistakes for kind, line in lines.items() if line.mistakes}
    assert wrong == {"thousands separators": 2, "right answer, then another": 2, "only in the reasoning": 2}
    assert (
        "row 1200" in lines["only in the reasoning"].examples[0]
        and "reward 1" in lines["only in the reasoning"].examples[0]
    )


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """Lines of the report by what stands before the colon; of the table, by the first column."""
    assert main(["reward", "test", *arguments]) == 0
    printed = capsys.readouterr().out.splitlines()
    sums = dict(line.split(": ", 1) for line in printed if ": " in line)
    return {**{line[:32].strip(): line[32:] for line in printed if line[32:36] in ("pass", "fail")}, **sums}


def test_the_command_reports(file: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = report(capsys, f"{file}:touchy", "--data", str(rows))
    assert (counts["exceptions"], counts["time-outs"]) == ("4", "0")  # nothing to split in the empty one and in spaces
    assert counts["empty"].startswith("row 1: ") and "IndexError" in counts["empty"]
    counts = report(capsys, f"{file}:slow", "--data", str(rows), "--timeout-s", "0.5")
    assert (counts["time-outs"], counts["false positives"], counts["false negatives"]) == ("2", "0", "2")
    counts = report(capsys, f"{file}:generous", "--data", str(rows), "--argument", "bonus=0.4", "--pass-above", "0.3")
    assert int(counts["false positives"]) >= 14 and counts["false negatives"] == "0"


def test_answers_without_acc_are_counted(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They pass by their reward, the others by `acc`: whoever reads the counts must know."""
    file = tmp_path / "some.py"
    file.write_text("def f(completion):\n    return {'score': 0.0, **({'acc': 0.0} if completion.strip() else {})}\n")
    assert main(["reward", "test", f"{file}:f", "--data", str(rows)]) == 0
    assert re.search(
        r"^4 of \d+ scored answers have no acc: these pass by their reward$", capsys.readouterr().out, re.M
    )
    file.write_text("def f(completion):\n    return {'score': 0.0, 'acc': 0.0}\n")
    assert main(["reward", "test", f"{file}:f", "--data", str(rows)]) == 0
    assert "have no acc" not in capsys.readouterr().out


def test_mistakes_of_the_user(file: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward", "test", "gsm8k", "--data", str(rows)]) == 2
    assert "or built-in, for the reward that Tandem has" in capsys.readouterr().err
    assert main(["reward", "test", f"{file}:nothing", "--data", str(rows)]) == 2
    assert main(["reward", "test", "built-in", "--data", str(rows)]) == 2
    (tmp_path / "bare.jsonl").write_text('{"prompt": "x", "ground_truth": "1"}')
    assert main(["reward", "test", f"{file}:naive", "--data", str(tmp_path / "bare.jsonl")]) == 2
    counts = capsys.readouterr().err
    assert "has no function 'nothing'" in counts and "no built-in reward for data_source ['default']" in counts
    assert "bare.jsonl, row 1: it has no right answer in full" in counts
    assert "name its column with --answer (of prompt, ground_truth)" in counts


def test_right_answers_stand_in_the_column_that_is_named(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare.jsonl").write_text('{"prompt": "x", "ground_truth": "It is 1"}')
    counts = report(capsys, f"{file}:naive", "--data", str(tmp_path / "bare.jsonl"), "--answer", "ground_truth")
    assert counts["false negatives"] == "0"
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text('{"prompt": "x", "ground_truth": "1", "extra_info": {"said": "It is 1", "number": 1}}')
    counts = report(capsys, f"{file}:naive", "--data", str(numbers), "--answer", "extra_info.said")
    assert counts["false negatives"] == "0"
    assert main(["reward", "test", f"{file}:naive", "--data", str(numbers), "--answer", "extra_info.number"]) == 2
    assert "--answer extra_info.number: a right answer is text, not 1" in capsys.readouterr().err


CODE: list[dict[str, Any]] = [
    {
        "ground_truth": json.dumps({"inputs": [["2", "1 2"]], "outputs": [["1.5"]]}),
        "solution": "```python\nn = int(input())\nprint(sum(map(int, input().split())) / n)\n```",
    },
    {
        "ground_truth": json.dumps({"fn_name": "f", "inputs": ["[1, 2]\n3"], "outputs": ["6"]}),
        "solution": "```python\nclass Solution:\n    def f(self, a: List[int], b): return sum(a) + b\n```",
    },
]


@sandboxed
@pytest.mark.parametrize("row", CODE)
def test_the_code_reward_makes_no_mistake(
    row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.jsonl").write_text(json.dumps({"prompt": "x", **row}))
    counts = report(capsys, "tandem.reward.rules.code:unit_tests", "--data", str(tmp_path / "code.jsonl"))
    sums = [counts[what] for what in ("false positives", "false negatives", "exceptions", "time-outs")]
    assert sums == ["0", "0", "0", "0"]
    kinds = {kind: right for kind, right, _ in answers(row["solution"], None)}
    assert kinds["program that ends at once"] is False and kinds["its output behind the program"] is True


@sandboxed
def test_tests_that_test_nothing_are_errors_with_their_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = {"prompt": "x", "ground_truth": {"inputs": [""], "outputs": [""]}, "solution": "print()"}
    (tmp_path / "code.jsonl").write_text(json.dumps(empty))
    counts = report(capsys, "tandem.reward.rules.code:unit_tests", "--data", str(tmp_path / "code.jsonl"))
    assert (counts["false positives"], counts["false negatives"]) == ("0", "0") and int(counts["exceptions"]) >= 9
    assert (
        counts["reference answer"].startswith("row 1: ")
        and "every expected output is empty" in counts["reference answer"]
    )


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the published files are not in {DATA}")
@pytest.mark.parametrize(("name", "file_name"), [("gsm8k", "gsm8k/test.jsonl"), ("aqua", "aqua_rat/dev.jsonl")])
def test_built_in_rewards_make_no_mistake(
    name: str, file_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", name, "--in", str(DATA / file_name), "--out", str(tmp_path)]) == 0
    (parquet,) = tmp_path.glob("*.parquet")
    counts = report(capsys, "built-in", "--data", str(parquet), "--rows", "20")
    sums = [counts[what] for what in ("false positives", "false negatives", "exceptions", "time-outs")]
    assert sums == ["0", "0", "0", "0"]


def test_the_math_reward_makes_no_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boxed = [r"\frac{3}{4}", "12", r"(1,\frac{5}{2})", r"x^2+3", "1500", r"[0,9)", r"\sqrt{7}"]
    problems = [{"problem": f"p{i}", "solution": f"Then $\\boxed{{{box}}}$."} for i, box in enumerate(boxed)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, problems)))
    assert main(["data", "math", "--in", str(tmp_path / "train.jsonl"), "--out", str(tmp_path)]) == 0
    counts = report(capsys, "built-in", "--data", str(tmp_path / "train.parquet"))
    sums = [counts[what] for what in ("false positives", "false negatives", "exceptions", "time-outs")]
    assert sums == ["0", "0", "0", "0"]
