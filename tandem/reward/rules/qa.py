"""Question answering by short texts, as SQuAD is scored (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1)."""

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unicodedata import normalize

import numpy as np

from tandem.reward.rules.own_words import Turns

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_KEYS = ("target", "text", "value", "aliases")
"""Under which data sets have answers."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def exact_match(completion: str, ground_truth: Any, turns: Turns = ()) -> dict[str, Any]:
    """1 when the answer is one of the `ground_truth` texts but for case, punctuation and articles.

    In a conversation the answer stands in the last of the policy's own `turns`: what a tool says is none.
    """
    answer = _answer(completion, turns)
    right = float(any(_same(answer, truth) for truth in _truths(ground_truth)))
    return {"score": right, "acc": right, "pred": " ".join(_words(answer))}


def f1(completion: str, ground_truth: Any, turns: Turns = ()) -> dict[str, Any]:
    """The best F1 over words that the answer has with one of the `ground_truth` texts; `acc` is exact match."""
    answer = _answer(completion, turns)
    best = max(_overlap(answer, truth) for truth in _truths(ground_truth))
    return {**exact_match(completion, ground_truth, turns), "score": best}


def _answer(completion: str, turns: Turns) -> str:
    """What stands in the last <answer> tags after the reasoning; without any, everything after the reasoning."""
    text = str(turns[-1]["content"]) if turns else completion
    text = text.rpartition("</think>")[2]
    tagged = _TAGGED.findall(text)
    return tagged[-1] if tagged else text


def _truths(ground_truth: Any) -> list[str]:
    """The texts of a text, of several, or of the mapping in which a data set has them: Search-R1's `target`, SQuAD's
    `text`, TriviaQA's `value` and `aliases`. ValueError for anything else."""
    found = _from_json(ground_truth)
    if isinstance(found, Mapping):
        texts = [found[key] for key in _KEYS if key in found]
        found = [text for own in texts for text in _listed(own)]
    texts = [text.item() if isinstance(text, np.generic) else text for text in _listed(found)]
    if not texts or not all(isinstance(text, (str, int, float)) and str(text).strip() for text in texts):
        raise ValueError(
            f"the ground truth {ground_truth!r} holds no answer: it is to be a text, a list of texts, or a mapping "
            "with one of both under target, text, value or aliases"
        )
    return [str(text) for text in texts]


def _from_json(value: Any) -> Any:
    """What a text of JSON says, where that is a list, or a mapping with a key for answers; any other text is one."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, list) or any(key in found for key in _KEYS) else value


def _listed(value: Any) -> Sequence[Any]:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if isinstance(value, (list, tuple)) else [value]


def _words(text: str) -> list[str]:
    """As the published evaluation script splits a text, but that a letter with a mark is one letter, however it is
    written in Unicode."""
    return _ARTICLES.sub(" ", normalize("NFC", text).lower().translate(_PUNCTUATION)).split()


def _same(answer: str, truth: str) -> bool:
    """Word by word; a truth of articles and punctuation alone (`A`, `-`) as it is written."""
    words = _words(truth)
    return _words(answer) == words if words else answer.lower().split() == truth.lower().split()


def _overlap(answer: str, truth: str) -> float:
    found, wanted = _words(answer), _words(truth)
    if not found or not wanted:
        return float(_same(answer, truth))
    return 2 * (Counter(found) & Counter(wanted)).total() / (len(found) + len(wanted))
