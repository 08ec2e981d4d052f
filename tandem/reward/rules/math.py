r"""Competition mathematics (MATH, Hendrycks et al. 2021, arXiv:2103.03874): is the boxed answer equal to the reference?

What "equal" means is in `math_equal.py`. Its time-outs are signals: it works in the main thread alone, where the reward
workers call it.
"""

import importlib.util
import re
from fractions import Fraction
from typing import Any

from tandem.errors import UserError
from tandem.reward.rules.math_equal import cleaned, equal, plain
from tandem.reward.rules.own_words import Turns, own_words

MAX_CHARACTERS = 1000
"""A longer answer is wrong."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
_FRACTION = re.compile(r"([-+]?)(?:\\frac(?:\{([0-9]+)\}\{([0-9]+)\}|([0-9])([0-9]))|([0-9]+)/([0-9]+))")
_ANSWER = re.compile(r"(?i:answer)[*\s]*:\s*(\S[^\n]*)")


def boxed(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, turns: Turns = ()
) -> dict[str, Any]:
    """Right when the last \\boxed answer after the reasoning equals `ground_truth`; without one, wrong."""
    if not (truth := str(ground_truth).strip()):
        raise ValueError("the ground truth is empty")
    answer = last_boxed(own_words(solution_str, turns).rpartition("</think>")[2])
    if answer is None or len(answer) > MAX_CHARACTERS:
        return {"score": 0.0, "acc": 0.0, "pred": None}
    right = float(equal(last_boxed(truth) or truth, answer))
    return {"score": right, "acc": right, "pred": spelled(plain(cleaned(answer)[0]))}


def dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, turns: Turns = ()
) -> dict[str, Any]:
    """+1 when what follows the last `Answer:` is right, else -1 (Yu et al. 2025, arXiv:2503.14476, eq. 7)."""
    found = _ANSWER.findall(own_words(solution_str, turns))
    answer = last_boxed(found[-1]) or found[-1].strip("* ") if found else ""
    verdict = boxed(data_source, f"\\boxed{{{answer}}}" if found else "", ground_truth)
    return {**verdict, "score": 2 * verdict["acc"] - 1}


def spelled(text: str) -> str:
    r"""A number in one spelling, 073 as 73, \frac12 and 0.5 as 1/2, so that equal answers vote alike; else the text."""
    if _DECIMAL.fullmatch(text):
        return str(Fraction(text))
    if found := _FRACTION.fullmatch(text):
        sign, over, under = [group for group in found.groups() if group is not None]
        return str(Fraction(int(sign + over), int(under))) if int(under) else text
    return text


def check() -> None:
    """Before a run: raises UserError where math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("the MATH reward needs math-verify; pip install -e '.[math]' in a clone of Tandem")


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{…} of a text, braces in it paired; None without one, or one not closed."""
    inner = _BOX.split(text)[-1]
    if inner == text or not inner.startswith("{"):
        return None if inner == text else "".join(inner.split("$")[0].split()[:1])  # \boxed 5
    depth = 0
    for brace in re.finditer("[{}]", inner):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return inner[1 : brace.start()].strip()
    return None
