"""Values as plain data: how the tests and the program exchange arguments and results.

Numbers, texts, containers and the like are copied; of all else the other side gets a reference. What is read never
runs anything: a program cannot answer with an object that equals whatever it is compared with.
"""

from __future__ import annotations

import base64
import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

_DEEPEST = 100
_LONG = 1 << 13  # bits from which the decimal form of an int is slow
_NAMED_MODULES = {"math": math, "operator": operator}
_DATES: dict[str, Any] = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time)}
# Functions and types that mean the same on both sides.
_BUILTINS = {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type)
    or name
    in ("abs", "all", "any", "chr", "divmod", "len", "max", "min", "ord", "pow", "repr", "round", "sorted", "sum")
}
_NAMES = {id(value): name for name, value in _BUILTINS.items()}

Export = Callable[[Any], Any]
Resolve = Callable[[Any], Any]


class ValueTooDeep(ValueError):  # noqa: N818  (it is shown to people by this name)
    """A value is nested too deeply, or contains itself."""


def encode(value: Any, export: Export, depth: int = 0) -> Any:
    """`value` as JSON can hold it; `export` gives the reference of what is no plain data.

    Instances of a subclass of list, str, int, ... become plain: its methods stay behind. Errors: ValueTooDeep.
    """
    if value is None or value is True or value is False or type(value) is str:
        return value
    if depth > _DEEPEST:
        raise ValueTooDeep("a value is nested more than 100 deep, or contains itself")

    def items(of: Any) -> list[Any]:
        return [encode(item, export, depth + 1) for item in of]

    def pairs(of: Any) -> list[Any]:
        return [[encode(k, export, depth + 1), encode(v, export, depth + 1)] for k, v in of]

    number = _number(value)
    if number is not None:
        return number
    if isinstance(value, str):
        return str.__getitem__(value, slice(None))
    if isinstance(value, list):
        return ["list", items(list.__iter__(value))]
    if isinstance(value, tuple):
        fields = getattr(type(value), "_fields", None)
        if isinstance(fields, tuple) and all(type(f) is str for f in fields) and len(fields) == len(value):
            return ["named", type(value).__name__, list(fields), items(tuple.__iter__(value))]
        return ["tuple", items(tuple.__iter__(value))]
    if isinstance(value, dict):
        kind = next((k for k in (collections.Counter, collections.OrderedDict) if isinstance(value, k)), dict)
        return ["dict", kind.__name__, pairs(dict.items(value))]
    if isinstance(value, set):
        return ["set", items(set.__iter__(value))]
    if isinstance(value, frozenset):
        return ["frozenset", items(frozenset.__iter__(value))]
    if isinstance(value, bytes | bytearray):
        return ["bytes", type(value) is bytearray, base64.b64encode(bytes(value)).decode()]
    if isinstance(value, collections.deque):
        return ["deque", items(collections.deque.__iter__(value)), value.maxlen]
    return _rare(value, items) or export(value)


def _number(value: Any) -> Any:
    if isinstance(value, int):
        plain = int.__add__(value, 0)
        return plain if plain.bit_length() < _LONG else ["int", hex(plain)]
    if isinstance(value, float):
        return float.__mul__(value, 1.0)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    return None


def _rare(value: Any, items: Callable[[Any], list[Any]]) -> Any:
    kind = type(value)
    if kind is range:
        return ["range", items((value.start, value.stop, value.step))]
    if value is Ellipsis:
        return ["ellipsis"]
    if kind is decimal.Decimal:
        return ["decimal", str(value)]
    if kind is fractions.Fraction:
        return ["fraction", items((value.numerator, value.denominator))]
    if kind.__name__ in _DATES and kind is _DATES[kind.__name__]:
        return ["date", kind.__name__, value.isoformat(), getattr(value, "fold", 0)]
    if kind is datetime.timedelta:
        return ["duration", value.days, value.seconds, value.microseconds]
    if id(value) in _NAMES:
        return ["builtin", _NAMES[id(value)]]
    module = getattr(value, "__module__", None)
    if callable(value) and module in ("math", "_operator"):
        return ["function", module.removeprefix("_"), value.__name__]
    return _of_numpy(value, items)


def _of_numpy(value: Any, items: Callable[[Any], list[Any]]) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "ndarray"):
        return None
    if isinstance(value, numpy.generic) and not isinstance(value, numpy.void):
        plain = value.item()
        return None if isinstance(plain, numpy.generic) else ["one", items((plain,))]
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufcUS":
        content = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
        return ["array", value.dtype.str, list(value.shape), content]
    return None


def decode(data: Any, resolve: Resolve) -> Any:
    """The value of `encode`'s data; `resolve` answers references. Errors: ValueError for anything else."""
    if not isinstance(data, list):
        return data
    try:
        kind, *rest = data
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]([decode(item, resolve) for item in rest[0]])
        if kind == "dict":
            made = {"Counter": collections.Counter, "OrderedDict": collections.OrderedDict}.get(rest[0], dict)()
            for key, value in rest[1]:
                dict.__setitem__(made, decode(key, resolve), decode(value, resolve))
            return made
        if kind == "named":
            named = collections.namedtuple(rest[0], rest[1], rename=True)
            return tuple.__new__(named, [decode(item, resolve) for item in rest[2]])
        if kind == "deque":
            return collections.deque((decode(item, resolve) for item in rest[0]), rest[1])
        if kind in _SIMPLE:
            return _SIMPLE[kind](*rest)
        if kind == "array":
            return _array(*rest)
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"not a value: {error}") from error
    return resolve(data)


def _array(dtype: str, shape: list[int], content: str) -> Any:
    numpy = importlib.import_module("numpy")

    return numpy.frombuffer(base64.b64decode(content), dtype=numpy.dtype(dtype)).reshape(shape).copy()


_CONTAINERS: dict[Any, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "one": operator.itemgetter(0),
    "range": lambda of: range(*of),
    "fraction": lambda of: fractions.Fraction(*of),
}


def _date(name: str, text: str, fold: int) -> Any:
    """The ISO form has no word for the second of two hours that a clock shows twice."""
    value = _DATES[name].fromisoformat(text)
    return value.replace(fold=fold) if fold else value


_SIMPLE: dict[Any, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "complex": complex,
    "bytes": lambda mutable, text: (bytearray if mutable else bytes)(base64.b64decode(text)),
    "ellipsis": lambda: ...,
    "decimal": decimal.Decimal,
    "date": _date,
    "duration": datetime.timedelta,
    "builtin": _BUILTINS.__getitem__,
    "function": lambda module, name: getattr(_NAMED_MODULES[module], name),
}
