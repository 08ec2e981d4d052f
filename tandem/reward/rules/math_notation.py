"""The notation of an answer, without what only says how it looks: spacing, fonts, colours, boxes, full-width signs.

Units, signs of percent and degrees behind the value are taken apart from it.
"""

import re
from collections.abc import Mapping

from tandem.reward.rules.math_numbers import FUNCTION_NAMES
from tandem.reward.rules.math_units import split_unit

FULL_WIDTH: Mapping[int, int | str] = {
    **dict.fromkeys((0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF), ""),  # no width at all
    **{0xFEE0 + code: code for code in range(0x21, 0x7F)},
    **str.maketrans(
        {"　": " ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "、": ",", "。": ".", "【": "[", "】": "]"}
    ),
    **str.maketrans(
        {"￥": "¥", "−": "-", "–": "-", "∶": ":", "′": "'", "’": "'", "⁄": "/", "∕": "/", "‐": "-", "‑": "-"}
    ),
}
_FRACTIONS = dict(zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "12 13 23 14 34 15 25 35 45 16 56 18 38 58 78".split(), strict=True))  # noqa: SIM905
_SPELLINGS = {
    "{,}": ",", "...": "\\ldots ", "…": "\\ldots ", ",\\! ": ",", ",\\!": ",", 
    "\\cfrac": "\\frac", "\\dfrac": "\\frac", "\\tfrac": "\\frac",
    "\\langle": "(", "\\rangle": ")", "⟨": "(", "⟩": ")", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[",
    "\\rbrack": "]", "\\lvert": "|", "\\rvert": "|", "\\vert": "|", "\\varnothing": "\\emptyset", "∅": "\\emptyset ",
    "\\{\\}": "\\emptyset ", "\\mathbb{R}": "(-\\infty,\\infty)", "ℝ": "(-\\infty,\\infty)", "×": "\\times ",
    "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "±": "\\pm ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ",
    "≈": "\\approx ", "≠": "\\neq ", "π": "\\pi ", "θ": "\\theta ", "∞": "\\infty ", "²": "^2", "³": "^3",
    "∠": "\\angle ",
    "\\geqslant": "\\ge", "\\leqslant": "\\le", "\\geq": "\\ge", "\\leq": "\\le", "≥": "\\ge ", "≤": "\\le ",
    "\\gt": ">", "\\lt": "<", "‰": "\\text{ permille}",
    **{one: f"\\frac{{{a}}}{{{b}}}" for one, (a, b) in _FRACTIONS.items()},
}  # fmt: skip
_REPLACED = re.compile(
    "|".join(
        re.escape(one) + ("(?![a-zA-Z])" if one.startswith("\\") and one[-1].isalpha() else "")
        for one in sorted(_SPELLINGS, key=len, reverse=True)
    )
)
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]{2,}|[⁰¹⁴⁵⁶⁷⁸⁹]"), re.compile("[₀-₉]+")
_SMALL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉", "0123456789-0123456789")
_COLOURS = re.compile(
    r"\\color ?(?:\[[^]]*\] ?)?\{[^{}]*\}|\\(?:textcolor|colorbox) ?(?:\[[^]]*\] ?)?\{[^{}]*\}(?= ?\{)|"
    r"\\fcolorbox ?\{[^{}]*\} ?\{[^{}]*\}(?= ?\{)|\\(?:hspace|vspace|h?phantom)\*? ?\{[^{}]*\}"
)
_WRAPPING = re.compile(
    r"\\(?:boxed|fbox|framebox|mathord|mathbin|underline|emph|mathbf|boldsymbol|bm|pmb|mathit|mathsf|mathtt|"
    r"mathnormal|ensuremath|displaylines|textcolor)(?![a-zA-Z]) ?(?=\{)"
)
_TEXTS = re.compile(r"\\(?:textbf|textit|textrm|textnormal|textsf|texttt|textsc|textup|mathrm|mbox|hbox) ?(?=\{)")
_OLD_FONT = re.compile(r"\{ ?\\(?:rm|bf|it|sf|tt|em)(?![a-zA-Z]) ?([^{}]*)\}")
_OPEN_FONT = re.compile(r"\\(?:rm|bf|it|sf|tt|em)(?![a-zA-Z])")
"""Up to the end of what it stands in."""
_OPERATOR = re.compile(rf"\\operatorname\*? ?\{{ ?({'|'.join(FUNCTION_NAMES)}) ?\}}")
_LAYOUT = re.compile(
    r"\\(?:left|right) ?\.|\\(?:left|right|displaystyle|textstyle|scriptstyle|limits|nolimits|strut|mathstrut|hfill|"
    r"noindent|nobreak|tiny|scriptsize|footnotesize|small|large|Large|LARGE|huge|Huge|normalsize|[bB]igg?[lrm]?|"
    r"bfseries|mdseries|itshape|upshape|rmfamily|sffamily|ttfamily|normalfont|boldmath)(?![a-zA-Z])"
)
_SPACING = re.compile(r"(?<!\\)\\[!,;:> ()\[\]]|\\(?:q?quad|thinspace|enspace)(?![a-zA-Z])|~|\\?\$|\s+")
_EMPHASIS = re.compile(r"\s*(\*\*|__|`)(.+)\1\s*", re.DOTALL)
_ROOT = re.compile(r"√ ?(\d+|\w|\([^()]*\))")
_PERCENT = re.compile(r"\\?%(?! ?\d)")
_DEGREE = re.compile(
    r"(?:\^ ?\{? ?\\circ ?\}?|\^ ?\\degree|\\degree|°)(?: ?(?:\\text ?\{ ?)?[CF]\b ?\}?)?(?= ?[)\]}]*$)"
)
_ANGLE_OF = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_ORDINAL = re.compile(r"(?<=\d) ?\^ ?\{? ?(?:\\text ?\{)? ?(?:st|nd|rd|th) ?\}*$")
_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")
_MIXED_NUMBER = re.compile(r"(?<![\d/.,_^])(\d+) (\d+) ?/ ?(\d+)(?![\d/])")
_PREFIX = re.compile(r"^(?:\\approx(?![a-zA-Z])|[£€¥₹]|Rs\.|USD|[a-zA-Z] ?\\in(?![a-zA-Z])) ?")
_CURRENCIES = {"\\$": "dollar", "£": "pound", "€": "euro", "₹": "rupee", "Rs.": "rupee", "¥": "yen", "USD": "dollar"}
_SENTENCE = re.compile(
    r"^(?:(?:so|thus|hence|therefore),? )?(?:(?:the|my|our) )?(?:(?:final|correct|right) )?answer(?: is ?:?| ?[:=]) ?|"
    r"^(?:所以|因此|故)?,?(?:最终|正确)?(?:的)?(?:答案|结果)(?:是|为|等于)?[: ]*",
    re.IGNORECASE,
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_IN_BASE = re.compile(rf"^(\()?([0-9A-Fa-f][0-9A-Fa-f, ]*)(?(1)\)) ?_ ?\{{? ?\(? ?(\d+|{'|'.join(_BASES)}) ?\)? ?\}}?$")


def cleaned(text: str) -> tuple[str, set[str]]:
    """The text without what does not change the value: looks, and the units behind it; and these units."""
    text = undecorated(text).lstrip()
    units = {unit for sign, unit in _CURRENCIES.items() if text.startswith(sign) or (sign == "\\$" and sign in text)}
    if text.startswith("$") and text.count("$") == 1:
        units.add("dollar")
    text = _SENTENCE.sub("", _SPACING.sub(" ", text).strip())
    while whole := _TEXT.fullmatch(text):
        text = whole[1].strip()
    text, percents = _PERCENT.subn("", text)
    text, degrees = _without_degrees(text)
    text, named = split_unit(_ORDINAL.sub("", text.strip()).rstrip("."))
    text, others = _without_degrees(text)
    units |= {unit for unit, count in (("percent", percents), ("degree", degrees + others)) if count}
    while _TEXT.search(text):
        text = _TEXT.sub(r"\1", text)
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", _SENTENCE.sub("", text.strip().rstrip(".")))
    return _IN_BASE.sub(_in_base, _without_braces(_PREFIX.sub("", text))), units | named


def _without_degrees(text: str) -> tuple[str, int]:
    """The text without a sign of degrees at its end, unless it has a sine or the like, and how many there were."""
    text = text.strip().rstrip(".")
    return (text, 0) if _ANGLE_OF.search(text) else _DEGREE.subn("", text)


def undecorated(text: str) -> str:
    """One character or command for each sign, and no fonts, colours, boxes or sizes."""
    text = _LOWERED.sub(lambda found: f"_{{{found[0].translate(_SMALL)}}}", text.translate(FULL_WIDTH))
    text = _RAISED.sub(lambda found: f"^{{{found[0].translate(_SMALL)}}}", text)
    text = _REPLACED.sub(lambda found: _SPELLINGS[found[0]], text)
    text = _OPERATOR.sub(r"\\\1", _LAYOUT.sub(" ", _COLOURS.sub("", text)))
    text = _OPEN_FONT.sub("", _OLD_FONT.sub(r"\\text{\1}", _TEXTS.sub(r"\\text", text)))
    text = _ROOT.sub(r"\\sqrt{\1}", _unwrapped(text))
    while emphasis := _EMPHASIS.fullmatch(text):
        text = emphasis[2]
    return text


def braces_end(text: str, start: int) -> int | None:
    """Where the group ends that begins with the brace at `start`; None where it is never closed."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return brace.start()
    return None


def _unwrapped(text: str) -> str:
    """The text with what fonts, colours and boxes stand around in their place."""
    at = 0
    while found := _WRAPPING.search(text, at):
        end = braces_end(text, found.end())
        if end is None:
            at = found.end()
        else:
            at = found.start()
            space = " " if "box" in found[0] else ""
            text = f"{text[:at]}{space}{text[found.end() + 1 : end]}{space}{text[end + 1 :]}"
    return text


def _in_base(found: re.Match[str]) -> str:
    """One spelling of a number in a base, `1010_2`; in base ten, the number."""
    digits, base = re.sub("[, ]", "", found[2]), found[3]
    base = f"{_BASES.index(base) + 2}" if base in _BASES else base
    return digits if base == "10" and digits.isdigit() else f"{digits}_{base}"


def _without_braces(text: str) -> str:
    """The text without braces around all of it."""
    text = text.strip()
    while text.startswith("{") and braces_end(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text
