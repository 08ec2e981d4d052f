r"""Are two answers the same mathematical object? `\frac12` and `0.5` are, `2, 3` and `x=3` or `x=2`, `42` and `42 m`.

An answer is taken apart as far as its notation says what it is: a list, a set, a tuple or an interval, a matrix, a
quantity with a unit, sides of an equation. What is left is spelled alike, or a formula that is evaluated.
"""

import re
from dataclasses import dataclass
from itertools import accumulate

from tandem.reward.rules.math_compare import same_equation, same_value
from tandem.reward.rules.math_notation import cleaned
from tandem.reward.rules.math_numbers import FUNCTION_NAMES
from tandem.reward.rules.math_units import differ

_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_THOUSANDS_IN = re.compile(r"(?<![\d,_^])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,] )(?<![\d.,])\d{1,3}(?: \d{3})+(?![ ]?\d)")
_WORDS = re.compile(
    rf"(?=.*(?<![a-zA-Z])(?!(?:sqrt|{'|'.join(FUNCTION_NAMES)})(?![a-zA-Z]))[a-zA-Z]{{4}})[^\d\\^_=+*<>|]*", re.DOTALL
)
"""Four letters in a row, and none of the signs of formulas: `left-handed` is no difference of products."""
_TIME = re.compile(r"0?(\d{1,2}):([0-5]\d)")
_APPROXIMATELY = re.compile(r"\\approx(?![a-zA-Z])")
_MATRIX = re.compile(
    r"\\begin ?\{(?P<kind>[pbB]?(?:small)?matrix|array|cases)\}(?: ?\{[lcr| ]*\})?(?P<cells>(?:(?!\\begin).)*)"
    r"\\end ?\{(?P=kind)\}",
    re.DOTALL,
)
_AROUND_MATRIX = re.compile(r"[(\[](.*)[)\]]", re.DOTALL)
_ROWS = re.compile(r"\\\\(?:\[[^\]]*\])?")
_UNION = re.compile(r"\\cup(?![a-zA-Z])")
_EQUALS = re.compile(r"(?<![<>=!])=(?!=)")
_NAME = re.compile(
    r"""
    [a-zA-Z] (?:_\{?\w+\}?)? '?                              # x, a_1
    (?: \([a-zA-Z]\) | [ ]?:[ ]? [a-zA-Z] (?:_\{?\w+\}?)? )?   # f(x), V_1:V_2
    | [a-zA-Z][ ]?\^[ ]?\{?[ ]?-1[ ]?\}?[ ]?\([a-zA-Z]\)        # f^{-1}(x)
    | \\(?:theta|alpha|beta|gamma|lambda|mu|phi|omega)
    | \|? (?:m?[ ]?\\angle[ ]?)? [A-Z]{2,3} \|?                # AB, |AB|, m\angle ABC
    | \\frac[ ]?\{[A-Z]{2}\}[ ]?\{[A-Z]{2}\}                   # the ratio of AB to CD
    | \([a-zA-Z](?:[ ]?,[ ]?[a-zA-Z])+\)                       # (x,y)
    | [A-Za-z][a-z]+ (?:[ ][a-z]+)*                            # the area
    """,
    re.VERBOSE,
)
"""What stands before `=` and only names the value."""
_VARIABLE = re.compile(r"(?:[a-zA-Z]|\\(?:theta|alpha|beta|gamma|lambda|mu|phi|omega))(?:_\{?\w+\}?)?'*")
"""A name of which another name is another variable: `x=5` is not `y=5`."""
_COMPARES = re.compile(r"(<=?|>=?|\\[lg]e(?![a-zA-Z]))")
_STRICT = ("<", ">")
_SEMICOLON = re.compile(";")
_COMMA = re.compile(r" ?, ?(?:(?:and|or)\b ?)?| ?\b(?:and|or)\b ?")
_COMMA_NOT_OF_THOUSANDS = re.compile(r" ?,(?!\d{3}(?!\d)) ?(?:(?:and|or)\b ?)?| ?\b(?:and|or)\b ?")
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
    may be left out, but not replaced by another. Letters alone are a word or a name, not a product.
    """
    (ours, our_units), (theirs, their_units) = cleaned(truth), cleaned(answer)
    if differ(our_units, their_units):
        return False
    ours, theirs = _exact(ours), _exact(theirs)
    if _are_of_other_variables(ours, theirs):
        return _same_relations(ours, theirs)
    spelled = plain(ours), plain(theirs)
    if spelled[0] == spelled[1] or not spelled[1]:
        return spelled[1] != ""
    are_words = all(map(str.isalpha, spelled)) or any(map(_WORDS.fullmatch, spelled))
    if are_words and not any(map(collection, (ours, theirs))):
        return False
    matrix, other = _matrix(ours), _matrix(theirs)
    if matrix or other:
        return matrix is not None and other is not None and _same_matrix(matrix, other)
    written, intervals = (ours, theirs), (as_interval(ours), as_interval(theirs))
    if not (_COMPARES.search(ours) and _COMPARES.search(theirs)) or all(map(collection, intervals)):
        ours, theirs = intervals
    unions = [_split(text, _UNION) for text in (ours, theirs)]
    if max(map(len, unions)) > 1:
        return len(unions[0]) == len(unions[1]) and _same_in_any_order(*unions)
    first, second = collection(ours), collection(theirs)
    if first and second:
        is_range = (ours, theirs) != written and LIST in (first.brackets, second.brackets)  # 1 < x < 3 and 1, 3
        return not is_range and _same_collection(first, second)
    if first or second:
        return False
    return _same_value(_element(ours), _element(theirs))


def plain(text: str) -> str:
    """A cleaned answer in one spelling, without what it calls its value."""
    is_list = ", " in text
    text = _SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), "=".join(_sides(text)))
    text = re.sub(r"_\{(\w+)\}", r"_\1", re.sub(r"(?<!\d) | (?!\d)", "", text))
    text = text.replace(",", "") if _THOUSANDS.fullmatch(text) and not is_list else text
    text = re.sub(r"^\(?([a-zA-Z]+)\)$", r"\1", text).removeprefix("+")
    text = f"{int(time[1])}:{time[2]}" if (time := _TIME.fullmatch(text)) else text
    return text.lower() if (text.isalpha() and len(text) > 1) or _WORDS.fullmatch(text) else text


def as_interval(text: str) -> str:
    """`1 < x \\le 3` as `(1,3]`, `x < 1 or x > 3` as a union, whichever way round; any other text as it is."""
    parts = text.split(" or ")
    intervals = [_interval(part.strip()) for part in parts]
    return "\\cup".join(found for found in intervals if found) if all(intervals) else text


def collection(text: str) -> Collection | None:
    """The elements of a list, set, tuple or interval; None of anything else, or of less than two."""
    sides = _sides(text)
    brackets, inner = _outer_brackets(sides[0] if len(sides) == 1 else text)
    elements = _elements(inner, brackets)
    if brackets in (LIST, SET):
        elements = [sign for element in elements for sign in _both_signs(element)]
    names = [_EQUALS.split(element)[0].strip() for element in elements if _EQUALS.search(element)]
    if brackets == LIST and len(elements) == len(set(names)):  # x=1, y=2
        brackets, elements = TUPLE, [element for _, element in sorted(zip(names, elements, strict=True))]
    return Collection(brackets, elements) if len(elements) > 1 else None


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
    """Values; relations, whichever way they are written; a value and the sides of a chain of equal ones."""
    if all(map(_TIME.fullmatch, (ours, theirs))):
        return False
    sides, others = _sides(ours), _sides(theirs)
    if sides == [ours] and others == [theirs]:
        return _same_relations(ours, theirs) or same_value(ours, theirs)
    if min(len(sides), len(others)) == 1 and all(equal(side, other) for side in sides for other in others):
        return True
    return _same_relations(ours, theirs)


def _same_relations(ours: str, theirs: str) -> bool:
    """Equations, or inequalities, of the same sides but for the order of both, moved terms and a factor."""
    left = _relations(theirs)
    relations = _relations(ours)
    for sign, *sides in relations:
        same = (i for i, (other, *others) in enumerate(left) if sign == other and _same_sides(sign, sides, others))
        found = next(same, None)
        if found is None:
            return False
        left.pop(found)
    return bool(relations) and not left


def _same_sides(sign: str, sides: list[str], others: list[str]) -> bool:
    return same_equation((sides[0], sides[1]), (others[0], others[1]), oriented=sign != "=")


def _relations(text: str) -> list[tuple[str, str, str]]:
    """Sign, smaller and greater side of each relation in a chain of them; the sign is `<`, `<=` or `=`."""
    parts = [part.strip() for part in re.split(r"(<=?|>=?|\\[lg]e(?![a-zA-Z])|=)", text)]
    relations: list[tuple[str, str, str]] = []
    for left, sign, right in zip(parts[::2], parts[1::2], parts[2::2], strict=False):
        kind = "=" if sign == "=" else "<" if sign in _STRICT else "<="
        relations.append((kind, right, left) if sign[0] == ">" or sign == "\\ge" else (kind, left, right))
    return relations


def _are_of_other_variables(ours: str, theirs: str) -> bool:
    """Each says what variables are, and these are not the same, or nothing else: `x = 5` and `y = 5`, `x = y`."""
    (names, are_all), (others, _) = _variables(ours), _variables(theirs)
    return bool(names and others) and (names != others or are_all)


def _variables(text: str) -> tuple[set[str], bool]:
    """The variables that stand alone on one side of a relation, and whether it has no other sides."""
    relations = _relations(text) if len(_elements(text)) == 1 else []
    sides = {side.replace("{", "").replace("}", "") for _, *pair in relations for side in pair}
    names = {side for side in sides if _VARIABLE.fullmatch(side)}
    return names, names == sides


def _exact(text: str) -> str:
    """What stands before an `≈`, unless it only names the value."""
    before, *others = (part.strip() for part in _split(text, _APPROXIMATELY))
    return others[0] if others and (not before or _NAME.fullmatch(before.rstrip(" ="))) else before


def _element(text: str) -> str:
    """The only element of a set, or the text."""
    brackets, inner = _outer_brackets(text)
    return inner if brackets == SET else text


def _matrix(text: str) -> tuple[str, list[list[str]]] | None:
    """Whether it is a matrix or a distinction of cases, and its rows; None of any other text."""
    name, equals, named = text.partition("=")
    text = named.strip() if equals and _NAME.fullmatch(name.strip()) else text
    inner = _AROUND_MATRIX.fullmatch(text)
    found = _MATRIX.fullmatch(text) or (_MATRIX.fullmatch(inner[1].strip()) if inner else None)
    if not found:
        return None
    rows = [row.split("&") for row in _ROWS.split(found["cells"]) if row.strip()]
    return "cases" if found["kind"] == "cases" else "matrix", [[cell.strip() for cell in row] for row in rows]


def _same_matrix(ours: tuple[str, list[list[str]]], theirs: tuple[str, list[list[str]]]) -> bool:
    if ours[0] != theirs[0] or [*map(len, ours[1])] != [*map(len, theirs[1])]:
        return False
    cells = zip((cell for row in ours[1] for cell in row), (cell for row in theirs[1] for cell in row), strict=True)
    return all(cell == other or equal(cell, other) for cell, other in cells)


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


def _elements(text: str, brackets: str = LIST) -> list[str]:
    """The parts between semicolons or commas. Without brackets, or beside spaced commas, one of thousands is none."""
    parts = [part.strip() for part in _split(text, _SEMICOLON) if part.strip()]
    if len(parts) < 2:
        only_thousands = brackets == LIST and "," not in _THOUSANDS_IN.sub("", text)
        spaced = only_thousands or re.search(r", | and | or ", text)
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
    if not _VARIABLE.fullmatch(variable) or re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", f"{low} {high}"):
        return None
    return f"{'(' if above in _STRICT else '['}{low},{high}{')' if below in _STRICT else ']'}"
