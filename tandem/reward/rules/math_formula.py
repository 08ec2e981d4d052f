r"""Formulas: the text of one, as LaTeX or as plain text, becomes a function of its variables.

What has two readings is no formula: `1/2x`, `\frac123`, `\sin x/2`, `f(x)`. Letters that differ in case differ.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from mpmath import mp

from tandem.reward.rules import math_numbers as numbers
from tandem.reward.rules.math_numbers import FUNCTION_NAMES, NotRealError, NoValueError, Number, is_real

MAX_DEPTH = 40
"""Of brackets in brackets, roots of roots and the like."""
MAX_STEPS = 100_000
"""Of the evaluations of one comparison; a root or a function is ten."""
_MAX_TERMS = 1000
_END = r"(?![a-zA-Z])"
_MIXED = re.compile(r"(\d+) ?\\[dtc]?frac ?(?:\{ ?(\d+) ?\}|(\d)) ?(?:\{ ?(\d+) ?\}|(\d))(?!\d)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot) ?\{ ?(\d{1,300}) ?\}(?:\.\.\.|…|\\[lc]?dots(?![a-zA-Z]))?")
_DOTS = re.compile(r"(\d*)\.(\d{0,40}?)(\d{1,40}?)\3+(?:\.\.\.|…|\\[lc]?dots(?![a-zA-Z]))")
_NUMBER = re.compile(r"((?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+)(?:[eE]([-+]?\d{1,3})(?![\d.]))?(?!\d|_)")
_SIGN = re.compile(r"[-+]")
_OPERATOR = re.compile(rf"\\(?:cdot|times|ast|div){_END}|\*(?!\*)|/")
_DIVIDES = ("/", "\\div")
_COLON = re.compile(":")
_FACTOR = re.compile(rf"[a-zA-Z(\[{{|]|\\(?!(?:cdot|times|ast|div|rfloor|rceil|[lc]?dots|end|pm|mp){_END})[a-zA-Z]")
_DEGREE = re.compile(rf"\^ ?\{{? ?\\circ ?\}}?|\^ ?\\degree{_END}|\\degree{_END}|°")
_POWER = re.compile(r"\^|\*\*")
_WHOLE = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?!\d)")
_INVERSE = re.compile(r"\^ ?(?:\{ ?-1 ?\}|-1(?!\d))")
_NAME = re.compile(
    r"([a-zA-Z]|\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|"
    r"varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega|ell)(?![a-zA-Z]))"
    r"(?:_(?:\{([\w, ]+)\}|(\w)))?('*)"
)
_CALLED = re.compile(r"[fghPQFG](?:_.*)?'*")
"""Names that before a bracket are functions, of which nothing is known."""
_ARGUMENT = re.compile(r"[(\[{|]")
_TWICE = re.compile(r"[\^!]|\*\*")
_INDEX = re.compile(r"_ ?\{ ?([a-zA-Z]) ?=")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass
class Budget:
    """What a comparison may still spend."""

    steps: int = MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise NoValueError("too much to work out")


@dataclass
class Point:
    """Where a formula is evaluated: what its variables are."""

    variables: dict[str, Number]
    only_real: bool = False
    """A root of a negative number and the like are refused."""
    budget: Budget = field(default_factory=Budget)


Evaluate = Callable[[Point], Number]


@dataclass(frozen=True)
class Formula:
    """What the text says of its variables."""

    evaluate: Evaluate
    names: frozenset[str]


@lru_cache(maxsize=1024)
def formula(text: str) -> Formula | None:
    """The formula that a text is; None where it is none, or has more than one reading."""
    parser = _Parser(text)
    try:
        evaluate = parser.ratio()
        return Formula(evaluate, frozenset(parser.names)) if parser.is_at_end() else None
    except NoValueError:
        return None


def _constant(value: Fraction) -> Evaluate:
    return lambda point: value


def _sum(terms: Sequence[tuple[bool, Evaluate]]) -> Evaluate:
    """Of terms, each with whether it is subtracted."""

    def evaluate(point: Point) -> Number:
        total: Number = Fraction(0)
        for negative, term in terms:
            point.budget.spend()
            total = numbers.add(total, numbers.multiply(term(point), Fraction(-1 if negative else 1)))
        return total

    return terms[0][1] if len(terms) == 1 and not terms[0][0] else evaluate


def _product(factors: Sequence[tuple[bool, Evaluate]]) -> Evaluate:
    """Of factors, each with whether it divides."""

    def evaluate(point: Point) -> Number:
        total: Number = Fraction(1)
        for divides, factor in factors:
            point.budget.spend()
            total = (numbers.divide if divides else numbers.multiply)(total, factor(point))
        return total

    return factors[0][1] if len(factors) == 1 else evaluate


def _applied(operation: Callable[..., Number], *arguments: Evaluate) -> Evaluate:
    """An operation on values; at a point of real numbers alone, its result is to be real where these are."""

    def evaluate(point: Point) -> Number:
        point.budget.spend(10)
        values = [argument(point) for argument in arguments]
        try:
            result = operation(*values)
        except NoValueError:
            raise
        except (ArithmeticError, ValueError, NotImplementedError) as error:
            raise NoValueError(str(error)) from error
        if point.only_real and not is_real(result) and all(map(is_real, values)):
            raise NotRealError("not real")
        return result

    return evaluate


class _Parser:
    """One pass over a text; each method takes what it is named after, or raises NoValueError."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.bars = 0
        self.bound: list[str] = []
        self.names = set[str]()
        self.forms: Sequence[tuple[re.Pattern[str], Callable[[re.Match[str]], Evaluate]]] = (
            (_MIXED, self.mixed),
            (_REPEATING, lambda found: _constant(_repeating(*found.groups()))),
            (_DOTS, lambda found: _constant(_repeating(*found.groups()))),
            (_NUMBER, lambda found: _constant(_number(*found.groups()))),
            (re.compile(r"[(\[{]"), self.group),
            (re.compile(r"\|"), self.absolute),
            (re.compile(rf"\\l(floor|ceil){_END}"), self.rounded),
            (
                re.compile(rf"\\[dtc]?frac{_END}"),
                lambda _: _product([(False, self.argument()), (True, self.argument())]),
            ),
            (
                re.compile(rf"\\[dt]?binom{_END}"),
                lambda _: _applied(numbers.binomial, self.argument(), self.argument()),
            ),
            (re.compile(rf"\\?sqrt{_END}"), self.root),
            (re.compile(rf"\\(sum|prod){_END}(?: ?\\limits)?"), self.series),
            (re.compile(rf"\\?({'|'.join(sorted(FUNCTION_NAMES, key=len, reverse=True))}){_END}"), self.function),
            (re.compile(rf"\\?pi{_END}"), lambda _: lambda point: +mp.pi),
            (_NAME, self.name),
        )

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = self.peek(pattern)
        if found:
            self.at = found.end()
        return found

    def peek(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        while self.text[self.at : self.at + 1] == " ":
            self.at += 1
        return pattern.match(self.text, self.at)

    def expect(self, text: str) -> None:
        if not self.take(re.compile(re.escape(text))):
            raise NoValueError(f"no {text} at {self.at}")

    def is_at_end(self) -> bool:
        return self.text[self.at :].strip() == ""

    def ratio(self) -> Evaluate:
        first = self.total()
        return _product([(False, first), (True, self.total())]) if self.take(_COLON) else first

    def total(self) -> Evaluate:
        terms = [self.signed(self.product)]
        while self.peek(_SIGN):
            terms.append(self.signed(self.product))
        return _sum(terms)

    def signed(self, what: Callable[[], Evaluate]) -> tuple[bool, Evaluate]:
        negative = False
        while sign := self.take(_SIGN):
            negative ^= sign[0] == "-"
        return negative, what()

    def product(self) -> Evaluate:
        factors = [(False, self.power())]
        over = False
        while True:
            if operator := self.take(_OPERATOR):
                over = operator[0] in _DIVIDES
                factors.append((over, _sum([self.signed(self.power)])))
            elif self.follows():
                if over:
                    raise NoValueError("1/2x has two readings")
                factors.append((False, self.power()))
            else:
                return _product(factors)

    def follows(self) -> bool:
        """Another factor stands here, with no sign before it."""
        found = self.peek(_FACTOR)
        return found is not None and not (self.bars and found[0] == "|")

    def power(self) -> Evaluate:
        base = self.primary()
        while found := self.take(_DEGREE) or self.take(re.compile("!(?!!)")):
            base = (
                _applied(numbers.factorial, base)
                if found[0] == "!"
                else _product([(False, base), (False, lambda point: mp.pi / 180)])
            )
        if self.take(_POWER):
            base = _applied(numbers.power, base, self.exponent())
            if self.peek(_TWICE):
                raise NoValueError("2^3^4 has two readings")
        return base

    def exponent(self) -> Evaluate:
        if found := self.take(_WHOLE):  # x^10 is what x^{10} is
            return _constant(_number(found[0], None))
        return _sum([self.signed(self.argument)])

    def primary(self) -> Evaluate:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NoValueError("too deep")
        for pattern, made in self.forms:
            if found := self.take(pattern):
                value = made(found)
                self.depth -= 1
                return value
        raise NoValueError(f"no formula at {self.at}")

    def argument(self) -> Evaluate:
        """What a command takes: a group, or one digit, letter or command."""
        if found := self.take(re.compile(r"\d")):
            return _constant(Fraction(int(found[0])))
        return self.primary()

    def mixed(self, found: re.Match[str]) -> Evaluate:
        whole, over, under = (Fraction(int(group)) for group in found.groups() if group is not None)
        if not over < under:
            raise NoValueError("a whole number before a fraction that is more than one has two readings")
        return _constant(whole + over / under)

    def group(self, found: re.Match[str]) -> Evaluate:
        bars, self.bars = self.bars, 0
        inner = self.total()
        self.bars = bars
        self.expect(_CLOSING[found[0]])
        return inner

    def absolute(self, found: re.Match[str]) -> Evaluate:
        self.bars += 1
        inner = self.total()
        self.bars -= 1
        self.expect("|")
        return _applied(abs, inner)

    def rounded(self, found: re.Match[str]) -> Evaluate:
        inner, up = self.total(), found[1] == "ceil"
        self.expect(f"\\r{found[1]}")
        return _applied(lambda value: numbers.rounded(value, up), inner)

    def root(self, found: re.Match[str]) -> Evaluate:
        degree = _constant(Fraction(2))
        if self.take(re.compile(r"\[")):
            degree = self.total()
            self.expect("]")
        one = _constant(Fraction(1))
        return _applied(numbers.power, self.argument(), _product([(False, one), (True, degree)]))

    def function(self, found: re.Match[str]) -> Evaluate:
        name, base, exponent = found[1], None, None
        if name == "log" and self.take(re.compile("_")):
            base = self.argument()
        if self.take(_INVERSE):
            name = f"arc{name}"
        elif self.take(_POWER):
            exponent = self.exponent()
        if name not in FUNCTION_NAMES:
            raise NoValueError(f"the inverse {name}")
        value = _applied(lambda value: numbers.function(name, value), inner := self.function_argument())
        if base:
            logs = [_applied(lambda value: numbers.function("ln", value), one) for one in (inner, base)]
            value = _product([(False, logs[0]), (True, logs[1])])
        return _applied(numbers.power, value, exponent) if exponent else value

    def function_argument(self) -> Evaluate:
        """What is in brackets, or else all factors up to the next sign or function."""
        if self.peek(_ARGUMENT):
            inner = self.primary()
            if self.peek(_TWICE):
                raise NoValueError("sin(x)^2 has two readings")
            return inner
        factors = [(False, self.power())]
        while self.follows() and not self.peek(_FUNCTION):
            factors.append((False, self.power()))
        if self.peek(re.compile("/")):
            raise NoValueError("sin x/2 has two readings")
        return _product(factors)

    def series(self, found: re.Match[str]) -> Evaluate:
        index = self.take(_INDEX)
        if not index:
            raise NoValueError("a sum without an index")
        first = self.total()
        self.expect("}")
        self.expect("^")
        last = self.argument()
        self.bound.append(index[1])
        term = self.product()
        self.bound.pop()
        return _series(index[1], first, last, term, numbers.add if found[1] == "sum" else numbers.multiply)

    def name(self, found: re.Match[str]) -> Evaluate:
        letter, long, short, primes = found.groups()
        name = letter + (f"_{(long or short).replace(' ', '')}" if long or short else "") + primes
        if name in self.bound:
            return lambda point: point.variables[name]
        if name == "e":
            return lambda point: +mp.e
        if name == "i":
            return lambda point: mp.mpc(0, 1)
        if _CALLED.fullmatch(name) and self.peek(re.compile(r"\(")):
            raise NoValueError(f"{name} is a function of which nothing is known")
        self.names.add(name)
        return lambda point: point.variables[name]


_FUNCTION = re.compile(rf"\\?(?:{'|'.join(FUNCTION_NAMES)}){_END}")


def _series(name: str, first: Evaluate, last: Evaluate, term: Evaluate, join: Callable[..., Number]) -> Evaluate:
    def evaluate(point: Point) -> Number:
        low, high = first(point), last(point)
        if not all(isinstance(end, Fraction) and end.denominator == 1 for end in (low, high)):
            raise NoValueError("a sum without ends")
        if not 0 <= high - low < _MAX_TERMS:
            raise NoValueError("a sum of too many terms")
        total: Number = Fraction(0 if join is numbers.add else 1)
        for index in range(int(low), int(high) + 1):
            point.budget.spend()
            inner = Point({**point.variables, name: Fraction(index)}, point.only_real, point.budget)
            total = join(total, term(inner))
        return total

    return evaluate


def _number(digits: str, exponent: str | None) -> Fraction:
    return Fraction(digits.replace(",", "")) * Fraction(10) ** int(exponent or 0)


def _repeating(whole: str, fixed: str, block: str) -> Fraction:
    r"""0.1666... or 0.1\overline{6}: the digits with one block, less those without, over 10 * (10 - 1)."""
    start = whole + fixed
    return Fraction(int(start + block) - int(start or 0), 10 ** len(fixed) * (10 ** len(block) - 1))
