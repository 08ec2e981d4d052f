"""Competition mathematics (MATH, Hendrycks et al. 2021, arXiv:2103.03874): is the boxed answer equal to the reference?

Answers that are not spelled alike are compared by math-verify, as sets, intervals, matrices or expressions.
Its time-outs are signals: it works in the main thread alone, where the reward workers call it.
"""

import importlib.util
import re
from typing import Any

from tandem.errors import UserError

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_SPACING = re.compile(r"(?<!\\)\\[!,;:> ]|\\q?quad\b|\\(?:left|right|displaystyle|limits)(?![a-zA-Z])|~|\\?\$|\s+")
_UNIT = re.compile(r"(?<=[\w}]) ?\\(?:text|mathrm|mbox|textrm) ?\{[^{}]*\} ?(?:\^ ?\{? ?\d ?\}?)?\.?$")
_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textrm|textbf|textit|mathbf) ?\{([^{}]*)\}")
_SIGNS = re.compile(r"\^ ?\{? ?\\circ ?\}?|\^ ?\\degree|°|\\?%")
_NAME = re.compile(r"^ ?(?:[a-zA-Z]|[a-zA-Z]\([a-zA-Z]\)|\\(?:theta|alpha|lambda)) ?=(?!=)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_BASED = re.compile(r"\w+_\d+")
_ANSWER = re.compile(r"(?i:answer)\s*:\s*(\S[^\n]*)")
TIMEOUT_S = 5


def boxed(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Right when the last \\boxed answer after the reasoning equals `ground_truth`; without one, wrong."""
    if not (truth := str(ground_truth).strip()):
        raise ValueError("the ground truth is empty")
    answer = last_boxed(solution_str.rpartition("</think>")[2])
    right = float(answer is not None and equal(last_boxed(truth) or truth, answer))
    return {"score": right, "acc": right, "pred": None if answer is None else plain(cleaned(answer))}


def dapo(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """+1 when what follows the last `Answer:` is right, else -1 (Yu et al. 2025, arXiv:2503.14476, eq. 7)."""
    found = _ANSWER.findall(solution_str)
    verdict = boxed(data_source, f"\\boxed{{{last_boxed(found[-1]) or found[-1]}}}" if found else "", ground_truth)
    return {**verdict, "score": 2 * verdict["acc"] - 1}


def check() -> None:
    """Before a run: raises UserError where math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("the MATH reward needs math-verify; install the extra: pip install 'tandem-rl[math]'")


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


def equal(truth: str, answer: str) -> bool:
    """The same mathematical object: order counts in tuples, closedness in intervals, the base in numbers with one."""
    ours, theirs = cleaned(truth), cleaned(answer)
    if plain(ours) == plain(theirs):
        return True
    if not plain(theirs) or len(theirs) > 1000 or any(_BASED.fullmatch(plain(text)) for text in (ours, theirs)):
        return False
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    gold, target = (parse(f"\\boxed{{{text}}}", config, parsing_timeout=TIMEOUT_S) for text in (ours, theirs))
    return bool(gold and target) and verify(gold, target, timeout_seconds=TIMEOUT_S)


def cleaned(text: str) -> str:
    """Without what does not change the value: spacing, units, degree and percent signs, a name before `=`."""
    text = _SPACING.sub(" ", text.replace("{,}", ",").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    text = _WORDS.sub(r"\1", _UNIT.sub("", _SIGNS.sub("", text).strip())).strip().rstrip(".")
    return _NAME.sub("", text)


def plain(text: str) -> str:
    """A cleaned answer in one spelling."""
    text = re.sub(r"_\{(\w+)\}", r"_\1", text.replace(" ", ""))
    text = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
    text = re.sub(r"^\(([a-zA-Z]+)\)$", r"\1", text)
    return text.lower() if text.isalpha() and len(text) > 1 else text
