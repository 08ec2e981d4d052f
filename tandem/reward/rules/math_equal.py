r"""Are two answers the same mathematical object? `\frac12` and `0.5` are, `2, 3` and `x=3` or `x=2`, `42` and `42 m`.

An answer is taken apart as far as its notation says what it is: a list, a set, a tuple or an interval, a quantity with
a unit, sides of an equation. Values and equations that are left are compared by math-verify unless spelled alike.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from tandem.reward.rules.math_units import differ, split_unit

TIMEOUT_S = 5
_SPELLINGS = {
    "{,}": ",", ",\\! ": ",", ",\\!": ",", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\langle": "(", "\\rangle": ")",
    "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[", "\\rbrack": "]", "−": "-", "×": "\\times ", "·": "\\cdot ",
    "π": "\\pi ", "∞": "\\infty ", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "²": "^2", "³": "^3",
}  # fmt: skip
_ROOT = re.compile(r"√ ?(\d+|\w|\([^()]*\))")
_SPACING = re.compile(r"(?<!\\)\\[!,;:> ]|\\q?quad\b|\\(?:left|right|displaystyle|limits)(?![a-zA-Z])|~|\\?\$|\s+")
_SIGNS = {
    "percent": re.compile(r"\\?%"),
    "degree": re.compile(r"(?:\^ ?\{? ?\\circ ?\}?|\^ ?\\degree|°)(?: ?(?:\\(?:text|mathrm) ?\{)?[CF]\b\}?)?"),
}
_ORDINAL = re.compile(r"(?<=\d) ?\^ ?\{? ?(?:\\text ?\{)? ?(?:st|nd|rd|th) ?\}*$")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textrm|textbf|textit|mathbf) ?\{([^{}]*)\}")
_MIXED_NUMBER = re.compile(r"(?<![\d/.])(\d+) (\d+) ?/ ?(\d+)(?![\d/])")
_PREFIX = re.compile(r"^(?:\\approx(?![a-zA-Z])|≈|[£€¥₹]|Rs\.|USD|[a-zA-Z] ?\\in(?![a-zA-Z])) ?")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,] )(?<![\d.,])\d{1,3}(?: \d{3})+(?![ ]?\d)")
_APART = re.compile(r"\d \d")
_WITH_BASE = re.compile(r"\w+_\d+")
_EQUALS = re.compile(r"(?<![<>=!])=(?!=)")
_NAME = re.compile(
    r"""
    [a-zA-Z] (?:_\{?\w+\}?)? '?                              # x, a_1
    (?: \([a-zA-Z]\) | [ ]?:[ ]? [a-zA-Z] (?:_\{?\w+\}?)? )?   # f(x), V_1:V_2
    | \\(?:theta|alpha|beta|gamma|lambda|mu|phi|omega)
    | \|? (?:m?[ ]?\\angle[ ]?)? [A-Z]{2,3} \|?                # AB, |AB|, m\angle ABC
    | \\frac[ ]?\{[A-Z]{2}\}[ ]?\{[A-Z]{2}\}                   # the ratio of AB to CD
    | \([a-zA-Z](?:[ ]?,[ ]?[a-zA-Z])+\)                       # (x,y)
    | [A-Za-z][a-z]+ (?:[ ][a-z]+)*                            # the area
    """,
    re.VERBOSE,
)
"""What stands before `=` and only names the value."""
_VARIABLE = re.compile(r"[a-zA-Z]|\\theta")
_COMPARES = re.compile(r"(<=?|>=?|\\[lg]eq?(?:slant)?(?![a-zA-Z])|\\[lg]t(?![a-zA-Z])|≤|≥)")
_STRICT = ("<", ">", "\\lt", "\\gt")
_SEMICOLON = re.compile(";")
_COMMA = re.compile(r" ?, ?(?:(?:and|or)\b ?)?| ?\b(?:and|or)\b ?")
_COMMA_NOT_OF_THOUSANDS = re.compile(r" ?,(?!\d{3}(?!\d)) ?(?:(?:and|or)\b ?)?| ?\b(?:and|or)\b ?")
_SET_NOTATION = re.compile(r"\\(?:cup|cap|in|setminus|mathbb|begin)(?![a-zA-Z])|[<>≤≥|]|\\[lg]")
"""In sets that are not written as a list of their elements."""
LIST, SET, TUPLE = "", "{}", "()"
"""Brackets of collections; those of intervals are `[]`, `[)`, `(]`, and `()` like a pair's."""


@dataclass(frozen=True)
class Collection:
    """Several values, and the brackets that say whether order and number count; a list has none."""

    brackets: str
    elements: list[str]


def equal(truth: str, answer: str) -> bool:
    """The same mathematical object.

    Order counts in tuples, closedness in intervals, the number of times in lists, the base in numbers with one. A unit
    may be left out, but not replaced by another. Letters alone are a word or a name, not a product, and digits apart
    from one another are not one number, unless in groups of thousands.
    """
    (ours, our_units), (theirs, their_units) = cleaned(truth), cleaned(answer)
    if differ(our_units, their_units):
        return False
    spelled = plain(ours), plain(theirs)
    if spelled[0] == spelled[1]:
        return True
    if all(map(str.isalpha, spelled)) and not any(map(collection, (ours, theirs))):
        return False
    if any(map(_APART.search, spelled)) and "\\" not in "".join(spelled):
        return False
    if not plain(theirs) or any(_WITH_BASE.fullmatch(plain(text)) for text in (ours, theirs)):
        return False
    intervals = as_interval(ours), as_interval(theirs)
    if not (_COMPARES.search(ours) and _COMPARES.search(theirs)) or all(map(collection, intervals)):
        ours, theirs = intervals
    first, second = collection(ours), collection(theirs)
    if first and second:
        return _same_collection(first, second)
    if first or second:
        is_enumerated = any(one and one.brackets in (LIST, SET) for one in (first, second))
        may_be_set = _SET_NOTATION.search(theirs if first else ours) is not None
        return (may_be_set or not is_enumerated) and verified(ours, theirs)
    return _same_value(ours, theirs)


def cleaned(text: str) -> tuple[str, set[str]]:
    """The text without what does not change the value: spacing, signs and words of units; and these units."""
    units = {"dollar"} if "\\$" in text else set[str]()
    for old, new in _SPELLINGS.items():
        text = text.replace(old, new)
    text = _SPACING.sub(" ", _ROOT.sub(r"\\sqrt{\1}", text))
    for unit, sign in _SIGNS.items():
        text, count = sign.subn("", text)
        if count:
            units.add(unit)
    text, named = split_unit(_ORDINAL.sub("", text.strip()).rstrip("."))
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", _TEXT.sub(r"\1", text).strip().rstrip("."))
    return _PREFIX.sub("", text), units | named


def plain(text: str) -> str:
    """A cleaned answer in one spelling, without what it calls its value."""
    is_list = ", " in text
    text = _SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), "=".join(_sides(text)))
    text = re.sub(r"_\{(\w+)\}", r"_\1", re.sub(r"(?<!\d) | (?!\d)", "", text))
    text = text.replace(",", "") if _THOUSANDS.fullmatch(text) and not is_list else text
    text = re.sub(r"^\(([a-zA-Z]+)\)$", r"\1", text)
    return text.lower() if text.isalpha() and len(text) > 1 else text


def as_interval(text: str) -> str:
    """`1 < x \\le 3` as `(1,3]`, `x < 1 or x > 3` as a union, whichever way round; any other text as it is."""
    parts = text.split(" or ")
    intervals = [_interval(part.strip()) for part in parts]
    return "\\cup".join(found for found in intervals if found) if all(intervals) else text


def collection(text: str) -> Collection | None:
    """The elements of a list, set, tuple or interval; None of anything else, or of less than two."""
    brackets, inner = _outer_brackets(text)
    elements = _elements(inner)
    if brackets in (LIST, SET):
        elements = [sign for element in elements for sign in _both_signs(element)]
    names = [_EQUALS.split(element)[0].strip() for element in elements if _EQUALS.search(element)]
    if brackets == LIST and len(elements) == len(set(names)):  # x=1, y=2
        brackets, elements = TUPLE, [element for _, element in sorted(zip(names, elements, strict=True))]
    return Collection(brackets, elements) if len(elements) > 1 else None


def verified(truth: str, answer: str) -> bool:
    """What math-verify says of two values, equations or sets."""
    from math_verify import verify

    gold, target = _parsed(truth), _parsed(answer)
    return bool(gold and target) and verify(gold, target, timeout_seconds=TIMEOUT_S)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> list[Any]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    kept = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=kept)]
    return parse(f"\\boxed{{{text}}}", config, parsing_timeout=TIMEOUT_S)


def _same_collection(first: Collection, second: Collection) -> bool:
    ours, theirs, brackets = first.elements, second.elements, {first.brackets, second.brackets}
    if brackets == {SET}:
        ours, theirs = _distinct(ours), _distinct(theirs)
    if len(ours) != len(theirs):
        return False
    if brackets <= {LIST, SET}:
        return _same_in_any_order(ours, theirs)
    return (len(brackets) == 1 or brackets == {LIST, TUPLE}) and all(map(equal, ours, theirs))


def _distinct(elements: list[str]) -> list[str]:
    return list({plain(cleaned(element)[0]): element for element in elements}.values())


def _same_in_any_order(ours: list[str], theirs: list[str]) -> bool:
    left = list(theirs)
    for one in ours:
        found = next((i for i, other in enumerate(left) if equal(one, other)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _same_value(ours: str, theirs: str) -> bool:
    """Values; equations, whichever way they are written; a value and the sides of a chain of equal ones."""
    both_are_equations = all(_EQUALS.search(text) for text in (ours, theirs))
    sides, others = _sides(ours), _sides(theirs)
    if sides == [ours] and others == [theirs]:
        return verified(ours, theirs)
    if min(len(sides), len(others)) == 1 and all(equal(side, other) for side in sides for other in others):
        return True
    return both_are_equations and verified(ours, theirs)


def _sides(text: str) -> list[str]:
    """The sides of an equation but for those that only name the value, such as the `x` of `x = 5`."""
    sides = [side.strip() for side in _split(text, _EQUALS)] if len(_elements(text)) == 1 else [text]
    return [side for side in sides if side and not _NAME.fullmatch(side)] or sides[1:] or sides


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The parts of a text between separators that stand outside of all brackets."""
    depths = list(accumulate((char in "([{") - (char in ")]}") for char in text))
    parts, start = list[str](), 0
    for found in separator.finditer(text):
        if depths[found.start()] == 0:
            parts.append(text[start : found.start()])
            start = found.end()
    return [*parts, text[start:]]


def _elements(text: str) -> list[str]:
    if _THOUSANDS.fullmatch(text):
        return [text]
    parts = [part.strip() for part in _split(text, _SEMICOLON) if part.strip()]
    if len(parts) < 2:
        spaced = re.search(r", | and | or ", text)
        parts = _split(text, _COMMA_NOT_OF_THOUSANDS if spaced else _COMMA)
    return [part.strip() for part in parts if part.strip()]


def _outer_brackets(text: str) -> tuple[str, str]:
    """The brackets around the whole text, and what is in them; none and the text, where there are none."""
    depths = list(accumulate((char in "([{") - (char in ")]}") for char in text))
    opening = 2 if text.startswith("\\{") else 1
    if text[:opening] not in ("(", "[", "{", "\\{") or text[-1:] not in (")", "]", "}") or 0 in depths[opening:-1]:
        return LIST, text
    inner = text[opening:-1].removesuffix("\\")
    return LIST if text[0] == "{" else text[opening - 1] + text[-1], inner.strip()


def _both_signs(text: str) -> list[str]:
    return [text] if text.count("\\pm") != 1 else [text.replace("\\pm", sign).strip(" +") for sign in ("+", "-")]


def _interval(text: str) -> str | None:
    """The interval that a chain of inequalities in one variable says; None of any other text."""
    parts = [part.strip() for part in _COMPARES.split(text)]
    signs = parts[1::2]
    rising = {sign[0] in "<≤" or sign.startswith("\\l") for sign in signs}
    if len(parts) not in (3, 5) or len(rising) > 1:
        return None
    if rising == {False}:
        parts.reverse()
    if len(parts) == 3:
        parts = ["-\\infty", "<", *parts] if _VARIABLE.fullmatch(parts[0]) else [*parts, "<", "\\infty"]
    low, above, variable, below, high = parts
    if not _VARIABLE.fullmatch(variable) or re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", low + high):
        return None
    return f"{'(' if above in _STRICT else '['}{low},{high}{')' if below in _STRICT else ']'}"
