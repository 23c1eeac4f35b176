"""Equivalence of answers: numbers, formulas, quantities, sets, lists, equations and inequalities. Pure."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from hybridflow.rewards.answer_grammar import Tree, number, product
from hybridflow.rewards.formula import approximate, constant, identical, variables
from hybridflow.rewards.measurement import conversion

_SIGNIFICANT = 6  # digits of a decimal that stands for an irrational number
_TURNED = {"\\gt": "\\lt", "\\ge": "\\le"}
_SEVERAL = ("list", "or", "set", "tuple")
_INFINITY = Fraction(10**400)
_Value = tuple[Fraction, int | None]  # and its places after the point (None: a fraction)
_Interval = tuple[Fraction, bool, Fraction, bool]  # its ends, and whether they belong to it


def equivalent(a: Tree, b: Tree) -> bool:
    """Whether answer and reference are the same. Errors: OutOfTime within `limited`."""
    if a == b:
        return True
    if a.kind == "or" and b.kind not in (*_SEVERAL, "relation", "union") and _alternatives(a):
        return equivalent(a.parts[0], b)
    if "choice" in (a.kind, b.kind):
        x, y = _unlettered(a, b), _unlettered(b, a)
        return x is not None and y is not None and equivalent(x, y)
    x, y = _region(a), _region(b)
    if x and y and not {a.kind, b.kind} <= {"tuple", "set"} and _same_region(x, y):
        return True
    if "relation" in (a.kind, b.kind):
        x, y = _solved(a), _solved(b)
        if x and y and (None in (x[0], y[0]) or x[0] == y[0]):
            return equivalent(x[1], y[1])
        return a.kind == b.kind and len(a.parts) == len(b.parts) == 3 and _proportional(a, b)
    if a.kind in _SEVERAL or b.kind in _SEVERAL:
        return _same_items(a, b)
    if a.kind == b.kind and a.kind in ("matrix", "row"):
        return len(a.parts) == len(b.parts) and all(map(equivalent, a.parts, b.parts))
    if pairs := number_pairs(a, b):
        return any(same_number(x, y) for x, y in pairs)
    factor = conversion(*(node.parts[1] if node.kind == "quantity" else None for node in (a, b)))
    if factor is None or any(node.kind == "quantity" and node.parts[2:] != (False, 1) for node in (a, b)):
        return False
    x, y = (node.parts[0] if node.kind == "quantity" else node for node in (a, b))
    return identical(product(factor, x) if factor != 1 else x, y) or _rounded(x, y) or _rounded(y, x)


def _unlettered(node: Tree, other: Tree) -> Tree | None:
    """`(B) 18` beside a choice is the letter, beside a value the value."""
    if node.kind != "choice":
        return node
    if other.kind == "choice" or (other.kind == "name" and node.parts[1] is None):
        return Tree("name" if other.kind == "name" else "text", (node.parts[0],))
    return node.parts[1]


def _alternatives(node: Tree) -> bool:
    """Whether each part names an answer: not `x < 1 or x > 2` and not `x = 0 or y = 0`."""
    solved = [_solved(part) for part in node.parts]
    return None not in solved and len({found[0] for found in solved if found}) == 1


def _solved(node: Tree) -> tuple[Any, Tree] | None:
    """Label and value of `x = 18`, `f(x) = 2x`, `9 \\cdot 2 = 18`, `x = 100/3 \\approx 33.33`; None of other relations."""
    if node.kind != "relation":
        return None, node
    sides, signs = list(node.parts[::2]), node.parts[1::2]
    if any(sign not in ("=", "\\approx", ":") for sign in signs) or (":" in signs and sides[0].kind != "text"):
        return None
    label = sides.pop(0) if sides[0].kind in ("text", "name", "function") or _named(sides[0]) else None
    if label and label.kind != "function" and variables(label) & variables(sides[-1]):
        return None
    rough = "\\approx" in signs and not any(map(variables, sides))
    same = rough or all(equivalent(left, right) for left, right in zip(sides, sides[1:]))
    return (label, sides[0] if rough else sides[-1]) if same else None


def _named(node: Tree) -> bool:
    """`AB`, `\\cos\\theta`: something that an answer may be the value of."""
    letters = node.kind == "*" and all(part.kind == "name" or _named(part) for part in node.parts)
    return bool(variables(node)) and (letters or (node.kind == "call" and node.parts[1].kind == "name"))


def _proportional(a: Tree, b: Tree) -> bool:
    """Whether the differences of both sides are: `y = 2x + 3` and `2x - y + 3 = 0`, `-x < 3` and `x > -3`."""
    differences = list[Tree]()
    for left, sign, right in (a.parts, b.parts):
        left, right = (right, left) if sign in _TURNED else (left, right)
        differences.append(Tree("+", (left, product(-1, right))))
    first, second = differences
    sign, named = _TURNED.get(a.parts[1], a.parts[1]), sorted(variables(first))
    if sign != _TURNED.get(b.parts[1], b.parts[1]) or sign not in ("=", "\\lt", "\\le", "\\ne"):
        return False
    filled = [
        _filled(side, {name: Fraction(317 + 71 * at, 100) for at, name in enumerate(named)}) for side in (first, second)
    ]
    factor = constant(Tree("/", tuple(filled)))
    return bool(factor and (factor > 0 or sign in ("=", "\\ne")) and identical(first, product(factor, second)))


def _filled(node: Tree, values: dict[str, Fraction]) -> Tree:
    if node.kind == "name":
        return number(values[node.parts[0]]) if node.parts[0] in values else node
    return Tree(node.kind, tuple(_filled(part, values) if isinstance(part, Tree) else part for part in node.parts))


def _same_items(a: Tree, b: Tree) -> bool:
    """Sets by their elements, tuples in order, lists in any order; `x = 3, y = 4` by label, beside `3, 4` in order."""
    kinds, brackets = {a.kind, b.kind}, {node.parts[0] for node in (a, b) if node.kind == "tuple"}
    x, y = (_items(a), _items(b))
    if (
        (kinds == {"tuple"} and len(brackets) > 1)
        or (kinds != {"tuple"} and brackets - {"()"})
        or {"set", "tuple"} <= kinds
    ):
        return False
    if "set" in kinds:
        return all(any(equivalent(item, other) for other in right) for left, right in ((x, y), (y, x)) for item in left)
    labels = [_labels(side) for side in (x, y)]
    if len(x) == len(y) and (brackets or (None in labels and labels != [None, None])):
        return all(equivalent(left, (_solved(right) or (0, right))[1]) for left, right in zip(x, y))
    left = list(y)
    for item in x:
        at = next((at for at, other in enumerate(left) if equivalent(item, other)), None)
        if at is None:
            return False
        del left[at]
    return not left


def _items(node: Tree) -> list[Tree]:
    parts = node.parts[node.kind == "tuple" :] if node.kind in _SEVERAL else (node,)
    return [
        item for part in parts for item in (_items(part) if part.kind == "list" and node.kind != "tuple" else [part])
    ]


def _labels(items: list[Tree]) -> set[Any] | None:
    """The different labels of `x = 3, y = 4`."""
    found = {(_solved(item) or (None,))[0] if item.kind == "relation" else None for item in items}
    return found if len(found) == len(items) > 1 and None not in found else None


def number_pairs(answer: Tree, reference: Tree) -> list[tuple[_Value, _Value]]:
    """The values that an answer and a reference may have, in the same unit; none where one of them is not a number."""
    sides = list[Tree]()
    for node in (answer, reference):
        node = node.parts[0] if node.kind == "or" and _alternatives(node) else node
        node = node.parts[1] if node.kind == "choice" and node.parts[1] else node
        sides.append((_solved(node) or (0, node))[1])
    factor = conversion(*(node.parts[1] if node.kind == "quantity" else None for node in sides))
    pairs = [(x, y) for x in _meanings(*sides) for y in _meanings(*reversed(sides))]
    return [((x[0] * factor, x[1]), y) for x, y in pairs] if factor is not None else []


def _meanings(node: Tree, other: Tree) -> list[_Value]:
    """Value and places of a number: without its percent sign or scale too where the other one has none."""
    inner, _, percent, scale = node.parts if node.kind == "quantity" else (node, None, False, 1)
    if (value := constant(inner)) is None:
        return []
    other_percent, other_scale = other.parts[2:] if other.kind == "quantity" else (False, 1)
    places = inner.parts[1] if inner.kind == "number" else None
    values = [(value * scale, None if places and scale != 1 else places)]
    values += [(value, places)] if scale != 1 and other_scale == 1 else []
    if percent and not other_percent:
        values += [(value / 100, None if places is None else places + 2) for value, places in values]
    return values


def same_number(a: _Value, b: _Value) -> bool:
    """True for the same value.

    - Exact: `18.00` is 18 and `0.75` is 3/4; what only looks close is another number.
    - A decimal with at least two places and two significant digits equals the fraction, or the decimal with two or
      more further places, that it rounds or cuts off: `0.33` is 1/3 and 0.3333.
    - 1e-9 relative where a decimal has six places or more (floating point noise).
    """
    noise = max(a[1] or 0, b[1] or 0) >= 6 and abs(a[0] - b[0]) <= abs(b[0]) / 10**9
    return a[0] == b[0] or noise or _shortened(a[0], a[1], b[0], b[1]) or _shortened(b[0], b[1], a[0], a[1])


def _shortened(short: Fraction, places: int | None, full: Fraction, full_places: int | None) -> bool:
    """True when `short` is `full` rounded (halves away from 0) or cut off to its places."""
    if places is None or places < 2 or abs(short) * 10**places < 10:
        return False
    longer = 10**300 % full.denominator != 0 if full_places is None else full_places >= places + 2
    digits, wanted = abs(full) * 10**places, short * 10**places * (-1 if full < 0 else 1)
    return longer and wanted in (math.floor(digits + Fraction(1, 2)), math.floor(digits))


def _rounded(decimal: Tree, other: Tree) -> bool:
    """Whether a decimal of six digits or more is an irrational number, rounded or cut off."""
    if (
        decimal.kind != "number"
        or not decimal.parts[1]
        or abs(decimal.parts[0]) * 10 ** decimal.parts[1] < 10 ** (_SIGNIFICANT - 1)
    ):
        return False
    full = approximate(other)
    return full is not None and constant(other) is None and _shortened(decimal.parts[0], decimal.parts[1], full, 40)


def _region(node: Tree) -> tuple[str | None, list[_Interval]] | None:
    """The variable and the intervals of a set of real numbers; None for anything else."""
    kind, parts = node
    if kind == "name" and parts[0] in ("R", "empty"):
        return None, [(-_INFINITY, False, _INFINITY, False)] if parts[0] == "R" else []
    if kind in ("tuple", "set"):
        ends = [_end(part) for part in _items(node)]
        known = [end for end in ends if end is not None]
        if len(known) < len(ends) or (kind == "tuple" and len(ends) != 2):
            return None
        if kind == "tuple":
            return None, [(known[0], parts[0][0] == "[", known[1], parts[0][1] == "]")]
        return None, [(end, True, end, True) for end in known]
    if kind in ("union", "or", "either", "setminus"):
        found = [part for part in map(_region, parts) if part is not None]
        if len(found) < len(parts) or len({name for name, _ in found}) > 1:
            return None
        if kind == "setminus":
            holes = found[1][1]
            return (
                (None, _without(found[0][1], [low for low, *_ in holes]))
                if all(a == b for a, _, b, _ in holes)
                else None
            )
        return found[0][0], [interval for _, region in found for interval in region]
    if kind == "such":
        return _region(parts[1])
    return _solution_set(node) if kind == "relation" else None


def _end(node: Tree) -> Fraction | None:
    infinite = {Tree("name", ("infty",)): _INFINITY, product(-1, Tree("name", ("infty",))): -_INFINITY}
    return infinite[node] if node in infinite else approximate(node)


def _without(intervals: list[_Interval], holes: list[Fraction]) -> list[_Interval]:
    for hole in holes:
        intervals = [
            part
            for low, closed, high, shut in intervals
            for part in (
                [(low, closed, hole, False), (hole, False, high, shut)]
                if low < hole < high
                else [(low, closed, high, shut)]
            )
        ]
    return intervals


def _solution_set(node: Tree) -> tuple[str | None, list[_Interval]] | None:
    """`-1 < x \\le 2`, `m \\ge \\sqrt3`, `x \\ne 0`, `x \\in (0, 1)`."""
    sides, signs = node.parts[::2], node.parts[1::2]
    turned = [sign in _TURNED for sign in signs]
    if all(turned):
        sides, signs = sides[::-1], [_TURNED[sign] for sign in signs[::-1]]
    named = [at for at, side in enumerate(sides) if side.kind == "name" and variables(side)]
    if len(named) != 1 or len(signs) > 2:
        return None
    name, bounds = sides[named[0]].parts[0], {at: _end(side) for at, side in enumerate(sides) if at not in named}
    if list(signs) == ["\\in"] and named == [0] and (inner := _region(sides[1])):
        return name, inner[1]
    if any(bound is None for bound in bounds.values()):
        return None
    if list(signs) == ["\\ne"]:
        return name, _without(
            [(-_INFINITY, False, _INFINITY, False)], [bound for bound in bounds.values() if bound is not None]
        )
    if any(sign not in ("\\lt", "\\le") for sign in signs):
        return None
    low, high = bounds.get(named[0] - 1), bounds.get(named[0] + 1)
    closed, shut = (at in range(len(signs)) and signs[at] == "\\le" for at in (named[0] - 1, named[0]))
    return name, [(-_INFINITY if low is None else low, closed, _INFINITY if high is None else high, shut)]


def _same_region(a: tuple[str | None, list[_Interval]], b: tuple[str | None, list[_Interval]]) -> bool:
    if a[0] and b[0] and a[0] != b[0]:
        return False
    x, y = (_joined(side[1]) for side in (a, b))
    return len(x) == len(y) and all(
        p[1::2] == q[1::2] and all(s == t or abs(s - t) < abs(s) / 10**35 for s, t in zip(p[::2], q[::2]))
        for p, q in zip(x, y)
    )


def _joined(intervals: list[_Interval]) -> list[_Interval]:
    """In order, and joined where they touch."""
    found = list[_Interval]()
    for low, closed, high, shut in sorted(intervals, key=lambda one: (one[0], not one[1])):
        start, first, end, last = found[-1] if found else (low, closed, low - 1, False)
        if low < end or (low == end and (last or closed)):
            found[-1] = (start, first, max(high, end), shut if high > end else last or (shut and high == end))
        elif low <= high:
            found.append((low, closed, high, shut))
    return found
