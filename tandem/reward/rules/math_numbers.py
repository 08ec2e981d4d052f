"""Numbers of formulas: fractions exactly, everything else to a hundred digits, and none that takes long to work out."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from mpmath import mp

Number = Any
"""A `Fraction`, or a real or complex number of mpmath (which has no types) at the precision that is set."""
MAX_BITS = 20_000
"""Of a numerator, a denominator or an exponent of two: what is larger, or nearer to zero, has no value."""
MAX_FACTORIAL = 1000
_EXP_MOST = 13_000
_FUNCTIONS = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")},
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
}
_FUNCTIONS |= {"ln": "ln", "lg": "log10", "log": "log10"}
FUNCTION_NAMES = tuple(_FUNCTIONS)


class NoValueError(ValueError):
    """The text is no formula, has two readings, divides by zero, or its value is too large."""


class NotRealError(NoValueError):
    """A root, a logarithm or the like of real numbers is not real."""


def is_real(value: Number) -> bool:
    return isinstance(value, Fraction | mp.mpf) or value.imag == 0


def inexact(value: Number) -> Number:
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def checked(value: Number) -> Number:
    """The value, where it is finite and not too large to work with."""
    if isinstance(value, Fraction):
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    else:
        bits = 0 if value == 0 else abs(mp.mag(value)) if mp.isfinite(value) else math.inf
    if bits > MAX_BITS:
        raise NoValueError("too large, or nothing at all")
    return value


def add(first: Number, second: Number) -> Number:
    first, second = _alike(first, second)
    return checked(first + second)


def multiply(first: Number, second: Number) -> Number:
    first, second = _alike(first, second)
    return checked(first * second)


def divide(first: Number, second: Number) -> Number:
    if second == 0:
        raise NoValueError("a division by zero")
    first, second = _alike(first, second)
    return checked(first / second)


def power(base: Number, exponent: Number) -> Number:
    """The power; of a negative number and one over an odd number the real root."""
    if base == 0:
        if is_real(exponent) and inexact(exponent).real > 0:
            return Fraction(0)
        raise NoValueError("a power of zero that is none")
    if isinstance(exponent, Fraction):
        if exponent.denominator == 1 and isinstance(base, Fraction):
            return _whole_power(base, exponent.numerator)
        if exponent.denominator in (3, 5, 7, 9) and is_real(base) and inexact(base).real < 0:
            root = power(-base, exponent)
            return -root if exponent.numerator % 2 else root
    base, exponent = inexact(base), inexact(exponent)
    if abs(exponent) * abs(mp.ln(base)) > _EXP_MOST:
        raise NoValueError("too large a power")
    return checked(mp.power(base, exponent))


def function(name: str, value: Number) -> Number:
    """A function of one number, by its name in LaTeX; `log` is to base ten."""
    value = inexact(value)
    if name in ("exp", "sinh", "cosh", "tanh") and abs(value) > _EXP_MOST:
        raise NoValueError("too large an exponent")
    return checked(getattr(mp, _FUNCTIONS[name])(value))


def factorial(value: Number) -> Number:
    if not is_real(value) or abs(value) > MAX_FACTORIAL:
        raise NoValueError("a factorial that is none, or too large")
    if isinstance(value, Fraction) and value.denominator == 1 and value >= 0:
        return checked(Fraction(math.factorial(value.numerator)))
    return checked(mp.gamma(inexact(value) + 1))


def binomial(n: Number, k: Number) -> Number:
    if not is_real(n) or not is_real(k) or max(abs(n), abs(k)) > MAX_FACTORIAL:
        raise NoValueError("a binomial coefficient that is none, or too large")
    if all(isinstance(one, Fraction) and one.denominator == 1 and one >= 0 for one in (n, k)):
        return Fraction(math.comb(n.numerator, k.numerator))
    return checked(mp.binomial(inexact(n), inexact(k)))


def rounded(value: Number, up: bool) -> Number:
    """The floor, or with `up` the ceiling."""
    if not is_real(value):
        raise NoValueError("a floor or a ceiling of a complex number")
    if not isinstance(value, Fraction):
        value = int((mp.ceil if up else mp.floor)(value.real))
    return Fraction(math.ceil(value) if up else math.floor(value))


def agree(first: Callable[[], Number], second: Callable[[], Number]) -> bool:
    """The same number, as far as a hundred digits show: fractions exactly; else the difference is nothing beside the
    numbers, or shrinks with the digits that it is worked out to."""
    with mp.workdps(50):
        one, other = first(), second()
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return one == other
        rough = abs(add(one, multiply(other, Fraction(-1))))
    with mp.workdps(100):
        one, other = inexact(first()), inexact(second())
        fine = abs(one - other)
        return bool(fine <= (abs(one) + abs(other)) * mp.mpf(10) ** -60 or fine <= rough * mp.mpf(10) ** -30)


def _alike(first: Number, second: Number) -> tuple[Number, Number]:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first, second
    return inexact(first), inexact(second)


def _whole_power(base: Fraction, exponent: int) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > MAX_BITS:
        raise NoValueError("too large a power")
    return base**exponent
