"""Written numbers: which texts are one, which value they have, and which are the same."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rewards.number import Number, find_numbers, parse_number, same_number


@given(st.decimals(-(10**6), 10**6, places=3))
def test_decimals_are_read_exactly(value):
    for text in (f"{value}", f"{value:,}", f"${value}", f"{value} miles", f"{value}\\%", f"{value:e}"):
        number = parse_number(text)
        assert number == Number(Fraction(value), number.places if number else 0, text.endswith("%")), text


@given(st.integers(-999, 999), st.integers(1, 999))
def test_fractions_are_read_exactly(over: int, under: int):
    value = Fraction(over, under)
    texts = [
        f"{over}/{under}",
        f"\\frac{{{over}}}{{{under}}}",
        f"$\\dfrac{{{over}}}{{{under}}}$ cups",
        f"{over} / {under}",
    ]
    for text in texts:
        assert parse_number(text) == Number(value, None), text
    whole = f"{under} 1/7", f"{under}\\frac{{1}}{{7}}"
    assert [parse_number(text) for text in whole] == [Number(under + Fraction(1, 7), None)] * 2


@given(st.integers(0, 10**12), st.integers(-(10**12), 10**12))
def test_different_numbers_differ(value: int, other: int):
    same = same_number(Number(Fraction(value)), Number(Fraction(other)))
    assert same == (value == other)


@given(st.integers(-9999, 9999), st.sampled_from([3, 7, 9, 11, 13]), st.integers(2, 8))
def test_a_rounded_or_cut_decimal_is_the_fraction_and_its_neighbours_are_not(over: int, under: int, places: int):
    value, step = Fraction(over, under), 10**places
    cut = int(value * step)
    for digits in range(cut - 2, cut + 3):
        near = Fraction(digits, step)
        rounds = abs(near - value) <= Fraction(1, 2 * step) or digits == cut
        if abs(digits) >= 10 or near == value:
            expected = (
                near == value
                or (rounds and value.denominator != 1)
                or (value and abs(near / value - 1) <= 1e-9 and places >= 6)
            )
            assert same_number(Number(near, places), Number(value, None)) == bool(expected), (near, value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "2x",
        "2xy",
        "2 x",
        "3-4",
        "3–4",
        "10:30",
        "3, 5",
        "3,5",
        "2\\sqrt{3}",
        "3\\pi",
        "5 + x",
        "2^{10}",
        "1011_2",
        "5/10/20",
        "3/0",
        "18 and 20",
        "5 or 6",
        "16-3-4",
        "x=5",
        "3i",
        "(1,2)",
        "18 20",
        "1.2.3",
        "18!",
        "1e99999",
        "9" * 400,
        "18 remainder 2",
        "5 squared",
        "three quarters",
        "0,100",
        "12,34,567",
    ],
)
def test_what_is_no_number(text: str):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
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
def test_what_is_a_number(text: str, value: float):
    number = parse_number(text)
    assert number is not None
    assert number.amount == Fraction(value)


UNITS = [
    *("kgs", "cms", "pcs", "lbs", "mins", "hrs", "secs", "kms", "mls", "gms", "yrs", "wks", "pts", "nos", "doz", "qty"),
    *("sqft", "mph", "kWh", "km/h", "m/s", "°C", "kg", "cm", "mL", "MB", "GHz", "kW", "hr", "yr", "sec", "min", "gm"),
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
        f"156{unit.upper()}",
    ):
        assert parse_number(text) == Number(Fraction(156)), text
    assert [written.number.value for written in find_numbers(f"It has 156{unit} of 2x.")] == [156]


def test_letters_of_an_expression_are_no_units():
    for text in ("2x", "3pi", "5sqrt(2)", "2ab", "2ac", "2abc", "3i", "2n", "2xy", "5sin", "5sec x", "2y", "2v", "3e"):
        assert parse_number(text) is None, text
    assert parse_number("2k") == Number(Fraction(2), scale=1000)


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("18.00", "18", True),
        ("25%", "25", True),
        ("25%", "0.25", True),
        ("0.25%", "25%", False),
        ("0.25", "25%", True),
        ("2 million", "2", True),
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
    first, second = parse_number(answer), parse_number(reference)
    assert first is not None
    assert second is not None
    assert same_number(first, second) == same
