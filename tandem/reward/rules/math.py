r"""Competition mathematics (MATH, Hendrycks et al. 2021, arXiv:2103.03874): is the boxed answer equal to the reference?

What "equal" means is in `math_equal.py`.
"""

import re
from fractions import Fraction
from typing import Any

from tandem.reward.rules.math_equal import equal, plain
from tandem.reward.rules.math_notation import cleaned
from tandem.reward.rules.own_words import Turns, own_words

MAX_CHARACTERS = 1000
"""A longer answer is wrong."""
_BOX_OR_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)(?![a-zA-Z])\s*\{?)|\\.|(?P<brace>[{}])", re.DOTALL)
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
_FRACTION = re.compile(r"([-+]?)(?:\\frac(?:\{([0-9]+)\}\{([0-9]+)\}|([0-9])([0-9]))|([0-9]+)/([0-9]+))")
_ANSWER = re.compile(
    r"(?:(?i:answer)[*\s]*[:：]|答案(?:[*\s]*[:：]|(?:是|为)[:：]?))\s*(?:(?:\\\[|\$\$)\s*\n\s*)?(\S[^\n]*)"
)


def boxed(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, turns: Turns = ()
) -> dict[str, Any]:
    """Right when the last \\boxed answer after the reasoning equals `ground_truth`; without one, wrong."""
    return _verdict(ground_truth, last_boxed(own_words(solution_str, turns).rpartition("</think>")[2]))


def dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, turns: Turns = ()
) -> dict[str, Any]:
    """+1 when what follows the last `Answer:` is right, else -1 (Yu et al. 2025, arXiv:2503.14476, eq. 7)."""
    found = _ANSWER.findall(own_words(solution_str, turns).rpartition("</think>")[2])
    answer = last_boxed(found[-1]) or found[-1].strip("* ") if found else None
    verdict = _verdict(ground_truth, answer)
    return {**verdict, "score": 2 * verdict["acc"] - 1}


def spelled(text: str) -> str:
    r"""A number in one spelling, 073 as 73, \frac12 and 0.5 as 1/2, so that equal answers vote alike; else the text."""
    if _DECIMAL.fullmatch(text):
        return str(Fraction(text))
    if found := _FRACTION.fullmatch(text):
        sign, over, under = [group for group in found.groups() if group is not None]
        return str(Fraction(int(sign + over), int(under))) if int(under) else text
    return text


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{…} of a text, braces in it paired; None without one, or one not closed. A box in
    a box is part of what the outer one says."""
    boxes, unclosed = list[tuple[int, int | None]](), list[int]()
    for found in _BOX_OR_BRACE.finditer(text):
        if found["brace"] == "{":
            unclosed.append(-1)
        elif found["box"] and found["box"].endswith("{"):
            unclosed.append(found.end())
        elif found["box"]:
            boxes.append((found.end(), None))
        elif found["brace"] and unclosed and (start := unclosed.pop()) >= 0:
            boxes.append((start, found.start()))
    if not boxes or any(start > boxes[-1][0] for start in unclosed):
        return None
    start, end = boxes[-1]
    return text[start:end].strip() if end is not None else "".join(text[start:].split("$")[0].split()[:1])  # \boxed 5


def _verdict(ground_truth: Any, answer: str | None) -> dict[str, Any]:
    if not (truth := str(ground_truth).strip()):
        raise ValueError("the ground truth is empty")
    if answer is None or len(answer) > MAX_CHARACTERS:
        return {"score": 0.0, "acc": 0.0, "pred": None}
    right = float(equal(last_boxed(truth) or truth, answer))
    return {"score": right, "acc": right, "pred": spelled(plain(cleaned(answer)[0]))}
