"""Values and equations of formulas, compared at several points: no rewriting, no rounding, and a bound on the work."""

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from mpmath import mp

from tandem.reward.rules.math_formula import Budget, Evaluate, Formula, Point, formula
from tandem.reward.rules.math_numbers import NoValueError, Number, add, agree, inexact, is_real, multiply

LEAST_DIGITS = 6
"""What a decimal has to have, from the first that is not zero, to stand for a number that never ends."""
_ENOUGH = 3
"""Points that have to agree."""
_DECIMAL = re.compile(r"([-+]?)(\d*)\.(\d+)")
_PLACES = (
    (1, "+"),
    (Fraction(1, 5), "+"),
    (4, "+"),
    (1, "+-"),
    (Fraction(1, 3), "-+"),
    (2, "-"),
    (Fraction(1, 7), "--+"),
)
"""The sizes of the points at which formulas are compared, and the signs that their variables have in turn."""
_UNDER = (11, 13, 17, 19, 23, 29, 31)

Sides = tuple[str, str]
"""What stands on the left and on the right of a sign."""


def same_value(first: str, second: str) -> bool:
    """Both are formulas and have the same value, whatever their variables are.

    A decimal of six digits or more also is a number that never ends as a decimal, when these are its digits, rounded or
    cut: 0.333333 is 1/3, and 0.33 is not.
    """
    one, other = formula(first), formula(second)
    if one is None or other is None:
        return False
    names = one.names | other.names
    same = _at_enough_points(names, lambda at: agree(lambda: one.evaluate(at), lambda: other.evaluate(at)))
    return same or _is_decimal_of(first, other) or _is_decimal_of(second, one)


def same_equation(first: Sides, second: Sides, oriented: bool = False) -> bool:
    """One is the other but for terms on the other side and a constant factor; of inequalities (`oriented`) one that is
    positive."""
    one, other = _difference(first), _difference(second)
    if one is None or other is None or one.names != other.names or not one.names:
        return False
    start = next(_points(one.names))

    def proportional(at: Point) -> bool:
        base = Point(start, at.only_real, at.budget)
        ratio = multiply(one.evaluate(base), other.evaluate(base))
        if ratio == 0 or (oriented and not (is_real(ratio) and inexact(ratio).real > 0)):
            return False
        if at.variables != start and agree(lambda: one.evaluate(at), lambda: one.evaluate(base)):
            return False  # x = x + 1 says nothing of x
        return agree(
            lambda: multiply(one.evaluate(at), other.evaluate(base)),
            lambda: multiply(other.evaluate(at), one.evaluate(base)),
        )

    return _at_enough_points(one.names, proportional)


def _difference(sides: Sides) -> Formula | None:
    left, right = (formula(side) for side in sides)
    if left is None or right is None:
        return None
    minus = Fraction(-1)
    evaluate: Evaluate = lambda at: add(left.evaluate(at), multiply(right.evaluate(at), minus))  # noqa: E731
    return Formula(evaluate, left.names | right.names)


def _at_enough_points(names: frozenset[str], test: Callable[[Point], bool]) -> bool:
    """The test holds wherever there are values, first of all where every root and logarithm is real."""
    budget = Budget()
    for only_real in (True, False):
        held = 0
        for variables in _points(names):
            try:
                if not test(Point(variables, only_real, budget)):
                    return False
            except NoValueError:
                continue
            held += 1
        if held >= (_ENOUGH if names else 1):
            return True
    return False


def _points(names: frozenset[str]) -> Iterator[dict[str, Number]]:
    """What the variables are: fractions without order, the same in each call; without variables one point."""
    for place, (size, signs) in enumerate(_PLACES if names else _PLACES[:1]):
        yield {
            name: size * Fraction(int(f"{signs[index % len(signs)]}1") * (23 + 12 * index + 5 * place), _UNDER[place])
            for index, name in enumerate(sorted(names))
        }


def _is_decimal_of(text: str, exact: Formula) -> bool:
    """The text is a decimal of enough digits, and these are the first ones of a number that does not end."""
    found = _DECIMAL.fullmatch(text.strip())
    if not found or exact.names or len((found[2] + found[3]).lstrip("0")) < LEAST_DIGITS:
        return False
    with mp.workdps(len(text) + 30):
        try:
            value = exact.evaluate(Point({}))
        except NoValueError:
            return False
        if _ends(value) or not is_real(value):
            return False
        scaled = inexact(value).real * 10 ** len(found[3])
        return int(f"{found[1]}{found[2]}{found[3]}") in (int(mp.nint(scaled)), int(scaled))


def _ends(value: Number) -> bool:
    """The number is a fraction that some power of ten makes whole."""
    if not isinstance(value, Fraction):
        return False
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
