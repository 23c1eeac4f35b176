"""What answers are read as: numbers in every style, what is not a number, units, and which numbers are the same."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rewards.answer_grammar import Tree, number, read
from hybridflow.rewards.equivalence import Value, number_pairs, same_number
from hybridflow.rewards.match import same_answer


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
    texts = [
        f"{over}/{under}",
        f"\\frac{{{over}}}{{{under}}}",
        f"$\\dfrac{{{over}}}{{{under}}}$ cups",
        f"{over} / {under}",
    ]
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "2x",
        "2xy",
        "2 x",
        "10:30",
        "3, 5",
        "3,5",
        "5 + x",
        "1011_2",
        "3/0",
        "18 and 20",
        "3i",
        "(1,2)",
        "18 20",
        "1.2.3",
        "1e99999",
        "9" * 1001,
        "18 remainder 2",
        "5 squared",
        "three quarters",
        "0,100",
        "12,34,567",
    ],
)
def test_what_is_not_a_number(text: str):
    assert value(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.5 million", 1_500_000),
        ("$70k", 70_000),
        ("2½", 2.5),
        ("18th", 18),
        ("- $3.50", -3.5),
        ("1{,}000", 1000),
        ("1\\,000", 1000),
        ("10\u202f000", 10_000),
        ("$118 000", 118_000),
        ("2 \\times 10^{3}", 2000),
        ("1 080 000", 1_080_000),
        ("10 000 km", 10_000),
        ("１８", 18),
        ("18-inch", 18),
        (".5", 0.5),
    ],
)
def test_what_is_a_number(text: str, expected: float):
    assert same_answer(text, str(expected))


UNITS = [
    *("kgs", "cms", "pcs", "lbs", "mins", "hrs", "secs", "kms", "mls", "gms", "yrs", "wks", "pts", "nos", "doz", "qty"),
    *("sqft", "mph", "kWh", "km/h", "m/s", "kg", "cm", "mL", "MB", "GHz", "kW", "hr", "yr", "sec", "min", "gm"),
    *("oz", "gal", "tsp", "rpm", "Hz", "USD", "pc", "days", "ft", "lb"),
]


@pytest.mark.parametrize("unit", UNITS)
def test_units_behind_a_number_are_left_out(unit: str):
    for text in (
        f"156{unit}",
        f"156 {unit}",
        f"156{unit}.",
        f"$156{unit}$",
        f"156\\text{{ {unit}}}",
        f"156{unit if '/' in unit else unit.upper()}",
    ):
        assert same_answer(text, "156"), text


def test_a_tree_accounts_for_every_character():
    assert read("2x") == Tree("*", (number(2), Tree("name", ("x",))))
    assert read("0.50") == number(Fraction(1, 2), 2)
    assert read("x_{12}") == Tree("name", ("x_12",))
    for text in (
        "2x)",
        "2x@",
        "2x^",
        "(2x",
        "2x \\foo",
        "2x 3",
        "2x =",
        "= ",
        "\\frac{2}",
        "2..3",
        "\\sqrt",
        "x" * 1001,
    ):
        assert read(text) is None, text


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("18.00", "18", True),
        ("25%", "25", True),
        ("25%", "0.25", True),
        ("0.25%", "25%", False),
        ("0.25", "25%", True),
        ("2 million", "2", False),
        ("2", "2 million", False),
        ("\\$2 thousand", "2", False),
        ("\\$2 thousand", "2000", True),
        ("2 million", "2000000", True),
        ("2 million", "2 thousand", False),
        ("0.33", "1/3", True),
        ("0.34", "1/3", False),
        ("0.3", "1/3", False),
        ("0.66", "2/3", True),
        ("0.67", "2/3", True),
        ("33.33", "33.3333", True),
        ("33.3333", "33.33", True),
        ("33.33", "33", False),
        ("18.333", "18.33", False),
        ("0.125", "1/8", True),
        ("0.13", "1/8", False),
        ("1000000000", "1000000001", False),
        ("0.1", "0.10000000000000001", True),
    ],
)
def test_same_number(answer: str, reference: str, same: bool):
    assert same_answer(answer, reference) == same


def test_a_choice_beside_a_choice_is_not_understood():
    assert read("(A) (B) 18") is None
    assert read("(A) " * 240 + "18") is None
    assert read("(A) 18") == Tree("choice", ("A", number(18)))
