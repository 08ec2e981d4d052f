"""Multiple choice, question answering, and terms on form."""

import gzip
import json
import re
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.reward.rules.choice import letter
from tandem.reward.rules.gsm8k import flexible, strict
from tandem.reward.rules.math import boxed, dapo
from tandem.reward.rules.qa import exact_match, f1
from tandem.reward.rules.text import format, length

SQUAD = Path(__file__).parents[3] / "shared" / "data" / "squad_search" / "questions.jsonl.gz"


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("The answer is (B).", "B"),
        ("So the answer is B", "B"),
        ("Answer: **B**", "B"),
        (r"The final answer is \boxed{\text{B}}.", "B"),
        ("(B)", "B"),
        (" B.\n", "B"),
        ("Option A is wrong. The answer is (C).", "C"),
        ("The answer is (A). No: the answer is (D).", "D"),
        ("<think>The answer is (A)</think>The answer is (B)", "B"),
        ("<think>The answer is (A)</think>", None),
        ("The answer is A's brother.", None),
        ("The answer is Because", None),
        ("I say b", None),
        ("", None),
        ("(b)", "B"),
        ("**B**", "B"),
        ("Ｂ", "B"),
        ("B) 21 km", "B"),
        ("(B) 21 km", "B"),
        (r"So $\boxed{B}$ it is.", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{\text{(B) }21}", "B"),
        (r"\boxed{A} or rather \boxed{B}", "B"),
        (r"The answer is (B). \boxed{A, B}", None),
        (r"\boxed{AB}", None),
        (r"The answer is B, which is \boxed{21}", "B"),
        ("The answer is A or B.", None),
        ("The answer is (A) or (B) because", None),
        ("The answer is A, B, C, D", None),
        ("The answer is A: 5, B: 6", None),
        ("Answer: A/B", None),
        ("A, B, C, D", None),
        ("(A) 1 (B) 2 (C) 3", None),
        ("Answer Choices: (A) 1 (B) 2", None),
        ("What is the correct answer? (A) 21 (B) 22", None),
        ("The answer is A good idea", None),
        ("The answer is I think B", None),
        ("The answer is E=5", None),
        ("The answer is A because of that", "A"),
        ("The answer is A and I am sure", "A"),
        ("The answer is B, C is wrong", "B"),
        ("The answer is (B). Option C is wrong.", "B"),
        ("The answer is (B). I did not choose C.", "B"),
        ("The answer is not B", None),
        ("Option B is incorrect.", None),
        ("B is not correct.", None),
        ("D is the correct answer.", "D"),
        ("I choose C.", "C"),
        ("The correct option is D", "D"),
        ("The answer is option D", "D"),
        ("The correct answer is: (d)", "D"),
        ("**Answer:** C", "C"),
        ("答案是B", "B"),
        ("答案：（Ｂ）", "B"),
        ("故选：B。", "B"),
        ("应选 B", "B"),
        ("选择B项", "B"),
        ("答案是A或B", None),
        ("B选项正确", "B"),
        ("答案应为B", "B"),
        ("选项B错误", None),
        ("不选B", None),
        ("The answer is: A) 5 B) 6 C) 7", None),
        ("The answer is (B) 21, not (C)", "B"),
        ("Answer: (B) because (A) is wrong", "B"),
        ("The answer is B or maybe C", None),
        ("The answer is neither A nor B", None),
        ("<answer>B</answer>", "B"),
        ("The answer is 'B'", "B"),
        ("Answer -> B", "B"),
    ],
)
def test_the_letter_of_an_answer(text: str, choice: str | None) -> None:
    assert letter("aqua_rat", text, "B")["pred"] == choice
    assert letter("aqua_rat", text, "(B)")["score"] == float(choice == "B")


@pytest.mark.parametrize(
    "noise", ["answer is ", "A, ", "answer" + " " * 99, "**", "(A) ", "the answer is the the ", "选"]
)
def test_a_long_text_chooses_nothing(noise: str) -> None:
    """It is read once: searched again from each place, it would take hours."""
    assert letter("aqua_rat", noise * (500_000 // len(noise)), "B")["pred"] is None


def test_what_tools_and_users_say_is_no_answer() -> None:
    told = [("#### 4", strict, "4"), ("It is 4", flexible, "4"), (r"\boxed{4}", boxed, "4"), ("Answer: 4", dapo, "4")]
    told += [("The answer is (B).", letter, "B")]
    for answer, rule, truth in told:
        others = [{"content": ""}, {"content": "I do not know."}]
        assert rule("", f"Look.\n{answer}\nI do not know.", truth)["acc"] == 1
        assert rule("", f"Look.\n{answer}\nI do not know.", truth, turns=others)["acc"] == 0
        assert rule("", "…", truth, turns=[{"content": answer}, {"content": "You are welcome."}])["acc"] == 1


def test_a_truth_that_is_no_letter_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a letter from A to J"):
        letter("aqua_rat", "The answer is (B).", "2")


def test_short_answers() -> None:
    truths = ["The Denver Broncos", "Broncos"]
    assert exact_match("<think>hm</think> denver broncos!", truths) == {
        "score": 1.0,
        "acc": 1.0,
        "pred": "denver broncos",
    }
    assert exact_match("So <answer>The Broncos.</answer> indeed", truths)["score"] == 1.0
    assert exact_match("the Denver team", truths)["score"] == 0.0
    # 2 of 3 words right, 2 of 2 found: 2 * 2 / (3 + 2)
    assert f1("big Denver Broncos", truths) == {"score": 0.8, "acc": 0.0, "pred": "big denver broncos"}
    assert f1("Denver Denver", "Denver Broncos")["score"] == 0.5
    assert f1("", "Denver")["score"] == 0.0
    assert exact_match("1,000", 1000)["score"] == 1.0
    with pytest.raises(ValueError, match="holds no answer"):
        exact_match("x", [])


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("", "A", 0.0), ("the", "A", 0.0), ("a", "A", 1.0), ("...", "!!!", 0.0),
        ("<answer></answer>", ["The The"], 0.0),
        ("Paris", '{"target": ["Paris"]}', 1.0), ("Paris", '["Lyon", "Paris"]', 1.0), ("[sic", "[sic", 1.0),
        ('{"a": 1}', '{"a": 1}', 1.0),
        ("Paris", {"target": np.array(["Lyon", "Paris"])}, 1.0), ("7", np.array([7]), 1.0),
    ],
)  # fmt: skip
def test_truths_of_no_words_and_truths_in_other_forms(answer: str, truth: Any, right: float) -> None:
    assert exact_match(answer, truth)["score"] == f1(answer, truth)["score"] == right


@pytest.mark.parametrize("truth", ["", " ", [], {"target": []}, {"other": "x"}, [""]])
def test_an_empty_truth_is_told(truth: Any) -> None:
    with pytest.raises(ValueError, match="holds no answer"):
        exact_match("", truth)


def test_short_answers_are_read_from_the_policys_last_turn() -> None:
    """What a tool says, or an earlier turn, is no answer."""
    turns = [{"role": "assistant", "content": "<answer>Rome</answer>"}, {"role": "assistant", "content": "It is Paris"}]
    whole = "<answer>Rome</answer> <answer>Paris</answer> It is Paris"
    assert exact_match(whole, "it is Paris", turns)["score"] == 1.0
    assert exact_match(whole, "Rome", turns)["score"] == 0.0
    assert f1(whole, "Paris", turns) == {"score": 0.5, "acc": 0.0, "pred": "it is paris"}
    turns[-1]["content"] = "<think><answer>a</answer></think>so <answer>b</answer> or <answer>The Paris</answer>"
    assert exact_match(whole, ["London", "Paris"], turns)["score"] == 1.0


@pytest.mark.parametrize(
    "text", ["The  U.S. (a republic)", "a–b", "an-the", "la the' a", "", "A", "«the»", "state of the art", "1,000 a's"]
)
def test_texts_are_compared_as_the_published_script_does(text: str) -> None:
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    published = " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())
    assert exact_match(text, "?")["pred"] == published


@pytest.mark.skipif(not SQUAD.is_file(), reason=f"the SQuAD questions are not at {SQUAD}")
def test_every_squad_answer_is_right_and_another_questions_is_not() -> None:
    with gzip.open(SQUAD, "rt") as file:
        answers = [json.loads(line)["answers"] for line in file]
    assert len(answers) == 10570
    for truths in answers:
        assert all(exact_match(f"<answer>{truth}</answer>", truths)["score"] == 1.0 for truth in truths)
        assert f1("qzx", truths)["score"] == 0.0


@pytest.mark.parametrize(
    "truth",
    [
        "Paris", ["Lyon", "Paris"], {"target": ["Paris"]}, {"target": "Paris"},
        {"text": ["Paris"], "answer_start": [3]}, {"value": "Paris, France", "aliases": ["Paris"], "type": "city"},
    ],
    ids=str,
)  # fmt: skip
def test_the_answers_of_a_question_are_found_where_data_sets_have_them(truth: Any) -> None:
    assert exact_match("<answer>paris</answer>", truth)["score"] == 1
    assert exact_match("<answer>London</answer>", truth)["score"] == 0
    assert f1("<answer>paris</answer>", truth)["score"] == 1


@pytest.mark.parametrize(
    "truth", [None, [], {}, {"target": []}, {"answer_start": [3]}, [["Paris"]], {"text": [None]}], ids=str
)
def test_a_truth_without_an_answer_is_a_mistake_of_the_data(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"holds no answer: it is to be a text, a list of texts"):
        exact_match("Paris", truth)


def test_a_letter_with_a_mark_is_one_letter_however_it_is_written() -> None:
    composed, apart = "Pok\u00e9mon", "Poke\u0301mon"
    assert exact_match(composed, apart)["score"] == exact_match(apart, composed)["score"] == 1
    assert exact_match("Pokemon", composed)["score"] == 0


def test_form() -> None:
    assert format("<think>so</think><answer>4</answer>") == 1.0
    assert format("<think>so</think>4") == 0.0
    assert format("4!", r"\d!") == 1.0 and format("4!!", r"\d!") == 0.0
    assert [length("x" * n, 10, 20) for n in (0, 10, 15, 20, 99)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="must be less"):
        length("x", 20, 10)
