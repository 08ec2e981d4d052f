"""Multiple choice: is the letter of the answer the right one?"""

import re
from collections.abc import Iterator
from typing import Any

from tandem.reward.rules.math import last_boxed
from tandem.reward.rules.math_notation import FULL_WIDTH
from tandem.reward.rules.own_words import Turns, own_words

_OPENING = r"(?:\\(?:text|textbf|mathrm|mathbf|boxed|fbox) ?\{|[\s*_$\"“'(\[]){0,8}"
_LETTER = rf"{_OPENING}([A-J]|(?<=[(*])[a-j](?=[)*]))(?![A-Za-z0-9_]|['’][A-Za-z]|\s?(?:[=>+^]|<(?!/)))"
_FILLING = r"(?:(?i:the|an?|option|choice|letter|therefore|thus|clearly|then)\b[\s*_]{0,6}){0,3}"
_GAP = r"[\s*_:>=–—-]{0,8}"
_ANSWERED = re.compile(
    rf"(?i:answer)(?i: choice| option| letter)?{_GAP}(?:(?i:is|are|be|was)\b|[:=])?{_GAP}{_FILLING}{_LETTER}|"
    rf"(?:答案|正确选项|故选|(?<!不)应选){_GAP}(?:是|为|选|应选|应为|应该[是为])?{_GAP}(?:选项|选)?{_LETTER}"
)
_CHOSEN = re.compile(
    rf"(?i:choice|option|choose|select|pick){_GAP}(?:(?i:is|be|was)\b)?{_GAP}{_FILLING}{_LETTER}|"
    rf"(?:选项|(?<!不)选择|(?<!不)选)(?:是|为)?{_GAP}{_LETTER}"
)
_NAMED = re.compile(
    r"(?<![A-Za-z0-9])([A-J])[)\]*]{0,4}\s{1,3}(?i:is|would be)\s{1,3}(?i:therefore |thus |clearly |indeed )?(?i:the )?"
    r"(?i:correct|right|best|final|answer)\b|(?<![A-Za-z0-9])([A-J])(?:选项|项)?是?(?:正确|对的)"
)
_DENIED = re.compile(
    r"[)\]}*.]{0,4}\s{1,3}(?:(?:is|was|are|seems)\s{1,3}(?:also |clearly |therefore )?(?:not|wrong|incorrect|false|"
    r"out|impossible|eliminated|excluded)|isn['’]t|cannot|can['’]t)\b|[)\]}*]{0,4}(?:选项|项)?(?:不|错|是错)"
)
_LISTED = re.compile(
    r"(?:[):]\s?[^\n,;]{0,30})?[)\]}*.$\s]{0,6}(?:[,/&;]|\b(?:and|or)\b|[和或与及]){1,2}[\s(*\[$]{0,6}"
    r"(?:(?:and|or|maybe|perhaps|possibly|option|choice)\s{1,3}){0,3}(?:\\text ?\{)?[\s(*\[$]{0,6}"
    r"(?:I(?!\s+[a-z])|[A-HJ])(?![A-Za-z0-9_'’]|\s{1,3}(?:is|was|has|would|can|cannot)\b)|"
    r"[):.]\s?(?:(?!because|since|while|not|but)[^\n,;.]){0,30}\s\(?[A-J][):.]\s(?!(?:is|was|has|can|cannot)\b)"
)
_REASONED = re.compile(r"\s+(?!(?:because|since|as|for|with|which|where|and|or|but|so|hence|by|if)\b)[a-z]")
"""What follows the article A and the pronoun I."""
_BARE = re.compile(r"\s*\W*(?:\\text\w* ?\{\W*)?([A-Ja-j])\W*\s*")
_LABEL = re.compile(r"\W*(?:\\text\w* ?\{\W*)?(?:([A-J])[):]|([B-HJ])\.).*")
_LABELS = re.compile(r"(?<![A-Za-z0-9])[A-J][).:]")


def letter(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, turns: Turns = ()
) -> dict[str, Any]:
    """Right when the letter that the text last calls its answer, or that is all its answer, is the ground truth."""
    truth = str(ground_truth).strip().strip("().")
    if not re.fullmatch("[A-J]", truth):
        raise ValueError(f"the ground truth {ground_truth!r} is not a letter from A to J")
    choice = chosen(own_words(solution_str, turns).rpartition("</think>")[2].translate(FULL_WIDTH))
    right = float(choice == truth)
    return {"score": right, "acc": right, "pred": choice}


def chosen(text: str) -> str | None:
    """The letter that is all of the text, or of its last box; else the last that it says its answer is, else the last
    that it says it chooses. Several at once are none."""
    if whole := _whole(text):
        return whole
    boxed = last_boxed(text)
    if boxed is not None and (_whole(boxed) or len(_LABELS.findall(f"{boxed})")) > 1 or _several(boxed)):
        return _whole(boxed)
    for pattern in (_ANSWERED, _NAMED, _CHOSEN):
        *_, last = None, *_stated(pattern, text)
        if last is not None:
            return last or None
    return None


def _whole(text: str) -> str | None:
    """The letter that is all of the text, or that labels it, where no other does."""
    if bare := _BARE.fullmatch(text[:100]):
        return bare[1].upper()
    label = _LABEL.fullmatch(text.strip()) if len(text) < 300 else None
    return (label[1] or label[2]) if label and len(_LABELS.findall(text)) == 1 and not _several(text) else None


def _several(text: str) -> bool:
    """Two letters, as in `A, B`, `(A) or (C)` and `AB`."""
    first = re.match(r"\W*(?:\\text\w* ?\{\W*)?[A-J]", text)
    return first is not None and (
        _LISTED.match(text, first.end()) is not None or re.fullmatch(r"\W*[A-J]{2,10}\W*", text) is not None
    )


def _stated(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """The letters of statements, in order; an empty text for one that names several."""
    for found in pattern.finditer(text):
        one = next(group for group in found.groups() if group)
        end = found.end(found.lastindex or 0)
        if (one in "AI" and _REASONED.match(text, end) and pattern is not _NAMED) or _DENIED.match(text, end):
            continue
        yield "" if _LISTED.match(text, end) else one.upper()
