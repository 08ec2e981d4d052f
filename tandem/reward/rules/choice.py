"""Multiple choice: is the letter of the answer the right one?"""

import re
from typing import Any

from tandem.reward.rules.own_words import Turns, own_words

_STATED = re.compile(r"(?i:answer|choice|option)\W*(?:(?i:is|are|be)\b)?\W*(?:\\(?:boxed|text)\{)*\(?([A-J])\b(?!['’])")
_BARE = re.compile(r"\s*\W*([A-J])\W*\s*")


def letter(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, turns: Turns = ()
) -> dict[str, Any]:
    """Right when the letter that the text last calls its answer, or that is all its answer, is the ground truth."""
    truth = str(ground_truth).strip().strip("().")
    if not re.fullmatch("[A-J]", truth):
        raise ValueError(f"the ground truth {ground_truth!r} is not a letter from A to J")
    answer = own_words(solution_str, turns).rpartition("</think>")[2]
    bare, stated = _BARE.fullmatch(answer[:100]), _STATED.findall(answer)
    choice = bare[1] if bare else stated[-1] if stated else None
    right = float(choice == truth)
    return {"score": right, "acc": right, "pred": choice}
