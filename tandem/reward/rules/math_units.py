r"""The unit, or the counted things, behind a number: `42 dollars`, `5\text{ cm}^2`, `3.5 million people`, `5厘米`.

Any phrase of English words counts as one, but for words that change the value (`5 thirds`, `101 base two`) or join it
to another (`5 or x`). Outside of `\text` a word must look like one: `5 abc` and `2 pi` are algebra.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

_POWER = r" ?(?:\^ ?\{? ?([23]) ?\}?)?\.?$"
_TEXT_AT_END = re.compile(rf"(?<=[\w)}}!]) ?\\text ?\{{([^{{}}]*)\}}{_POWER}")
_WORD = r"[A-Za-z][A-Za-z.'’]*"
_WORDS_AT_END = re.compile(rf"(?:(?<=[\d)}}!])|(?<=\\pi))([ /-]*{_WORD}(?:[ /-]+{_WORD})*){_POWER}")
_CHINESE_AT_END = re.compile(rf"(?:(?<=[\d)}}!])|(?<=\\pi)) ?([\u4e00-\u9fff]{{1,6}}){_POWER}")
_PHRASE = re.compile(r"[^\W\d_]?(?:[^\W\d_]|[ .,'’()/-])*")
"""What `\\text` may hold to be a unit or what is counted: no digits, no signs."""
_SEPARATORS = re.compile(r"[ /-]+")
_OTHER_WORDS = re.compile(r"(?<![\\a-zA-Z])(?!sqrt|sin|cos|tan|log|min|max|gcd|lcm)[a-zA-Z]{3,}")
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALES |= {"百": 100, "千": 1000, "万": 10**4, "亿": 10**8}
_SCALED = re.compile(
    rf"(?<![\w.,])(\d[\d,]*(?:\.\d+)?) ?(\\text ?\{{ ?)?({'|'.join(_SCALES)})(?:(?<=[a-z])\b|(?<=[^a-z])(?![米克瓦升]))"
)
_DIMENSIONS: Sequence[Mapping[str, str]] = (
    {"millimeter": "mm millimetre 毫米", "centimeter": "cm centimetre 厘米 公分", "decimeter": "dm 分米", 
     "meter": "m metre mtr 米 公尺", "kilometer": "km kilometre 千米 公里", "inch": "in 英寸",
     "foot": "ft feet 英尺", "yard": "yd 码", "mile": "mi 英里"},
    {"milligram": "mg 毫克", "gram": "g gm 克", "kilogram": "kg kilo 千克 公斤", "ton": "tonne 吨", "pound": "lb 磅",
     "ounce": "oz"},
    {"second": "s sec 秒", "minute": "min 分钟", "hour": "h hr 小时", "day": "天 日", "week": "wk 周",
     "month": "月 个月", "year": "yr 年 岁"},
    {"cent": "美分", "dollar": "usd buck 美元", "euro": "eur 欧元", "rupee": "rs inr",
     "yen": "jpy 日元", "yuan": "rmb cny 元"},
    {"milliliter": "ml millilitre 毫升", "liter": "l litre 升", "gallon": "gal", "quart": "qt", "pint": "", "cup": ""},
    {"hertz": "hz", "kilohertz": "khz"}, {"watt": "", "kilowatt": "kw"}, {"megabyte": "mb", "gigabyte": "gb"},
    {"degree": "deg 度", "radian": "rad 弧度"}, {"percent": "percentage pct"}, {"permille": ""},
    {"am": "a.m 上午", "pm": "p.m 下午"}, {"bc": "b.c bce", "ad": "a.d ce"}, {"north": "", "south": ""},
    {"east": "", "west": ""}, {"left": "", "right": ""}, {"up": "upward", "down": "downward"},
    {"forward": "ahead", "backward": "behind"}, {"gain": "profit win", "loss": ""}, {"increase": "", "decrease": ""},
    {"more": "", "less": "fewer"}, {"early": "earlier before", "late": "later after"}, {"ago": "", "hence": ""},
    {"clockwise": "", "counterclockwise": "anticlockwise"},
)  # fmt: skip
"""Units that exclude one another -> their other spellings; the plural of each is understood."""
_UNITS = {
    spelling: {unit} for units in _DIMENSIONS for unit, others in units.items() for spelling in (unit, *others.split())
}
_UNITS |= {"mph": {"mile", "hour"}, **{word: {"kilometer", "hour"} for word in ("kph", "kmh", "kmph")}, "unit": set()}
_UNITS |= {"cc": {"centimeter^3"}}
_MEASURES = _DIMENSIONS[:9]
"""What is measured in the units of an answer, and has to be the same in another one that names units."""
_RAISING = {**dict.fromkeys(("square", "sq", "平方"), "2"), **dict.fromkeys(("cubic", "cu", "立方"), "3")}
"""Words before a unit that say its power."""
_RAISED = {"squared": "2", "cubed": "3"}
"""Words behind it."""
_COUNTED = frozenset("个 只 人 张 条 块 支 辆 件 次 种 页 题 名 位 本 棵 颗 双 对 组 班 间 层 分 倍 步 元 单位".split())  # noqa: SIM905
"""What numbers of things are counted in, in Chinese."""
_SYMBOLS = frozenset("KNJWVALT")
"""Units of one letter, in `\\text`; outside of it these are variables."""
_SHORT_WORDS = frozenset(
    """
    a an the of to per at on by for each old ago all now new far end out off up his her my it its sq cu cc dm hz kw mt
    pt st nd rd th gb mb tv cd dvd u.s age egg oil tea gum gas mix hot ad too red bus car
    dog cat toy pen box pie cow hen bag can jar row way man men job bar hat cap map key bee boy tie cell face decade
""".split()  # noqa: SIM905
)
"""Words that by their looks could be algebra."""
_NOT_UNITS = _SCALES.keys() | frozenset(
    """
    and or nor not no none never is are was if but base mod modulo plus minus over factorial choose root power pi
    infinity theta below negative debt wrong incorrect undefined one two three four five six seven eight nine ten
    half halves third thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths
    tenth tenths hundredth hundredths thousandth thousandths isn't aren't without except versus
""".split()  # noqa: SIM905
)
"""Words that change the value before them, or join it to another one."""


def split_unit(text: str) -> tuple[str, set[str]]:
    """The value without the words behind it, and the units that these name, each in one spelling, with its power."""
    text = _SCALED.sub(_multiplied, text)
    if chinese := _CHINESE_AT_END.search(text):
        return _split_chinese(text, chinese)
    in_text = _TEXT_AT_END.search(text)
    found = in_text or _WORDS_AT_END.search(text)
    if not found or not _PHRASE.fullmatch(found[1].strip(" /-")):
        return text, set()
    value, phrase = text[: found.start()].strip(), found[1]
    words = [word.strip(".,'’()") for word in _SEPARATORS.split(phrase.strip(" /-")) if word.strip(".,'’()")]
    named = [{word} if in_text and word in _SYMBOLS else _units_of(word) for word in words]
    is_phrase = all(map(_is_symbol_or_word, words)) if in_text else bool(words) and _is_english(phrase, words)
    if not _joins_nothing(words) or not _is_quantity(value, named) or not is_phrase:
        return text, set()
    return value, _raised(words, named, found[2])


def differ(units: set[str], others: set[str]) -> bool:
    """Both name units, and not the same: none in common, others of one dimension, or one dimension more."""
    if not units or not others or units.isdisjoint(others):
        return bool(units and others)
    for dimension in _DIMENSIONS:
        ours, theirs = _of_dimension(dimension, units), _of_dimension(dimension, others)
        if ours.isdisjoint(theirs) and ((ours and theirs) or (dimension in _MEASURES and (ours or theirs))):
            return True
    return False


def _of_dimension(dimension: Mapping[str, str], named: set[str]) -> set[str]:
    return {unit for unit in named if unit.partition("^")[0] in dimension}


def _raised(words: Sequence[str], named: Sequence[set[str] | None], exponent: str | None) -> set[str]:
    """The units with their powers: `square feet` and `ft^2` as `foot^2`; an exponent is the last unit's."""
    units, power, last = set[str](), "", ""
    for word, found in zip(words, named, strict=True):
        if word.lower() in _RAISED and last:
            units = units - {last} | {f"{last}^{_RAISED[word.lower()]}"}
        if found:
            last = f"{min(found)}{power}"
            units |= {f"{unit}{power}" for unit in found}
        power = f"^{_RAISING[word.lower()]}" if word.lower() in _RAISING else ""
    if exponent and last in units:
        units = units - {last} | {f"{last}^{exponent}"}
    return units


def _split_chinese(text: str, found: re.Match[str]) -> tuple[str, set[str]]:
    """The same for a unit in Chinese, which has to be one that is known: other words may say anything."""
    word, power = found[1], found[2]
    for raising in ("平方", "立方"):
        if word.startswith(raising):
            word, power = word.removeprefix(raising), _RAISING[raising]
    units = _UNITS.get(word)
    if units is None and word not in _COUNTED:
        return text, set()
    return text[: found.start()].strip(), {f"{unit}^{power}" if power else unit for unit in units or ()}


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
    return _NOT_UNITS.isdisjoint(lowered) and not (lowered and lowered[0] in _RAISED)


def _is_quantity(value: str, named: Sequence[set[str] | None]) -> bool:
    """A number, or an expression that a known unit follows; with words in it (`5 feet 6`) it is neither."""
    counts = re.search(r"\d", value) is not None or any(units is not None for units in named)
    return counts and not _OTHER_WORDS.search(value)


def _is_symbol_or_word(word: str) -> bool:
    """In `\\text` one letter is a unit that is known; `3\\mathrm{i}` is no three."""
    return len(word) > 1 or _units_of(word) is not None or word in {*_SYMBOLS, "C", "F", "a"}


def _is_english(phrase: str, words: Sequence[str]) -> bool:
    """What stands outside of `\\text` is words; a unit of one letter has a space before it, or it is a variable."""
    return (len(words[0]) > 1 or phrase.startswith(" ")) and all(map(_is_word, words))


def _is_word(word: str) -> bool:
    lowered = word.lower()
    if _units_of(word) is not None or not _SHORT_WORDS.isdisjoint((lowered, lowered.removesuffix("s"))):
        return True
    spelled = set(lowered) & set("aeiou") and set(lowered) - set("abcdefxyz")
    return len(word) >= 4 and bool(spelled) and word in (lowered, lowered.capitalize())
