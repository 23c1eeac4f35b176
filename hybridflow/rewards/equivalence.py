"""Equivalence of answers: numbers, formulas, quantities, sets, lists, equations and inequalities. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from hybridflow.rewards.answer_grammar import Tree, product
from hybridflow.rewards.formula import Unfit, approximate, constant, identical, proportion, variables
from hybridflow.rewards.measurement import conversion

_TURNED = {"\\gt": "\\lt", "\\ge": "\\le"}
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    **dict(zip(("\\lt", "\\le", "\\gt"), (operator.lt, operator.le, operator.gt))),
    **dict(zip(("\\ge", "\\ne", "="), (operator.ge, operator.ne, operator.eq))),
}
_SEVERAL = ("list", "or", "set", "tuple")
_INFINITY = Fraction(10**400)


class Value(NamedTuple):
    """A real number; its `places` after the point (None: not a decimal); whether it is exact."""

    number: Fraction
    places: int | None
    exact: bool = True


def equivalent(a: Tree, b: Tree) -> bool:
    """Whether answer and reference are the same. Errors: OutOfTime within `limited`."""
    if a == b:
        return True
    kinds = {a.kind, b.kind}
    if a.kind == "or" and b.kind not in (*_SEVERAL, "relation", "union"):  # of alternatives the first counts
        labels = [_solved(part) if part.kind != "text" else None for part in a.parts]
        return None not in labels and len({found[0] for found in labels if found}) == 1 and equivalent(a.parts[0], b)
    if "choice" in kinds:
        x, y = _unlettered(a, b), _unlettered(b, a)
        return x is not None and y is not None and equivalent(x, y)
    if not kinds <= {"tuple", "set", "number", "quantity"} and (same := _same_set(a, b)) is not None:
        return same
    labelled = any(part.kind == "relation" for node in (a, b) if node.kind in ("list", "or") for part in node.parts)
    if "relation" in kinds and not labelled:
        x, y = _solved(a), _solved(b)
        if x and y and (None in (x[0], y[0]) or x[0] == y[0]):
            return equivalent(x[1], y[1])
        return a.kind == b.kind and len(a.parts) == len(b.parts) == 3 and _proportional(a, b)
    if kinds & {*_SEVERAL}:
        return _same_items(a, b)
    if len(kinds) == 1 and a.kind in ("matrix", "row"):
        return _in_order(a.parts, b.parts)
    if any(same_number(x, y) for x, y in number_pairs(a, b)):
        return True
    factor = conversion(*(node.parts[1] if node.kind == "quantity" else None for node in (a, b)))
    if factor is None or any(node.kind == "quantity" and node.parts[2:] != (False, 1) for node in (a, b)):
        return False
    x, y = (node.parts[0] if node.kind == "quantity" else node for node in (a, b))
    return identical(product(factor, x), y)


def _unlettered(node: Tree, other: Tree) -> Tree | None:
    """`(B) 18` beside a choice is the letter, beside a value the value."""
    if node.kind != "choice":
        return node
    if other.kind == "choice" and node.parts[1] and other.parts[1]:
        return Tree("tuple", ("()", Tree("text", node.parts[:1]), node.parts[1]))
    if other.kind == "choice" or (other.kind == "name" and node.parts[1] is None):
        return Tree(other.kind.replace("choice", "text"), (node.parts[0],))
    return node.parts[1]


def _solved(node: Tree) -> tuple[Any, Tree] | None:
    """Label and value of `x = 18`, `f(x) = 2x`, `9 \\cdot 2 = 18`, `x = 100/3 \\approx 33.33`; None of others."""
    if node.kind != "relation":
        return None, node
    sides, signs = list(node.parts[::2]), node.parts[1::2]
    if any(sign not in ("=", "\\approx", ":") for sign in signs) or (":" in signs and sides[0].kind != "text"):
        return None
    label = sides.pop(0) if sides[0].kind in ("text", "name", "function") or _named(sides[0]) else None
    if label and label.kind != "function" and variables(label) & variables(sides[-1]):
        return None
    rough = "\\approx" in signs and not any(map(variables, sides))
    same = all((rough and _near(left, right)) or equivalent(left, right) for left, right in pairwise(sides))
    return (label, sides[0] if rough else sides[-1]) if same else None


def _near(exact: Tree, rough: Tree) -> bool:
    x, y = approximate(exact), constant(rough)
    places = rough.parts[1] if rough.kind == "number" else None
    return x is not None and y is not None and abs(x - y) < Fraction(1, 10 ** (places or 0))


def _named(node: Tree) -> bool:
    """`AB`, `\\cos\\theta`: something that an answer may be the value of."""
    letters = node.kind == "*" and all(part.kind == "name" or _named(part) for part in node.parts)
    return bool(variables(node)) and (letters or (node.kind == "call" and node.parts[1].kind == "name"))


def _proportional(a: Tree, b: Tree) -> bool:
    """Whether the differences of both sides are: `y = 2x + 3` and `2x - y + 3 = 0`, `-x < 3` and `x > -3`."""
    differences, signs = list[Tree](), list[Any]()
    for left, sign, right in (a.parts, b.parts):
        left, right = (right, left) if sign in _TURNED else (left, right)
        differences.append(Tree("+", (left, product(-1, right))))
        signs.append(_TURNED.get(sign, sign))
    alike = signs[0] == signs[1] and signs[0] in _ORDER and variables(differences[0])
    factor = proportion(*differences) if alike else None
    turned = bool(factor and factor < 0 and signs[0] not in ("=", "\\ne"))
    return bool(factor) and not turned and identical(differences[0], product(factor or 0, differences[1]))


def _same_items(a: Tree, b: Tree) -> bool:
    """Sets by their elements, tuples in order, lists in any order; `x = 3, y = 4` by label, beside `3, 4` in order."""
    kinds, brackets = {a.kind, b.kind}, {node.parts[0] for node in (a, b) if node.kind == "tuple"}
    x, y = _items(a), _items(b)
    if kinds == {"tuple"}:
        return len(brackets) == 1 and _in_order(x, y)
    if Tree("name", ("empty",)) in (a, b) or brackets - {"()"} or {"set", "tuple"} <= kinds:
        return False
    if "set" in kinds or "or" in kinds:
        names = [{solved[0] for solved in map(_solved, side) if solved} for side in (x, y)]
        if max(map(len, names)) > 1 and names[0] != names[1]:  # `x = 0 or y = 0`
            return False
        return all(any(equivalent(item, other) for other in right) for left, right in ((x, y), (y, x)) for item in left)
    if len(x) != len(y):
        return False
    relations = [[item for item in side if item.kind == "relation"] for side in (x, y)]
    labels = [{(_solved(item) or (item,))[0] or item for item in items} for items in relations]
    if brackets or (set() in labels and len(x) == max(map(len, labels)) > 1):
        return _in_order(x, [(_solved(item) or (0, item))[1] for item in y])
    left = list(y)
    for item in x:
        at = next((at for at, other in enumerate(left) if equivalent(item, other)), None)
        if at is None:
            return False
        del left[at]
    return True


def _in_order(x: Sequence[Tree], y: Sequence[Tree]) -> bool:
    return len(x) == len(y) and all(map(equivalent, x, y))


def _items(node: Tree) -> list[Tree]:
    """Also of a list in a set: `\\{1 and 2\\}`."""
    parts = node.parts[node.kind == "tuple" :] if node.kind in _SEVERAL else (node,)
    inner = "list" if node.kind != "tuple" else ""
    return [item for part in parts for item in (_items(part) if part.kind == inner else [part])]


def number_pairs(answer: Tree, reference: Tree) -> list[tuple[Value, Value]]:
    """The values that an answer and a reference may have, in the same unit; none where one of them is not a number."""
    sides = list[Tree]()
    for node in (answer, reference):
        node = node.parts[1] if node.kind == "choice" and node.parts[1] else node
        sides.append((_solved(node) or (0, node))[1])
    factor = conversion(*(node.parts[1] if node.kind == "quantity" else None for node in sides))
    pairs = [(x, y) for x in _meanings(*sides) for y in _meanings(*reversed(sides))]
    return [(x._replace(number=x.number * factor), y) for x, y in pairs] if factor is not None else []


def _meanings(node: Tree, other: Tree) -> list[Value]:
    """A number: without its percent sign too where the other one has none."""
    inner, _, percent, scale = node.parts if node.kind == "quantity" else (node, None, False, 1)
    if inner.kind in _SEVERAL or (value := approximate(inner)) is None:
        return []
    places, exact = inner.parts[1] if inner.kind == "number" else None, constant(inner) is not None
    values = [Value(value * scale, None if places and scale != 1 else places, exact)]
    if percent and not (other.kind == "quantity" and other.parts[2]):
        values += [Value(one / 100, None if places is None else places + 2, exact) for one, places, _ in values]
    return values


def same_number(a: Value, b: Value) -> bool:
    """True for the same value.

    - Exact: `18.00` is 18 and `0.75` is 3/4; what only looks close is another number.
    - A decimal with at least two places and two significant digits equals the fraction, or the decimal with two or
      more further places, that it rounds or cuts off: `0.33` is 1/3 and 0.3333; one with six significant digits also
      an irrational number.
    - 1e-9 relative where a decimal has six places or more (floating point noise).
    """
    if a.exact and b.exact:
        noise = max(a.places or 0, b.places or 0) >= 6 and abs(a.number - b.number) <= abs(b.number) / 10**9
        if a.number == b.number or noise:
            return True
    return _shortened(a, b) or _shortened(b, a)


def _shortened(short: Value, full: Value) -> bool:
    """True when `short` is `full` rounded (halves away from 0) or cut off to its places."""
    if not short.places or abs(short.number) * 10**short.places < (10 if full.exact else 10**5):
        return False
    if full.exact:
        repeats = 10**300 % full.number.denominator != 0
        if short.places < 2 or not (repeats if full.places is None else full.places >= short.places + 2):
            return False
    digits = abs(full.number) * 10**short.places
    wanted = short.number * 10**short.places * (-1 if full.number < 0 else 1)
    return wanted in (math.floor(digits + Fraction(1, 2)), math.floor(digits))


def _same_set(a: Tree, b: Tree) -> bool | None:
    """Whether two sets have the same real numbers: at every end, and between each two; None for what is no set."""
    ends, names = set[Fraction](), (set[str | None](), set[str | None]())
    try:
        for node, named in zip((a, b), names):
            _ = _holds(node, Fraction(0), ends, named)
    except Unfit:
        return None
    if names[0] != names[1] and None not in names[0] | names[1]:
        return False
    finite = sorted(end for end in ends if abs(end) != _INFINITY)
    points = [*finite, *((low + high) / 2 for low, high in pairwise(finite))]
    points += [min(finite, default=Fraction(0)) - 1, max(finite, default=Fraction(0)) + 1]
    return all(_holds(a, x, set(), set()) == _holds(b, x, set(), set()) for x in points)


def _holds(node: Tree, x: Fraction, ends: set[Fraction], names: set[str | None]) -> bool:
    """Whether x is in an interval, set or union, or solves `\\{x : x > 3\\}`, `-1 < x \\le 2`, `x \\in (0, 1)`.

    Adds what this depends on: the `ends`, and the name of the variable (None: without). Errors: Unfit for no set.
    """
    kind, parts = node
    if kind in ("such", "union", "setminus", "or", "either"):
        own = set[str | None]()
        found = [_holds(part, x, ends, own) for part in (parts[1:] if kind == "such" else parts)]
        if len(own) > 1 or (kind == "such" and Tree("name", tuple(own)) not in (parts[0], _real(parts[0]))):
            raise Unfit
        names |= {None} if kind == "setminus" else own
        return found[0] and not found[1] if kind == "setminus" else any(found)
    if kind != "relation":
        names.add(None)
        if kind == "name" and parts[0] in ("reals", "empty"):
            return parts[0] == "reals"
        known = [_end(part) for part in _items(node)] if kind in ("set", "tuple") else []
        if not known or (kind == "tuple" and (len(known) != 2 or known[0] >= known[1])):
            raise Unfit
        ends.update(known)
        if kind == "set":
            return x in known
        low, high = (operator.lt if bracket in "()" else operator.le for bracket in parts[0])
        return low(known[0], x) and high(x, known[1])
    sides, signs = parts[::2], parts[1::2]
    named = [at for at, side in enumerate(sides) if side.kind == "name" and variables(side)]
    if len(named) != 1:
        raise Unfit
    names.add(sides[named[0]].parts[0])
    if signs == ("\\in",) and named == [0]:
        return _holds(sides[1], x, ends, set())
    values = [x if at in named else _end(side) for at, side in enumerate(sides)]
    if any(sign not in _ORDER for sign in signs):
        raise Unfit
    ends.update(value for at, value in enumerate(values) if at not in named)
    return all(_ORDER[sign](left, right) for left, sign, right in zip(values, signs, values[1:]))


def _real(node: Tree) -> Any:
    """The variable of `x \\in \\reals`."""
    return node.parts[0] if node.parts[1:] == ("\\in", Tree("name", ("reals",))) else None


def _end(node: Tree) -> Fraction:
    infinity = Tree("name", ("infty",))
    found = {infinity: _INFINITY, product(-1, infinity): -_INFINITY}.get(node) or approximate(node)
    if found is None:
        raise Unfit
    return found
