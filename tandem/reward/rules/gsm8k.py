"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): is the final number right?

Numbers are compared as decimal strings in canonical form: 1,000 = $1000.00 = 1000. and no digit is ever rounded.
"""

import re
from typing import Any

from tandem.reward.rules.own_words import Turns, own_words

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
NUMBER = re.compile(rf"((?<![\w)])[-−])?\$?(?<![0-9])({_UNSIGNED})")
MARKED = re.compile(rf"####[ \t]*\+?([-−]?\$?[-−]?)({_UNSIGNED})(?![0-9]|[.,][0-9])")
"""Groups of both: minus sign (not that of a subtraction), perhaps with a `$`; digits."""
_GOES_ON = re.compile(
    r"""[ \t]*(?:
      [/+*×÷=^²³√π±!]                                                  # a calculation
    | \\(?:times|cdot|div|pi|sqrt|frac|pm)
    | (?:times|plus|minus|over|squared|cubed|divided[ ]by|multiplied[ ]by|percent[ ]of|%[ ]?of)\b
    | (?<=[0-9])[kKMB]\b                                               # 42k
    | (?:[~|_→]|\.\.)[ \t]*[.$0-9]
    | [:x][ \t]*[0-9] | [-−–][ \t]*[.($0-9] | (?<=[0-9])[eE][-+]?[0-9]
    | [ \t]\$?[.0-9]                                                   # 5 1/2
    | (?:[,;&(]|[^\n0-9]{0,40}\b(?:and|or|to|not)\b)[ \t]*\$?[-−]?[.0-9]   # 42, 43; 42 hours and 20 minutes
    | (?:hundred|thousand|million|billion|trillion|dozen|hal(?:f|ves)|(?:third|quarter|fourth|fifth|sixth|tenth)s?)\b
    )""",
    re.VERBOSE,
)
"""What follows a number that is only a part of the answer."""


def strict(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, turns: Turns = ()
) -> dict[str, Any]:
    """Right when the last `#### number` is the ground truth; an answer without one is wrong."""
    return _verdict(MARKED, own_words(solution_str, turns), ground_truth)


def flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, turns: Turns = ()
) -> dict[str, Any]:
    """Right when the last number of the text is the ground truth, whatever is written around it."""
    return _verdict(NUMBER, own_words(solution_str, turns), ground_truth)


def canonical(digits: str, negative: bool = False) -> str:
    """One spelling a value: no separators, no leading or trailing zeros, no minus before zero."""
    whole, _, fraction = digits.replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if negative and value != "0" else value


def last(number: re.Pattern[str], text: str) -> str | None:
    """The last of the numbers in the text, in canonical form. What is marked and goes on as a calculation, a fraction,
    a time or a further number is none: `#### 42/7` says neither 42 nor 7, `#### 42 or 43` neither."""
    found = [*number.finditer(text)]
    if not found or (number is MARKED and _GOES_ON.match(text, found[-1].end())):
        return None
    sign, digits = found[-1].groups()
    return canonical(digits, negative=(sign or "").strip("$") != "")


def _verdict(number: re.Pattern[str], text: str, ground_truth: Any) -> dict[str, Any]:
    if not MARKED.fullmatch(f"#### {str(ground_truth).strip()}"):
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    answer = last(number, text.rpartition("</think>")[2])
    right = float(answer == last(MARKED, f"#### {ground_truth}"))
    return {"score": right, "acc": right, "pred": answer}
