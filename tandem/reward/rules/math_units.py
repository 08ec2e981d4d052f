r"""The unit, or the counted things, behind a number: `42 dollars`, `5\text{ cm}^2`, `3.5 million people`.

Any phrase of English words counts as one, but for words that change the value (`5 thirds`, `101 base two`) or join it
to another (`5 or x`). Outside of `\text` a word must look like one: `5 abc` and `2 pi` are algebra.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

_POWER = r" ?(?:\^ ?\{? ?[23] ?\}?|²|³)?\.?$"
_TEXT_AT_END = re.compile(
    rf"(?<=[\w)}}!]) ?\\(?:text|textrm|textnormal|textbf|textit|mathrm|mbox|operatorname) ?\{{([^{{}}]*)\}}{_POWER}"
)
_WORD = r"[A-Za-z][A-Za-z.'’]*"
_WORDS_AT_END = re.compile(rf"(?:(?<=[\d)}}!])|(?<=\\pi))([ /-]*{_WORD}(?:[ /-]+{_WORD})*){_POWER}")
_SEPARATORS = re.compile(r"[ /-]+")
_OTHER_WORDS = re.compile(r"(?<![\\a-zA-Z])(?!sqrt|sin|cos|tan|log|min|max|gcd|lcm)[a-zA-Z]{3,}")
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALED = re.compile(rf"(?<![\w.,])(\d[\d,]*(?:\.\d+)?) ?(\\(?:text|mathrm|mbox) ?\{{ ?)?({'|'.join(_SCALES)})\b")
_DIMENSIONS: Sequence[Mapping[str, str]] = (
    {"millimeter": "mm millimetre", "centimeter": "cm centimetre", "meter": "m metre mtr", "kilometer": "km kilometre",
     "inch": "in", "foot": "ft feet", "yard": "yd", "mile": "mi"},
    {"milligram": "mg", "gram": "g gm", "kilogram": "kg kilo", "ton": "tonne", "pound": "lb", "ounce": "oz"},
    {"second": "s sec", "minute": "min", "hour": "h hr", "day": "", "week": "wk", "month": "", "year": "yr"},
    {"cent": "", "dollar": "usd buck", "euro": "eur", "rupee": "rs inr"},
    {"milliliter": "ml millilitre", "liter": "l litre", "gallon": "gal", "quart": "qt", "pint": "", "cup": ""},
    {"degree": "deg", "radian": "rad"}, {"percent": "percentage pct"}, {"am": "a.m", "pm": "p.m"},
    {"north": "", "south": ""}, {"east": "", "west": ""}, {"gain": "profit", "loss": ""},
    {"increase": "", "decrease": ""}, {"clockwise": "", "counterclockwise": "anticlockwise"},
)  # fmt: skip
"""Units that exclude one another -> their other spellings; the plural of each is understood."""
_UNITS = {
    spelling: {unit} for units in _DIMENSIONS for unit, others in units.items() for spelling in (unit, *others.split())
}
_UNITS |= {"mph": {"mile", "hour"}, **{word: {"kilometer", "hour"} for word in ("kph", "kmh", "kmph")}, "unit": set()}
_SHORT_WORDS = frozenset(
    """
    a an the of to per at on by for each old ago all now new far end out off up his her my it its sq cu cc dm hz kw mt
    pt st nd rd th gb mb tv cd dvd u.s age egg oil tea gum gas mix hot ad too red bus car
    dog cat toy pen box pie cow hen bag can jar row way man men job bar hat cap map key bee boy tie cell face decade
""".split()  # noqa: SIM905
)
"""Words that by their looks could be algebra."""
_POWERS = frozenset(("squared", "cubed"))
_NOT_UNITS = _SCALES.keys() | frozenset(
    """
    and or nor not no none never is are was if but base mod modulo plus minus over factorial choose root power pi
    infinity theta below negative debt wrong incorrect undefined one two three four five six seven eight nine ten
    half halves third thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths
    tenth tenths hundredth hundredths thousandth thousandths
""".split()  # noqa: SIM905
)
"""Words that change the value before them, or join it to another one."""


def split_unit(text: str) -> tuple[str, set[str]]:
    """The value without the words behind it, and the units that these name, each in one spelling."""
    text = _SCALED.sub(_multiplied, text)
    in_text = _TEXT_AT_END.search(text)
    found = in_text or _WORDS_AT_END.search(text)
    if not found:
        return text, set()
    value, phrase = text[: found.start()].strip(), found[1]
    words = [word.strip(".'’") for word in _SEPARATORS.split(phrase.strip(" /-")) if word]
    named = [_units_of(word) for word in words]
    if not _joins_nothing(words) or not _is_quantity(value, named) or not (in_text or _is_english(phrase, words)):
        return text, set()
    return value, set[str]().union(*(units for units in named if units))


def differ(units: set[str], others: set[str]) -> bool:
    """Both name units, and not the same: none in common, or other ones of one dimension."""
    if not units or not others or units.isdisjoint(others):
        return bool(units and others)
    dimensions = [(units & dimension.keys(), others & dimension.keys()) for dimension in _DIMENSIONS]
    return any(ours and theirs and ours.isdisjoint(theirs) for ours, theirs in dimensions)


def _multiplied(scaled: re.Match[str]) -> str:
    """`3.5 million` as `3500000`; a `\\text{` before the scale stays before what follows."""
    digits, opening, scale = scaled.groups()
    return f"{Decimal(digits.replace(',', '')) * _SCALES[scale]:f}{opening or ''}"


def _units_of(word: str) -> set[str] | None:
    """The units in a word, none of them in `units` itself; None where the word is not known to be a unit."""
    word = word.lower()
    singulars = (word, word.removesuffix("s"), word.removesuffix("es"))
    return next((_UNITS[singular] for singular in singulars if singular in _UNITS), None)


def _joins_nothing(words: Sequence[str]) -> bool:
    """The words leave the value before them as it is."""
    lowered = [word.lower() for word in words]
    return _NOT_UNITS.isdisjoint(lowered) and not (lowered and lowered[0] in _POWERS)


def _is_quantity(value: str, named: Sequence[set[str] | None]) -> bool:
    """A number, or an expression that a known unit follows; with words in it (`5 feet 6`) it is neither."""
    counts = re.search(r"\d", value) is not None or any(units is not None for units in named)
    return counts and not _OTHER_WORDS.search(value)


def _is_english(phrase: str, words: Sequence[str]) -> bool:
    """What stands outside of `\\text` is words; a unit of one letter has a space before it, or it is a variable."""
    return (len(words[0]) > 1 or phrase.startswith(" ")) and all(map(_is_word, words))


def _is_word(word: str) -> bool:
    lowered = word.lower()
    if _units_of(word) is not None or not _SHORT_WORDS.isdisjoint((lowered, lowered.removesuffix("s"))):
        return True
    spelled = set(lowered) & set("aeiou") and set(lowered) - set("abcdefxyz")
    return len(word) >= 4 and bool(spelled) and word in (lowered, lowered.capitalize())
