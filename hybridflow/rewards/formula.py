"""Values of formulas, and whether two are identical. Pure; bounded by the size of numbers and by `limited`.

Formulas with rational values are compared by these: constants as they are, others at random points modulo a prime
(where unequal rational functions agree with a probability below 1e-70). All others are compared by more digits than the numbers in both
could agree by chance, wherever both are real, or both complex if they never are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from functools import cache
from hashlib import blake2b
from typing import Any

from mpmath.ctx_mp import MPContext

from hybridflow.rewards.answer_grammar import Tree, number, product

_PRIME = 2**255 - 19
_BITS, _PRECISION = 50_000, 1_500  # of a rational number; digits of any other
_CONSTANTS = {"e", "pi", "i", "infty", "empty", "R"}
_EXACT = {"factorial": math.factorial, "binom": math.comb, "gcd": math.gcd, "lcm": math.lcm}
_SIMPLE = {"abs": abs, "floor": math.floor, "ceil": math.ceil, "max": max, "min": min}
_MPMATH = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "binom": "binomial"}
_deadline: ContextVar[float] = ContextVar("_deadline", default=math.inf)


class OutOfTime(Exception):  # noqa: N818  the limit of a comparison is up, which is no error of the formula
    pass


class Unfit(ArithmeticError):
    """A formula has no value of the asked kind."""


_NO_VALUE = (ArithmeticError, ValueError, TypeError)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Within, OutOfTime is raised after `seconds` of this thread's processor time: other processes cost none."""
    token = _deadline.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def evaluate(node: Tree, point: Fraction | None = None, context: Any = None, whole: bool = False) -> Any:
    """The value of an expression: a Fraction; at a `point` modulo _PRIME; with a `context` of mpmath a complex number.

    Variables are random numbers near `point` (from 1 to 40 if `whole`). Errors: _NO_VALUE; OutOfTime.
    """
    if time.thread_time() > _deadline.get():
        raise OutOfTime
    kind, parts = node
    modular = context is None and point is not None
    if kind == "number":
        return _converted(parts[0], point, context)
    if kind == "name" and (parts[0] in _CONSTANTS or point is None):
        if context is None or parts[0] not in ("e", "pi", "i"):
            raise Unfit
        return context.j if parts[0] == "i" else +getattr(context, parts[0])
    if kind == "name" or (kind == "function" and modular):
        value = _near(parts[0] if kind == "name" else f"{parts[0]}({evaluate(parts[1], point)})", point or Fraction(0))
        return _converted(Fraction(1 + int(abs(value) * 10**6) % 40) if whole else value, point, context)
    if kind in ("percent", "degree"):
        unit = (number(1), number(100)) if kind == "percent" else (Tree("name", ("pi",)), number(180))
        return evaluate(product(parts[0], Tree("/", unit)), point, context, whole)
    if kind == "^" and (exponent := constant(parts[1])) is not None:
        return _power(evaluate(parts[0], point, context, whole), exponent, point, context)
    if (kind == "^" and context is None) or kind not in ("+", "*", "/", "^", "call", "factorial"):
        raise Unfit
    if kind in ("call", "factorial") and modular:
        return _converted(evaluate(node), point, None)
    values = [evaluate(part, point, context, whole) for part in parts if isinstance(part, Tree)]
    if kind in ("call", "factorial"):
        name = parts[0] if kind == "call" else kind
        return _exact_call(name, *values) if context is None else _numeric_call(name, context, *values)
    found = values[0]
    for value in values[1:]:
        value = _inverse(value) if kind == "/" and modular else 1 / value if kind == "/" else value
        found = (
            found + value if kind == "+" else _numeric_power(found, value, context) if kind == "^" else found * value
        )
        found = found % _PRIME if modular else found
        if context is None and found.numerator.bit_length() + found.denominator.bit_length() > 2 * _BITS:
            raise Unfit
    return found


def _converted(value: Fraction, point: Fraction | None, context: Any) -> Any:
    if context is not None:
        return context.mpf(value.numerator) / value.denominator
    return value if point is None else value.numerator * _inverse(value.denominator) % _PRIME


def _inverse(value: int) -> int:
    if value % _PRIME == 0:
        raise ZeroDivisionError
    return pow(value, -1, _PRIME)


def _power(base: Any, exponent: Fraction, point: Fraction | None, context: Any) -> Any:
    """Roots of odd order of negative numbers are real."""
    if context is None and point is not None:
        if exponent.denominator != 1:
            raise Unfit
        return pow(base if exponent >= 0 else _inverse(base), abs(exponent.numerator), _PRIME)
    if context is None:
        if exponent.denominator != 1:
            base, exponent = _exact_call("root", base, Fraction(exponent.denominator)), Fraction(exponent.numerator)
        if abs(exponent) * (max(abs(base.numerator), base.denominator).bit_length() - 1) > _BITS:
            raise Unfit
        return base**exponent.numerator
    if exponent.denominator == 1:
        return _numeric_power(base, exponent.numerator, context)
    odd = exponent.denominator % 2 and not context.im(base) and base < 0
    found = _numeric_power(-base if odd else base, context.mpf(exponent.numerator) / exponent.denominator, context)
    return -found if odd and exponent.numerator % 2 else found


def _numeric_power(base: Any, exponent: Any, context: Any) -> Any:
    if base and abs(exponent) * max(1, abs(context.mag(base))) > _BITS:
        raise Unfit
    return base**exponent


def _exact_call(name: str, *values: Fraction) -> Fraction:
    if name in _SIMPLE:
        return Fraction(_SIMPLE[name](*values))
    numbers = [value.numerator for value in values]
    if name == "root" and values[1].denominator == 1 and 0 < numbers[1] < 100 and (values[0] >= 0 or numbers[1] % 2):
        sign = -1 if values[0] < 0 else 1
        return sign * Fraction(*(_root(abs(part), numbers[1]) for part in (numbers[0], values[0].denominator)))
    if name not in _EXACT or any(value.denominator != 1 or not 0 <= value <= 5000 for value in values):
        raise Unfit
    return Fraction(_EXACT[name](*numbers))


def _root(value: int, index: int) -> int:
    """The root of a whole number. Errors: Unfit where it is not whole."""
    low, high = 0, 1 << (value.bit_length() // index + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**index < value else (low, middle)
    if low**index != value:
        raise Unfit
    return low


def _numeric_call(name: str, context: Any, *values: Any) -> Any:
    if name == "root":
        return _power(values[0], Fraction(1, int(context.re(values[1]))), None, context)
    if name == "log":
        return context.log(values[0]) / context.log(values[1] if values[1:] else 10)
    if name in ("abs", "max", "min"):
        return _SIMPLE[name](*values)
    if name in ("gcd", "lcm") or (name != "ln" and any(value and context.mag(value) > 40 for value in values)):
        raise Unfit
    return getattr(context, _MPMATH.get(name, name))(*values)


def constant(node: Tree) -> Fraction | None:
    """The rational number that the expression is, or None."""
    try:
        return node.parts[0] if node.kind == "number" else evaluate(node)
    except _NO_VALUE:
        return None


def approximate(node: Tree) -> Fraction | None:
    """A real constant, to 40 digits unless it is exact, or None."""
    if (exact := constant(node)) is not None:
        return exact
    try:
        context = _context(60)
        value = evaluate(node, None, context)
        return (
            Fraction(str(context.nstr(context.re(value), 45))) if abs(context.im(value)) <= abs(value) * 1e-40 else None
        )
    except _NO_VALUE:
        return None


def walk(node: Tree) -> Iterator[Tree]:
    yield node
    for part in node.parts:
        if isinstance(part, Tree):
            yield from walk(part)


def variables(node: Tree) -> set[str]:
    return {part.parts[0] for part in walk(node) if part.kind == "name"} - _CONSTANTS


def identical(a: Tree, b: Tree) -> bool:
    """Whether two expressions have the same value wherever both have one."""
    x, y = constant(a), constant(b)
    if x is not None and y is not None:
        return x == y
    points = _points(a, b)
    try:
        return all(evaluate(a, point) == evaluate(b, point) for point in points)
    except ZeroDivisionError:
        return False
    except _NO_VALUE:
        pass
    digits = 60 + 3 * (_size(a) + _size(b))
    if digits > _PRECISION:
        return False
    context, whole = _context(2 * digits + 30), any(map(_counts, (*walk(a), *walk(b))))
    small, agreed = context.mpf(10) ** -digits, {True: list[bool](), False: list[bool]()}
    for point in points:
        try:
            values = [evaluate(side, point, context, whole) for side in (a, b)]
        except _NO_VALUE:
            continue
        real = all(abs(context.im(value)) <= small * max(1, abs(value)) for value in values)
        scale = max(map(abs, values))
        agreed[real].append(bool(scale < small or abs(values[0] - values[1]) < scale * small))
        if real and not agreed[real][-1]:
            return False
    judged = agreed[True] or agreed[False]
    return all(judged) and len(judged) >= min(3, len(points))


def _points(a: Tree, b: Tree) -> list[Fraction]:
    """Where variables are tried: on both sides of the numbers in the formulas if absolute values or roots may turn."""
    parts = [*walk(a), *walk(b)]
    if not any(map(variables, (a, b))):
        return [Fraction(0)]
    if not any(part.kind in ("call", "^") and variables(part) and not _smooth(part) for part in parts):
        return [Fraction(0), Fraction(2)]
    ends = sorted({abs(part.parts[0]) for part in parts if part.kind == "number"})[-5:]
    return [sign * (end + step) for end in [Fraction(0), *ends] for step in (0, 3) for sign in (1, -1)]


def _smooth(node: Tree) -> bool:
    if node.kind == "^":
        return (exponent := constant(node.parts[1])) is not None and exponent.denominator == 1
    return node.parts[0] in ("sin", "cos", "tan", "exp", "sinh", "cosh", "tanh")


def _near(name: str, point: Fraction) -> Fraction:
    """A random number within 2 of the point."""
    return point + Fraction(int.from_bytes(blake2b(f"{name} {point}".encode(), digest_size=7).digest()), 2**54) - 2


def _size(node: Tree) -> int:
    """A bound of the digits of its numbers once its powers are worked out."""
    if node.kind == "number":
        return (node.parts[0].numerator.bit_length() + node.parts[0].denominator.bit_length()) // 3
    inner = sum(_size(part) for part in node.parts if isinstance(part, Tree))
    if node.kind == "^" and (exponent := constant(node.parts[1])) is not None:
        return inner + int(min(10**6, abs(exponent) * _size(node.parts[0])))
    return 2 * inner if node.kind in ("call", "factorial") else inner


def _counts(node: Tree) -> bool:
    """Whether its variables are whole numbers: `n!`, `(-1)^n`."""
    if node.kind == "^":
        return (constant(node.parts[0]) or 0) < 0 and bool(variables(node.parts[1]))
    return (node.kind == "factorial" or node.parts[:1] == ("binom",)) and bool(variables(node))


@cache
def _context(digits: int) -> MPContext:
    context = MPContext()
    context.dps = digits
    return context
