"""How large a formula is: whether its value, or what it expands to, can be written down at all. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

_DIGITS = 100_000  # of a number
_TERMS = 1000  # of a power or product that is expanded
_STEPS = 100_000  # of a sum or product over a range
_DEPTH, _EXPONENT = 15, 4  # levels of nested brackets, and levels that an exponent counts for
_TOKEN = re.compile(r"\d+(?:\.\d+)?|\\[A-Za-z]+|\\.|\*\*|\S")
_UNSEEN = re.compile(r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|\\[,;:! ]|(?<=\d)(?:,|\{,\})(?=\d{3})|[$]")
_SEPARATORS = {*"+-,;=<>&", r"\\", r"\pm", r"\mp", r"\cup", r"\cap", r"\le", r"\leq", r"\ge", r"\geq", r"\in", r"\to"}
_OPENING, _CLOSING = {*"([{", r"\{"}, {*")]}", r"\}"}
_FACTORS = {r"\frac", r"\dfrac", r"\tfrac", r"\cfrac", r"\sqrt", r"\cdot", r"\times", r"\div", "/", "*", "|", "."}
_CHOOSE = {r"\binom", r"\dbinom", r"\tbinom"}


class _TooLargeError(Exception):
    """Beyond a limit above."""


@dataclass(slots=True)
class _Size:
    """Bounds of a part: `digits` before or behind the point; `terms`, once expanded; whether it has a `symbol`."""

    digits: float = 0.0
    terms: float = 1.0
    symbol: bool = False

    def __post_init__(self) -> None:
        if self.digits > _DIGITS:
            raise _TooLargeError

    @property
    def value(self) -> float:
        return 0.0 if self.symbol else 10 ** min(self.digits, 300.0)


def too_large(formula: str) -> bool:
    """Whether `formula` (LaTeX, or as in programs) is a tower of exponents, a factorial or an expansion beyond use."""
    try:
        _ = _Reader(_TOKEN.findall(_UNSEEN.sub("", formula))).all()
    except _TooLargeError:
        return True
    return False


class _Reader:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def all(self) -> None:
        while self.at < len(self.tokens):
            _ = self.total()
            self.at += 1  # a bracket that closes nothing

    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def taken(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1] if self.at <= len(self.tokens) else ""

    def total(self) -> _Size:
        """What stands up to the next closing bracket: sums, lists, equations of products."""
        parts: list[_Size] = []
        while True:
            before = self.at
            part = self.product()
            parts += [part] if self.at > before else []  # none in front of a sign
            if self.next() not in _SEPARATORS:
                break
            self.at += 1
        parts = parts or [_Size()]
        symbols = [part for part in parts if part.symbol]
        terms = sum(part.terms for part in symbols) + (len(symbols) < len(parts)) if symbols else 1.0
        return _Size(max(part.digits for part in parts) + math.log10(len(parts)), terms, bool(symbols))

    def product(self) -> _Size:
        size = _Size()
        while self.next() and self.next() not in _SEPARATORS and self.next() not in _CLOSING:
            part = self.power()
            terms = size.terms * part.terms
            if min(size.terms, part.terms) > 1 and terms > _TERMS:
                raise _TooLargeError
            size = _Size(size.digits + part.digits, terms, size.symbol or part.symbol)
        return size

    def power(self) -> _Size:
        size = self.atom()
        while (mark := self.next()) in {"!", "^", "**", "_"}:
            self.at += 1
            if mark == "!":
                size = _factorial(size)
                continue
            while self.next() in {"-", "+"}:
                self.at += 1
            if mark == "_":
                _ = self.atom()
            else:
                size = _raised(size, self.deeper(self.power, _EXPONENT))
        return size

    def deeper(self, read: Callable[[], _Size], levels: int = 1) -> _Size:
        self.depth += levels
        if self.depth > _DEPTH:
            raise _TooLargeError
        size = read()
        self.depth -= levels
        return size

    def atom(self) -> _Size:
        token = self.taken()
        if token in _OPENING:
            size = self.deeper(self.total)
            self.at += 1
            return size
        if token[:1].isdecimal():
            return _Size(abs(math.log10(float(token) or 1.0)) if len(token) < 300 else len(token))
        if token in _CHOOSE:
            above, below = self.atom(), self.atom()
            return _Size(10 * min(above.value * math.log10(2), below.value * above.digits), symbol=above.symbol)
        if token == r"\Gamma":
            return _factorial(self.atom())
        if token in {r"\sum", r"\prod"}:
            return self.range()
        if token in _FACTORS:
            return _Size()  # what follows is read as factors
        return _Size(symbol=True)

    def range(self) -> _Size:
        while self.next() in {"_", "^"}:
            self.at += 1
            if self.atom().value > _STEPS:
                raise _TooLargeError
        return _Size(symbol=True)


def _factorial(size: _Size) -> _Size:
    return _Size(size.value * size.digits, symbol=size.symbol)


def _raised(base: _Size, exponent: _Size) -> _Size:
    if exponent.symbol:
        return _Size(symbol=True)
    times, terms = exponent.value, base.terms
    if terms > 1 and times > 1:
        terms = math.exp(min(700.0, math.lgamma(terms + times) - math.lgamma(terms) - math.lgamma(times + 1)))
        if terms > _TERMS:
            raise _TooLargeError
    return _Size(base.digits * times, terms, base.symbol)
