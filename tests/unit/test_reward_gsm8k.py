"""GSM8K answers: hand cases, and the 8,792 reference solutions."""

import gzip
import json
from pathlib import Path

import pytest

from tandem.reward.rules.gsm8k import MARKED, NUMBER, canonical, flexible, last, strict

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 18", "18"),
        ("####18.", "18"),
        ("#### $1,234.50 in all", "1234.5"),
        ("#### -5", "-5"),
        ("#### $-5", "-5"),
        ("#### -$5", "-5"),
        ("#### +5", "5"),
        ("#### 1\n#### 2", "2"),
        ("#### 1\n#### none", "1"),
        ("#### 42/7", None),
        ("#### 42 / 7", None),
        ("#### 42 + 1 = 43", None),
        ("#### 43 = 42 + 1", None),
        ("#### 42:30", None),
        ("#### 42-7", None),
        ("#### 42 x 2", None),
        ("#### 6\n#### 42/7", None),
        ("#### 42/7\n#### 6", "6"),
        ("#### 5 1/2", None),
        ("#### 42 43", None),
        ("#### 42, 43", None),
        ("#### 3, 4, 5", None),
        ("#### 42 or 43", None),
        ("#### 42 (or 43)", None),
        ("#### 42 and $43", None),
        ("#### 42 hours and 20 minutes", None),
        ("#### 42 million", None),
        *(
            (f"#### 42{more}", None)
            for more in (
                "!",
                " times 2",
                " minus 2",
                " squared",
                " percent of 10",
                "% of 10",
                "k",
                "~45",
                "..45",
                "|43",
                "→43",
                "_000",
                " divided by 2",
            )
        ),
        *((f"#### 42{more}", "42") for more in (" km", " percent", "%", " overtime", " Kelvin", " timesheets")),
        ("#### 5 thirds", None),
        ("#### 42e3", None),
        (r"#### 42\times 10", None),
        ("#### 42π", None),
        ("#### 42 ± 1", None),
        ("#### 42 cm^2", "42"),
        ("#### 42 apples, and that is all", "42"),
        ("#### 42, as was to be shown", "42"),
        ("#### 42 or so", "42"),
        ("#### 42\nor 43", "42"),
        ("#### 42: that is it", "42"),
        ("#### 42 - apples", "42"),
        ("#### 42 km", "42"),
        ("#### 42%", "42"),
        ("#### 007", "7"),
        ("#### -0.0", "0"),
        ("#### 1,23", None),
        ("####\n18", None),
        ("the answer is 18", None),
        ("", None),
    ],
)
def test_marked_answer(text: str, answer: str | None) -> None:
    assert last(MARKED, text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("it is $1,000.", "1000"),
        ("10-3=7", "7"),
        ("a difference of 5-3", "3"),
        ("so -7.", "-7"),
        ("owes -$5.50", "-5.5"),
        ("3, 4, 5", "5"),
        ("costs $.50", "0.5"),
        ("1,000,000 ducks", "1000000"),
        ("no number", None),
    ],
)
def test_last_number(text: str, answer: str | None) -> None:
    assert last(NUMBER, text) == answer


def test_no_digit_is_rounded() -> None:
    near = "0.1000000000000000055511151231257827", "0.1"  # equal as doubles
    assert canonical(near[0]) != canonical(near[1])
    assert canonical("9007199254740993") != canonical("9007199254740992")


def test_strict_wants_the_mark_and_flexible_does_not() -> None:
    text = "She makes $18."
    assert strict("gsm8k", text, "18") == {"score": 0.0, "acc": 0.0, "pred": None}
    assert flexible("gsm8k", text, "18") == {"score": 1.0, "acc": 1.0, "pred": "18"}
    assert strict("gsm8k", "#### 1000", "1,000")["score"] == 1.0
    assert strict("gsm8k", "#### 18.0", 18)["score"] == 1.0


@pytest.mark.parametrize("truth", [None, "", "eighteen", "18 or 19"])
def test_a_ground_truth_that_is_no_number_is_an_error(truth: object) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        strict("gsm8k", "#### 18", truth)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/gsm8k")
def test_every_reference_solution_is_right_and_wrong_by_one_is_wrong() -> None:
    with gzip.open(DATA / "train.jsonl.gz", "rt") as train, open(DATA / "test.jsonl") as test:
        answers = [json.loads(line)["answer"] for file in (train, test) for line in file]
    assert len(answers) == 8792
    for answer in answers:
        solution, _, truth = answer.rpartition("#### ")
        wrong = f"{solution}#### {int(truth.replace(',', '')) + 1}"
        for rule in (strict, flexible):
            assert rule("openai/gsm8k", answer, truth)["score"] == 1.0
            assert rule("openai/gsm8k", wrong, truth)["score"] == 0.0
