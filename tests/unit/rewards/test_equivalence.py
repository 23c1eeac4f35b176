"""Which answers are the same: the table of kinds in both directions, and random pairs of known values."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hybridflow.rewards.match import same_answer
from tests.example_answers import DIFFERENT, SAME

ROWS = [
    (kind, *pair, right)
    for right, table in ((True, SAME), (False, DIFFERENT))
    for kind in table
    for pair in table[kind]
]


def test_the_table_is_large_enough():
    assert len({(answer, reference) for _, answer, reference, _ in ROWS}) >= 300
    assert len(SAME) >= 10
    assert len(DIFFERENT) >= 10


@pytest.mark.parametrize(("kind", "answer", "reference", "right"), ROWS, ids=lambda value: repr(value)[-30:])
def test_answers_of_each_kind(kind: str, answer: str, reference: str, right: bool):
    assert same_answer(answer, reference) is right
    assert same_answer(reference, answer) is right


# Each strategy draws (text, value); two texts are the same answer exactly if their values are equal.
small, digit = st.integers(-30, 30), st.integers(1, 9)
integers = st.integers(-(10**6), 10**6).map(lambda n: (str(n), Fraction(n)))
fractions = st.tuples(small, digit).map(lambda p: (rf"\frac{{{p[0]}}}{{{p[1]}}}", Fraction(*p)))
quotients = st.tuples(small, digit).map(lambda p: (f"{p[0]}/{p[1]}", Fraction(*p)))
powers = st.tuples(digit, st.integers(-40, 40)).map(lambda p: (f"{p[0]}^{{{p[1]}}}", Fraction(p[0]) ** p[1]))
scientific = st.tuples(digit, st.integers(-30, 30)).map(
    lambda p: (rf"{p[0]} \times 10^{{{p[1]}}}", Fraction(p[0]) * Fraction(10) ** p[1])
)
tenths = st.integers(-500, 500).map(lambda n: (f"{n / 10:.1f}", Fraction(n, 10)))
numbers = st.one_of(integers, fractions, quotients, powers, scientific, tenths)
products = st.tuples(fractions, powers).map(lambda p: (rf"{p[0][0]} \cdot {p[1][0]}", p[0][1] * p[1][1]))


def written(coefficients: tuple[int, ...]) -> str:
    terms = [f"{factor}{('', 'x', f'x^{power}')[min(power, 2)]}" for power, factor in enumerate(coefficients) if factor]
    return " + ".join(terms).replace("+ -", "- ") or "0"


def multiplied(roots: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    found = [1]
    for root in roots:
        found = [a - root * b for a, b in zip([0, *found], [*found, 0], strict=True)]
    return "".join(f"(x - {root})".replace("- -", "+ ") for root in roots), trimmed(tuple(found))


def trimmed(coefficients: tuple[int, ...]) -> tuple[int, ...]:
    while coefficients and not coefficients[-1]:
        coefficients = coefficients[:-1]
    return coefficients


sums = st.lists(st.integers(-4, 4), min_size=1, max_size=4).map(tuple).map(lambda c: (written(c), trimmed(c)))
factored = st.lists(st.integers(-4, 4), min_size=1, max_size=3).map(tuple).map(multiplied)
polynomials = st.one_of(sums, factored).filter(lambda p: len(p[1]) > 1)
elements = st.lists(st.one_of(integers, fractions), min_size=2, max_size=3, unique_by=lambda e: e[1])
sets = elements.map(lambda e: (rf"\{{{', '.join(text for text, _ in e)}\}}", frozenset(value for _, value in e)))
points = elements.map(lambda e: (f"({', '.join(text for text, _ in e)})", tuple(value for _, value in e)))
roots = st.tuples(digit, digit).map(lambda p: (rf"{p[0]}\sqrt{{{p[1]}}}", p[0] ** 2 * p[1]))
FACTORS = {
    "km": (1000, "m"),
    "m": (1, "m"),
    "cm": (Fraction(1, 100), "m"),
    "s": (1, "s"),
    "minutes": (60, "s"),
    "kg": (1, "kg"),
}
measures = st.tuples(digit, st.sampled_from(sorted(FACTORS))).map(
    lambda p: (rf"{p[0]}\text{{ {p[1]}}}", (p[0] * FACTORS[p[1]][0], FACTORS[p[1]][1]))
)
intervals = st.tuples(small, small, st.sampled_from("[("), st.sampled_from("])")).filter(lambda p: p[0] < p[1])
bounded = intervals.map(lambda p: (f"{p[2]}{p[0]}, {p[1]}{p[3]}", p))
related = intervals.map(
    lambda p: (rf"{p[0]} {'<' if p[2] == '(' else chr(92) + 'le'} x {'<' if p[3] == ')' else chr(92) + 'le'} {p[1]}", p)
)
waves = st.tuples(st.sampled_from(["sin", "cos"]), digit, digit).map(lambda p: (rf"{p[1]}\{p[0]}({p[2]}t)", p))
KINDS = {
    "numbers": st.one_of(numbers, products),
    "polynomials": polynomials,
    "sets": sets,
    "points": points,
    "units": measures,
    "intervals": st.one_of(bounded, related),
    "roots": roots,
    "waves": waves,
}
pairs = st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.tuples(KINDS[kind], KINDS[kind]))
others = st.one_of(*(kind for name, kind in KINDS.items() if name != "units"))  # a unit may be left out
mixed = st.tuples(others, others)


def rounds(a: Fraction, b: Fraction) -> bool:
    """Whether the rule for rounded decimals may apply: to decimals of two places or more."""
    return any((value * 10).denominator != 1 for value in (a, b)) and abs(a - b) < Fraction(1, 100)


def check(pair: tuple[tuple[str, Any], tuple[str, Any]]) -> None:
    (first, a), (second, b) = pair
    assume(not (isinstance(a, Fraction) and isinstance(b, Fraction) and a != b and rounds(a, b)))
    assert same_answer(first, second) is (a == b), (first, second)
    assert same_answer(first, first), first


def falsely_accepts(pair: tuple[tuple[str, Any], tuple[str, Any]]) -> bool:
    (first, a), (second, b) = pair
    return type(a) is not type(b) and same_answer(first, second)


@settings(max_examples=400, deadline=None)
@given(pairs)
@example((("10^{-30}", Fraction(1, 10**30)), ("10^{-31}", Fraction(1, 10**31))))
def test_random_pairs_of_a_kind(pair: tuple[tuple[str, Any], tuple[str, Any]]):
    check(pair)


@settings(max_examples=200, deadline=None)
@given(mixed)
def test_random_pairs_of_different_kinds(pair: tuple[tuple[str, Any], tuple[str, Any]]):
    assume({type(pair[0][1]), type(pair[1][1])} not in ({int, Fraction}, {tuple}))
    assert not falsely_accepts(pair), pair


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=100_000, deadline=None)
@given(pairs)
def test_no_false_accept_in_100_000_random_pairs(pair: tuple[tuple[str, Any], tuple[str, Any]]):
    check(pair)


TREES: st.SearchStrategy[tuple[str, Callable[[Fraction], Fraction]]] = st.recursive(
    st.one_of(st.just(("x", lambda x: x)), st.integers(1, 9).map(lambda n: (str(n), lambda x, n=n: Fraction(n)))),
    lambda inner: st.tuples(st.sampled_from("+-*"), inner, inner).map(
        lambda p: (
            f"({p[1][0]} {p[0]} {p[2][0]})",
            lambda x, p=p: {"+": p[1][1](x) + p[2][1](x), "-": p[1][1](x) - p[2][1](x), "*": p[1][1](x) * p[2][1](x)}[
                p[0]
            ],
        )
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(TREES, TREES)
def test_random_formulas(a: tuple[str, Any], b: tuple[str, Any]):
    """Polynomials of a degree of 6 or less are the same exactly if they agree in 13 places."""
    same = all(a[1](Fraction(x)) == b[1](Fraction(x)) for x in range(-6, 7))
    assert same_answer(a[0], b[0]) is same
    assert same_answer(a[0], f"{a[0]} + 10^{{-60}}") is False
