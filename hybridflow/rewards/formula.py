"""Values of formulas, and whether two are identical. Pure; bounded by the size of numbers and by `limited`.

A value is exact (a Fraction) where it is rational. Any other is worked out to more digits than the numbers in both
formulas could agree in by chance. Formulas of variables are compared at random points.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from functools import cache, lru_cache, reduce
from hashlib import blake2b
from typing import Any

from mpmath.ctx_mp import MPContext

from hybridflow.rewards.answer_grammar import Tree

_BITS, _PRECISION, _FACTORIAL = 50_000, 1_500, 5_000  # of a rational number; digits of any other; the largest `n!`
_CONSTANTS = {"e", "pi", "i", "infty", "empty", "reals"}
_EXACT = {"abs": abs, "floor": math.floor, "ceil": math.ceil, "max": max, "min": min}
_WHOLE = {"factorial": math.factorial, "binom": math.comb, "gcd": math.gcd, "lcm": math.lcm}
_MPMATH = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "binom": "binomial"}
_SMOOTH = ("sin", "cos", "tan", "exp", "sinh", "cosh", "tanh")
_OPERATIONS = {"+": operator.add, "*": operator.mul, "/": operator.truediv}
_deadline: ContextVar[float] = ContextVar("_deadline", default=math.inf)


class OutOfTime(Exception):  # noqa: N818  the limit of a comparison is up, which is no error of the formula
    pass


class Unfit(ArithmeticError):  # noqa: N818  as OutOfTime
    """A formula has no value, or none that is worked out."""


_NO_VALUE = (ArithmeticError, ValueError, TypeError)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Within, OutOfTime is raised after `seconds` of this thread's processor time: other processes cost none."""
    token = _deadline.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


class _Point:
    """Works out formulas where each variable is a random number within 2 of `near` (None: it has no value).

    `whole`: variables are whole numbers from 1 to 40.
    """

    def __init__(self, near: Fraction | None = None, digits: int = 60, whole: bool = False) -> None:
        self.near, self.whole, self.context = near, whole, _context(digits)

    def value(self, node: Tree) -> Any:
        """A Fraction, or a number of mpmath. Errors: _NO_VALUE; OutOfTime."""
        if time.thread_time() > _deadline.get():
            raise OutOfTime
        found = self._value(*node)
        if isinstance(found, Fraction):
            if found.numerator.bit_length() + found.denominator.bit_length() > 2 * _BITS:
                raise Unfit
        elif found and abs(self.context.mag(found)) > _BITS:
            raise Unfit
        return found

    def _value(self, kind: str, parts: Any) -> Any:
        if kind == "number":
            return parts[0]
        if kind == "name" and parts[0] in ("e", "pi", "i"):
            return self.context.j if parts[0] == "i" else +getattr(self.context, parts[0])
        if kind == "name" and parts[0] not in _CONSTANTS:
            return self._random(parts[0])
        if kind == "function" and isinstance(argument := self.value(parts[1]), Fraction):
            return self._random(f"{parts[0]}({argument})")
        values = [self.value(part) for part in parts if isinstance(part, Tree)]
        if kind == "call":
            return self._call(parts[0], values)
        if kind in ("percent", "degree"):
            return values[0] / Fraction(100) if kind == "percent" else self.inexact(values[0]) * self.context.pi / 180
        if kind == "^":
            return self.power(*values)
        if kind not in _OPERATIONS:
            raise Unfit
        exact = all(isinstance(value, Fraction) for value in values)
        return reduce(_OPERATIONS[kind], values if exact else map(self.inexact, values))

    def inexact(self, value: Any) -> Any:
        return self.context.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def _random(self, name: str) -> Fraction:
        if self.near is None:
            raise Unfit
        drawn = int.from_bytes(blake2b(f"{name} {self.near}".encode(), digest_size=7).digest())
        return Fraction(1 + drawn % 40) if self.whole else self.near + Fraction(drawn, 2**54) - 2

    def power(self, base: Any, exponent: Any) -> Any:
        """Roots of odd order of negative numbers are real."""
        if isinstance(exponent, Fraction) and isinstance(base, Fraction):
            if exponent.denominator > 1 and (root := _root(base, exponent.denominator)) is not None:
                base, exponent = root, Fraction(exponent.numerator)
            if exponent.denominator == 1:
                if abs(exponent) * (max(abs(base.numerator), base.denominator).bit_length() - 1) > _BITS:
                    raise Unfit
                return base**exponent.numerator
        base = self.inexact(base)
        if base and abs(exponent) * max(1, abs(self.context.mag(base))) > _BITS:
            raise Unfit
        order = exponent.denominator if isinstance(exponent, Fraction) else 0
        odd = order > 1 and order % 2 and not self.context.im(base) and base < 0
        found = (-base if odd else base) ** (exponent.numerator if order == 1 else self.inexact(exponent))
        return -found if odd and exponent.numerator % 2 else found

    def _call(self, name: str, values: list[Any]) -> Any:
        exact = all(isinstance(value, Fraction) for value in values)
        if name == "root":
            return self.power(values[0], 1 / values[1])
        if name in _EXACT and (exact or name in ("abs", "max", "min")):
            return Fraction(_EXACT[name](*values)) if exact else _EXACT[name](*map(self.inexact, values))
        if name in _WHOLE and exact and all(v.denominator == 1 and 0 <= v <= _FACTORIAL for v in values):
            return Fraction(_WHOLE[name](*(value.numerator for value in values)))
        numbers = list(map(self.inexact, values))
        if name == "log":
            return self.context.log(numbers[0]) / self.context.log(numbers[1] if numbers[1:] else 10)
        if name in ("gcd", "lcm") or (name != "ln" and any(one and self.context.mag(one) > 40 for one in numbers)):
            raise Unfit
        return getattr(self.context, _MPMATH.get(name, name))(*numbers)


@cache
def _context(digits: int) -> MPContext:
    context = MPContext()
    context.dps = digits
    return context


def _root(value: Fraction, index: int) -> Fraction | None:
    """The root of a number, None where it is not rational or not real."""
    if index > 100 or (value < 0 and index % 2 == 0):
        return None
    parts = abs(value.numerator), value.denominator
    context = _context(32 << (max(parts).bit_length() // (96 * index)).bit_length())
    over, under = (int(context.nint(context.root(part, index))) for part in parts)
    exact = (over**index, under**index) == parts
    return Fraction(over, under) * (-1 if value < 0 else 1) if exact else None


@lru_cache(4096)
def _worked_out(node: Tree) -> Any:
    try:
        return _Point().value(node)
    except _NO_VALUE:
        return None


def constant(node: Tree) -> Fraction | None:
    """The rational number that the expression is, or None."""
    found = node.parts[0] if node.kind == "number" else _worked_out(node)
    return found if isinstance(found, Fraction) else None


def approximate(node: Tree) -> Fraction | None:
    """A real constant, to 40 digits unless it is exact, or None."""
    found, context = _worked_out(node), _context(60)
    if found is None or isinstance(found, Fraction):
        return found
    real = context.isfinite(found) and abs(context.im(found)) <= abs(found) * 1e-40
    return Fraction(str(context.nstr(context.re(found), 40))) if real else None


def proportion(a: Tree, b: Tree) -> Fraction | None:
    """The rational number by which a is b at a random point."""
    try:
        factor = _Point(Fraction(5)).value(Tree("/", (a, b)))
        return factor if isinstance(factor, Fraction) else Fraction(float(factor)).limit_denominator(1000)
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
    """Whether two expressions have the same value wherever both have one: a real one, if they have any."""
    parts, digits = [*walk(a), *walk(b)], 60 + 3 * (_size(a) + _size(b))
    points, whole = _points(parts), any(map(_counts, parts))
    agreed: dict[bool, list[bool]] = {True: [], False: []}
    for near in points:
        point = _Point(near, 2 * min(digits, _PRECISION) + 30, whole)
        try:
            x, y = point.value(a), point.value(b)
            real = same = isinstance(x, Fraction) and isinstance(y, Fraction)
            if same:
                same = x == y
            elif digits > _PRECISION:
                return False
            else:
                small, (x, y) = point.context.mpf(10) ** -digits, map(point.inexact, (x, y))
                real = all(abs(point.context.im(side)) <= small * max(1, abs(side)) for side in (x, y))
                same = max(abs(x), abs(y)) < small or abs(x - y) < max(abs(x), abs(y)) * small
        except _NO_VALUE:
            continue
        if real and not same:
            return False
        agreed[real].append(bool(same))
    judged = agreed[True] or agreed[False]
    return all(judged) and len(judged) >= min(2, len(points))


def _points(parts: list[Tree]) -> list[Fraction]:
    """Where variables are tried: on both sides of the numbers in the formulas if absolute values or roots may turn."""
    if not any(map(variables, parts)):
        return [Fraction(0)]
    if not any(part.kind in ("call", "^") and variables(part) and not _smooth(part) for part in parts):
        return [Fraction(0), Fraction(2)]
    ends = sorted({Fraction(0), *(abs(part.parts[0]) for part in parts if part.kind == "number")})[-6:]
    steps = [end + step for end in ends for step in (0, 3)] + [ends[-1] + 6]
    return list(dict.fromkeys(sign * step for step in steps for sign in (1, -1)))


def _smooth(node: Tree) -> bool:
    if node.kind == "^":
        return (exponent := constant(node.parts[1])) is not None and exponent.denominator == 1
    return node.parts[0] in _SMOOTH


def _size(node: Tree) -> int:
    """A bound of the digits of its numbers once its powers are worked out."""
    if node.kind == "number":
        return (node.parts[0].numerator.bit_length() + node.parts[0].denominator.bit_length()) // 3
    inner = sum(_size(part) for part in node.parts if isinstance(part, Tree))
    if node.kind == "^" and (exponent := constant(node.parts[1])) is not None:
        return inner + int(min(10**6, abs(exponent) * _size(node.parts[0])))
    return 2 * inner if node.kind == "call" else inner


def _counts(node: Tree) -> bool:
    """Whether its variables are whole numbers: `n!`, `(-1)^n`."""
    if node.kind == "^":
        return (constant(node.parts[0]) or 0) < 0 and bool(variables(node.parts[1]))
    return node.parts[0] in ("factorial", "binom") and bool(variables(node))
