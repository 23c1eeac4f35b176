"""Random formulas as people write them: the same exactly if their values are, worked out beside the grammar."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mpmath as mp
import pytest

from hybridflow.rewards.match import same_answer

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
