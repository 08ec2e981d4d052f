r"""MATH answers: pairs of equal and of unequal forms, and where the answer is found."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from tandem.reward.rules.math import boxed, dapo, last_boxed
from tandem.reward.rules.math_equal import equal

PAIRS = Path(__file__).parent / "math_pairs.json"
"""Written by hand: fractions, intervals, lists, sets, equations, units, texts, percent, thousands, expressions."""
DATA = Path(__file__).parents[3] / "shared" / "data"
CASES = json.loads(PAIRS.read_text(encoding="utf-8"))
RULES = json.loads((Path(__file__).parent / "math_rules.json").read_text(encoding="utf-8"))
"""Pairs by the rule of docs/rewards.md that says whether they are equal."""


def test_there_are_enough_pairs() -> None:
    assert len(CASES["equal"]) >= 180 and len(CASES["unequal"]) >= 110


@pytest.mark.parametrize(("truth", "answer"), CASES["equal"])
def test_equal_forms(truth: str, answer: str) -> None:
    assert equal(truth, answer) and equal(answer, truth)


@pytest.mark.parametrize(("truth", "answer"), CASES["unequal"])
def test_unequal_forms(truth: str, answer: str) -> None:
    assert not equal(truth, answer) and not equal(answer, truth)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_holds_in_both_directions(rule: str) -> None:
    """Of an empty answer one direction: the truth is never empty."""
    for is_equal, pairs in ((True, RULES[rule]["equal"]), (False, RULES[rule]["unequal"])):
        for first, second in pairs:
            wrong = equal(first, second) is not is_equal or (second.strip() and equal(second, first) is not is_equal)
            assert not wrong, f"{first} and {second} are{' not' if is_equal else ''} equal"


def test_the_rules_have_enough_pairs() -> None:
    assert sum(len(pairs) for rule in RULES.values() for pairs in rule.values()) > 700


HOSTILE = [
    "9^{9^{9^9}}", "((99!)!)!", "(" * 400 + "1" + ")" * 400, "\\sqrt" * 160 + "2", "\\sin" * 240 + " x", "x!" * 400,
    "2^{" * 300 + "1" + "}" * 300, "-" * 900 + "1", "1" + "+x" * 450, "|" * 900, "{" * 900, "9" * 999,
    "0." + "12" * 450 + "...",
    "\\sum_{k=1}^{999}" * 20 + "k", "\\sum_{k=1}^{999}\\sin(\\sin(\\sin k))", "(x+1)^{99}" * 90, "1e" + "9" * 900,
    "\\{" * 300, "1," * 450, "1 or " * 190, "x=" * 400, "x<" * 400, "\\pm1" * 200, "\\text{" * 140, "\\boxed{" * 140,
    "**" * 450,
    "1 " * 450, "1/" * 450, "\\begin{pmatrix}" * 60, "1&" * 450, "\\operatorname{zeros}(99999,99999)",
    "\\binom{99999999}{9999999}",
    "__import__('os').system('touch hostile')", "答案是" * 300, "1\\cup" * 160, "a_" * 450, "\\approx" * 120,
    "5 " + "cm " * 300,
]  # fmt: skip
"""What would take forever, or all memory, if it were worked out or searched as it stands."""


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: answer[:30])
def test_what_takes_forever_is_wrong_at_once(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is at once is seen in the time of the whole: some of them would never end."""
    monkeypatch.chdir(tmp_path)
    for truth in ("7", "x^2+7", "(3,7)", "3, 7"):
        assert not equal(truth, answer)
    assert isinstance(equal(answer[:100], answer) or equal(answer, f"{answer} 7"), bool)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "noise", ["So { \\boxed (1 ", "\\boxed{", "\\boxed{}", "\\boxed{\\boxed", "}{", "Answer: ", "答案是"]
)
def test_a_long_text_is_read_once(noise: str) -> None:
    assert boxed("math", noise * (1_000_000 // len(noise)), "7")["score"] == 0
    assert dapo("math_dapo", noise * (1_000_000 // len(noise)), "7")["score"] == -1


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
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"\boxed{5+\boxed{3}}", r"5+\boxed{3}"),
        (r"\boxed{3} and \boxed{5+\boxed{3}} so", r"5+\boxed{3}"),
        (r"\boxed{\left\{\begin{array}{l}1\end{array}\right.}", r"\left\{\begin{array}{l}1\end{array}\right."),
        (r"write \boxed{ and then \boxed{7}", "7"),
        (r"{ \boxed{7}", "7"),
        (r"\boxed{7} }", "7"),
        (r"\boxedly{7}", None),
        ("no box {1}", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def test_the_reward() -> None:
    assert boxed("math", r"It is $\boxed{\dfrac12}$.", r"\frac{1}{2}") == {"score": 1.0, "acc": 1.0, "pred": "1/2"}
    assert boxed("math", r"\boxed{0.5}", r"$\boxed{\frac{1}{2}}$")["score"] == 1.0
    assert boxed("math", r"It is \frac12.", r"\frac12") == {"score": 0.0, "acc": 0.0, "pred": None}
    assert boxed("math", r"<think>\boxed{1}</think> It is 1.", "1")["score"] == 0.0
    assert boxed("math", r"\boxed{}", "1")["score"] == 0.0
    with pytest.raises(ValueError, match="ground truth is empty"):
        boxed("math", r"\boxed{1}", " ")


@pytest.mark.parametrize(
    ("vote", "answers"),
    [
        ("73", ["073", "73", "73.0", "+73", r"73^\circ", r"\text{73}", "73."]),
        ("-1/2", [r"-\frac12", r"-\frac{1}{2}", "-0.5", "-2/4", "-.5"]),
        ("1000", ["1,000", "1000"]),
        ("1/0", ["1/0"]),
        (r"2\sqrt{3}", [r"2\sqrt{3}"]),
    ],
)
def test_equal_numbers_vote_for_the_same(vote: str, answers: list[str]) -> None:
    for answer in answers:
        assert boxed("math", f"\\boxed{{{answer}}}", "5")["pred"] == vote


def test_dapo_is_one_or_minus_one() -> None:
    assert dapo("math_dapo", "So.\nAnswer: 34", "34") == {"score": 1.0, "acc": 1.0, "pred": "34"}
    assert dapo("math_dapo", "Answer: 1\nAnswer: $\\boxed{34}$", 34)["score"] == 1.0
    assert dapo("math_dapo", "Answer: 35", "34") == {"score": -1.0, "acc": 0.0, "pred": "35"}
    for answer in ("42 dollars", "$42$ dollars.", "**42**", "x = 42", r"$\boxed{42}$ dollars"):
        assert dapo("math_dapo", f"**Answer:** {answer}", "42")["score"] == 1.0
        assert dapo("math_dapo", f"Answer: {answer}", "41")["score"] == -1.0
    for answer in ("答案：42", "答案是 42。", "Answer：42", "Answer:\n\\[\n\\boxed{42}\n\\]", "**答案**：42"):
        assert dapo("math_dapo", answer, "42")["score"] == 1.0
    assert dapo("math_dapo", "<think>Answer: 34</think> I do not know.", "34")["score"] == -1.0
    assert dapo("math_dapo", "Answer: 34 or 35", "34")["score"] == -1.0
    assert dapo("math_dapo", "34", "34") == {"score": -1.0, "acc": 0.0, "pred": None}


def test_a_long_answer_is_wrong_at_once() -> None:
    assert boxed("math", "\\boxed{" + "(" * 100_000 + ")" * 100_000 + "}", "1")["score"] == 0.0
    assert not equal("1", "1 " + "word " * 190 + "#")


@pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason=f"the GSM8K answers are not in {DATA}")
def test_what_people_write_behind_numbers() -> None:
    """GSM8K's solutions name their result in sentences: the number, and up to four words that follow it."""
    rows = [json.loads(line) for line in (DATA / "gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()]
    phrases: list[tuple[str, str]] = []
    for row in rows:
        text, _, truth = row["answer"].rpartition("#### ")
        text = re.sub("<<.*?>>", "", text)
        phrases += [(truth, m[0]) for m in re.finditer(rf"(?<![\d.,]){truth}(?: [a-z]+){{1,4}}(?=[.,;\n])", text)]
    accepted = sum(equal(truth, phrase) for truth, phrase in phrases)
    assert len(phrases) > 600 and accepted > 0.9 * len(phrases)
    assert not any(equal(f"{int(truth) + 1}", phrase) for truth, phrase in phrases if truth.isdigit())


@pytest.mark.skipif(not (DATA / "aqua_rat").is_dir(), reason=f"the AQuA options are not in {DATA}")
def test_other_options_are_other_answers() -> None:
    """AQuA's options are what people write for answers, and of one question no two are alike, but for order."""
    lines = (DATA / "aqua_rat/test.jsonl").read_text(encoding="utf-8").splitlines()
    alike: list[tuple[str, str]] = []
    for line in lines[::2]:
        options = [option.partition(")")[2].strip() for option in json.loads(line)["options"]]
        assert all(equal(option, option) for option in options)
        alike += [pair for pair in itertools.pairwise(options) if sorted(pair[0]) != sorted(pair[1]) and equal(*pair)]
    assert alike == []


@pytest.mark.skipif(not (DATA / "aqua_rat").is_dir(), reason=f"the AQuA options are not in {DATA}")
def test_a_digit_more_or_another_one_is_another_answer() -> None:
    """Of options as they are published: with units, currencies, ratios, fractions and letters."""
    lines = (DATA / "aqua_rat/dev.jsonl").read_text(encoding="utf-8").splitlines()
    options = [option.partition(")")[2].strip() for line in lines[::5] for option in json.loads(line)["options"]]
    for option in options:
        for digit in list(re.finditer("[0-9]", option))[:3]:
            before, after = option[: digit.start()], option[digit.end() :]
            assert not equal(option, f"{before}{(int(digit[0]) + 3) % 10}{after}"), option
            assert not equal(option, f"{before}7{digit[0]}{after}"), option


@pytest.mark.skipif(not (DATA / "aqua_rat").is_dir(), reason=f"the AQuA options are not in {DATA}")
def test_options_of_other_questions_are_equal_when_their_numbers_are() -> None:
    """Of a thousand pairs that chance has made, those are looked at that are called equal."""
    lines = (DATA / "aqua_rat/test.jsonl").read_text(encoding="utf-8").splitlines()
    options = [option.partition(")")[2].strip() for line in lines for option in json.loads(line)["options"]]
    chance = random.Random(0)
    pairs = [chance.sample(options, 2) for _ in range(1500)]
    other = [pair for pair in pairs if equal(*pair) and number(pair[0]) != number(pair[1])]
    assert other == []


def number(option: str) -> str:
    """The digits of an option, without zeros at the end of a decimal."""
    return re.sub(r"\.0+$", "", "".join(re.findall(r"[0-9]|\.(?=[0-9])|/", option)))
