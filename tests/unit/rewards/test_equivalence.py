"""What answers are read as, and which are the same: the table of kinds, and random pairs of known values."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath as mp
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hybridflow.rewards.answer_grammar import Tree, number, read
from hybridflow.rewards.equivalence import Value, number_pairs, same_number
from hybridflow.rewards.match import same_answer
from tests.example_answers import DIFFERENT, SAME


def value(text: str) -> Fraction | None:
    """The number that a text is."""
    tree = read(text)
    pairs = number_pairs(tree, tree) if tree else []
    return pairs[0][0].number if pairs else None


@given(st.decimals(-(10**6), 10**6, places=3))
def test_decimals_are_read_exactly(written):
    for text in (f"{written}", f"{written:,}", f"${written}", f"{written} miles", f"{written}\\%", f"{written:e}"):
        assert value(text) == Fraction(written), text


@given(st.integers(-999, 999), st.integers(1, 999))
def test_fractions_are_read_exactly(over: int, under: int):
    latex = f"frac{{{over}}}{{{under}}}"
    texts = [f"{over}/{under}", f"\\{latex}", f"$\\d{latex}$ cups", f"{over} / {under}"]
    assert [value(text) for text in texts] == [Fraction(over, under)] * 4
    assert [value(text) for text in (f"{under} 1/7", f"{under}\\frac{{1}}{{7}}")] == [under + Fraction(1, 7)] * 2


@given(st.integers(0, 10**12), st.integers(-(10**12), 10**12))
def test_different_numbers_differ(a: int, b: int):
    assert same_answer(str(a), str(b)) == (a == b)


@given(st.integers(-9999, 9999), st.sampled_from([3, 7, 9, 11, 13]), st.integers(2, 8))
def test_a_rounded_or_cut_decimal_is_the_fraction_and_its_neighbours_are_not(over: int, under: int, places: int):
    exact, step = Fraction(over, under), 10**places
    cut = int(exact * step)
    for digits in range(cut - 2, cut + 3):
        near = Fraction(digits, step)
        rounds = abs(near - exact) <= Fraction(1, 2 * step) or digits == cut
        if abs(digits) >= 10 or near == exact:
            close = exact and abs(near / exact - 1) <= 1e-9 and places >= 6
            expected = near == exact or (rounds and exact.denominator != 1) or close
            assert same_number(Value(near, places), Value(exact, None)) == bool(expected), (near, exact)


NO_NUMBERS = [
    *("", "x", "2x", "2xy", "2 x", "10:30", "3, 5", "3,5", "5 + x", "1011_2", "3/0", "18 and 20", "3i", "(1,2)"),
    *("18 20",),
    *("1.2.3", "1e99999", "9" * 1001, "18 remainder 2", "5 squared", "three quarters", "0,100", "12,34,567"),
]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_not_a_number(text: str):
    assert value(text) is None


NUMBERS = {"$70k": 70_000, "- $3.50": -3.5, "10\u202f000": 10_000, "$118 000": 118_000, "1 080 000": 1_080_000}
NUMBERS |= {"2 \\times 10^{3}": 2000, "10 000 km": 10_000, "１８": 18, ".5": 0.5, "1{,}000": 1000}


@pytest.mark.parametrize(("text", "expected"), NUMBERS.items())
def test_what_is_a_number(text: str, expected: float):
    assert same_answer(text, str(expected))


UNITS = [
    *("kgs", "cms", "pcs", "lbs", "mins", "hrs", "secs", "kms", "mls", "gms", "yrs", "wks", "pts", "nos", "doz", "qty"),
    *("sqft", "mph", "kWh", "km/h", "m/s", "kg", "cm", "mL", "MB", "GHz", "kW", "hr", "yr", "sec", "min", "gm"),
    *("oz", "gal", "tsp", "rpm", "Hz", "USD", "pc", "days", "ft", "lb"),
]


@pytest.mark.parametrize("unit", UNITS)
def test_units_behind_a_number_are_left_out(unit: str):
    unread = ("2x)", "2x@", "2§", "2x^", "(2x", "2x \\foo", "2x 3", "2x =", "= ", "\\frac{2}", "2..3", "\\sqrt")
    for text in (*unread, "x" * 1001):
        assert read(text) is None, text


def test_a_choice_beside_a_choice_is_not_understood():
    assert read("(A) (B) 18") is None
    assert read("(A) " * 240 + "18") is None
    assert read("(A) 18") == Tree("choice", ("A", number(18)))


TABLES = ((True, SAME), (False, DIFFERENT))
ROWS = [(kind, *pair, right) for right, table in TABLES for kind in table for pair in table[kind]]


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
FACTORS = {"km": (1000, "m"), "m": (1, "m"), "cm": (Fraction(1, 100), "m"), "s": (1, "s"), "minutes": (60, "s")}
FACTORS["kg"] = (1, "kg")
measures = st.tuples(digit, st.sampled_from(sorted(FACTORS))).map(
    lambda p: (rf"{p[0]}\text{{ {p[1]}}}", (p[0] * FACTORS[p[1]][0], FACTORS[p[1]][1]))
)
intervals = st.tuples(small, small, st.sampled_from("[("), st.sampled_from("])")).filter(lambda p: p[0] < p[1])
bounded = intervals.map(lambda p: (f"{p[2]}{p[0]}, {p[1]}{p[3]}", p))
related = intervals.map(
    lambda p: (rf"{p[0]} {'<' if p[2] == '(' else chr(92) + 'le'} x {'<' if p[3] == ')' else chr(92) + 'le'} {p[1]}", p)
)
waves = st.tuples(st.sampled_from(["sin", "cos"]), digit, digit).map(lambda p: (rf"{p[1]}\{p[0]}({p[2]}t)", p))
KINDS = {"numbers": st.one_of(numbers, products), "polynomials": polynomials, "sets": sets, "points": points}
KINDS |= {"units": measures, "intervals": st.one_of(bounded, related), "roots": roots, "waves": waves}
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


FUNCTIONS = {"sin": mp.sin, "cos": mp.cos, "exp": mp.exp, "ln": mp.log, "arctan": mp.atan, "sqrt": mp.sqrt}
POINTS = [mp.mpf("1.37"), mp.mpf("2.61"), mp.mpf("0.43")]
Formula = tuple[str, Callable[[Any], Any]]


def atom(draw: random.Random) -> Formula:
    n, m = draw.randint(0, 9), draw.randint(2, 9)
    fractions = [f"\\frac{{{n}}}{{{m}}}", f"\\frac{n}{m}", f"\\dfrac{n}{{{m}}}", f"({n}/{m})"]
    names: list[Formula] = [("x", lambda x: x), ("{\\pi}", lambda _: +mp.pi), ("(π)", lambda _: +mp.pi)]
    numbers: list[Formula] = [(str(n), lambda _: mp.mpf(n)), (f"{n}.{m}", lambda _: mp.mpf(f"{n}.{m}"))]
    return draw.choice([*names, *numbers, (draw.choice(fractions), lambda _: mp.mpf(n) / m)])


def formula(draw: random.Random, depth: int) -> Formula:
    if depth == 0:
        return atom(draw)
    (a, f), (b, g), n = formula(draw, depth - 1), formula(draw, depth - 1), draw.randint(-2, 3)
    name, (left, right) = draw.choice(sorted(FUNCTIONS)), draw.choice([("(", ")"), ("\\left(", "\\right)")])
    times = draw.choice(["*", " \\cdot ", "", " \\times "])
    called = f"\\sqrt{{{a}}}" if name == "sqrt" else draw.choice(["", "\\"]) + f"{name}{left}{a}{right}"
    forms: list[Formula] = [
        (f"{a} + {b}", lambda x: f(x) + g(x)),
        (f"{a}-{left}{b}{right}", lambda x: f(x) - g(x)),
        (f"({a}){times}{left}{b}{right}", lambda x: f(x) * g(x)),
        (f"\\frac{{{a}}}{{{b}}}", lambda x: f(x) / g(x)),
        (f"{left}{a}{right} / ({b})", lambda x: f(x) / g(x)),
        (f"({a})^{{{n}}}", lambda x: f(x) ** n),
        (called, lambda x: FUNCTIONS[name](f(x))),
        (f"-{left}{a}{right}", lambda x: -f(x)),
    ]
    return draw.choice(forms)


def values(found: Formula) -> list[Any] | None:
    """None where it has no value, or one that rounds away what it is made of."""
    try:
        numbers = [found[1](point) for point in POINTS]
    except (ZeroDivisionError, ValueError):
        return None
    return numbers if all(mp.isfinite(one) and (one == 0 or 1e-9 < abs(one) < 1e9) for one in numbers) else None


@pytest.mark.parametrize("seed", range(4))
@mp.workdps(40)
def test_random_formulas_are_the_same_exactly_if_their_values_are(seed: int):
    draw, known, same = random.Random(seed), list[tuple[str, list[Any]]](), 0
    for _ in range(300):
        found = formula(draw, draw.randint(0, 2))
        if (numbers := values(found)) is None:
            continue
        assert same_answer(found[0], f"{found[0]} + 1") is False
        for text, others in draw.sample(known, min(8, len(known))):
            equal = all(abs(a - b) <= mp.mpf(10) ** -25 * abs(a) for a, b in zip(numbers, others, strict=True))
            assert same_answer(found[0], text) is equal, (found[0], text)
            same += equal
        known.append((found[0], numbers))
    assert same > 5
