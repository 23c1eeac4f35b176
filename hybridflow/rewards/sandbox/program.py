"""The tests' proxy of the program: functions that take and return plain values, and exceptions by their classes.

Values travel as JSON. Decoding runs no code and creates only numbers, texts, containers and the like, so a program
cannot answer with an object that equals everything.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from hybridflow.processes.channel import Channel

NAME = "solution"  # of the program as a module; not __main__, so its main part does not run
_LARGEST = 64 << 20
_DEEPEST = 100
_MOST_ITEMS = 10_000  # of an iterator, which may have no end
_SHOWN = 300  # characters of an error
_LONG = 1 << 13  # bits from which the decimal form of an int is slow

# Type -> what its values are made from again, and by which function.
_MADE_FROM: dict[type, tuple[Callable[[Any], list[Any]], Callable[..., Any]]] = {
    complex: (lambda value: [value.real, value.imag], complex),
    range: (lambda value: [value.start, value.stop, value.step], range),
    decimal.Decimal: (lambda value: [str(value)], decimal.Decimal),
    fractions.Fraction: (lambda value: [value.numerator, value.denominator], fractions.Fraction),
    **{
        kind: (
            lambda value: [value.isoformat(), value.fold],
            lambda text, fold, *, kind=kind: kind.fromisoformat(text).replace(fold=fold),
        )
        for kind in (datetime.datetime, datetime.time)
    },
    datetime.date: (lambda value: [value.isoformat()], datetime.date.fromisoformat),
    datetime.timedelta: (lambda value: [value.days, value.seconds, value.microseconds], datetime.timedelta),
    collections.deque: (lambda value: [list(value), value.maxlen], collections.deque),
    type(...): (lambda value: [], lambda: ...),
}
# Types that travel by name: those of plain values are the same on both sides.
_TYPES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
_TYPES |= {kind.__name__: kind for kind in (*_MADE_FROM, collections.Counter, collections.OrderedDict)}
_LISTED: tuple[type, ...] = (list, tuple, set, frozenset)
_MAPPED: tuple[type, ...] = (collections.Counter, collections.OrderedDict, dict)
_BYTES: tuple[type, ...] = (bytes, bytearray)
_ARRAYS = "biufcUS"  # kinds of numpy's arrays


class ProgramEnded(BaseException):
    """The program is gone: nothing that a test catches."""


class ValueChannel(Channel):
    """Messages of the tests and the program: JSON objects of up to 64 MiB."""

    def __init__(self, source: int, sink: int) -> None:
        super().__init__(source, sink, _LARGEST)

    def send(self, message: dict[str, Any]) -> None:
        """Errors: ValueError for one that is too large, BrokenPipeError when the other process is gone."""
        self.write(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other process is gone. Errors: ValueError for anything else."""
        if not (data := self.read()):
            return None
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message


class Remote:
    """A program in another process. `asked` counts its uses, `ended` says that it is gone.

    `given`: whether tests have names of it that they use without asking, values and classes.

    `error`: the last exception that it told, as the last line of a traceback; "" for none.
    """

    def __init__(self, channel: ValueChannel) -> None:
        self._channel = channel
        self._known: dict[int, tuple[str, Any]] = {}  # functions and classes of the program, by their ids
        self._classes: dict[tuple[str, ...], type[BaseException]] = {}
        self.asked, self.ended, self.given, self.error = 0, False, False, ""

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """The program's values of these names. Errors: an exception of its loading."""
        found = {}
        for name, what in self._ask({"names": wanted})["names"].items():
            if name not in wanted:
                raise ValueError(f"{name} was not asked for")
            value = self._class(what["raises"]) if "raises" in what else decode(what.get("value"))
            if isinstance(value, _ProgramClass):
                value.call = self._function(name)
            if "call" in what or isinstance(value, _OpaqueCallable):
                value = self._function(name)
            else:
                self.asked, self.given = self.asked + 1, True
            found[name] = value
            self._known[id(value)] = name, value
        return found

    def last_function(self) -> str:
        """Name of the function that the program defines last, "" if it defines none."""
        return str(self._ask({"names": []})["last"])

    def _function(self, name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            given, named = encode([*args], other=self._given), encode(kwargs, other=self._given)
            answer = self._ask({"call": name, "args": given, "kwargs": named})
            for argument, state in zip(args, answer.get("changed") or []):
                _change(argument, decode(state))
            return decode(answer.get("value"))

        function.__name__ = function.__qualname__ = name
        return function

    def _given(self, value: Any) -> Any:
        """What tests give the program that is no plain value: its own functions and classes, or an exception.

        Errors: TypeError for other objects that it has made itself, which must not decide whether its row is judged;
        NotJudged for objects of the tests.
        """
        if id(value) in self._known:
            return ["program", self._known[id(value)][0]]
        kind = value if isinstance(value, type) else type(value)
        if issubclass(kind, Opaque) or isinstance(kind, _ProgramClass) or value in _plain_types():
            raise TypeError(f"{value!r} is no plain value")
        if isinstance(value, BaseException) and _TYPES.get(kind.__name__) is kind:
            return ["raised", kind.__name__, encode([*value.args], other=self._given)]
        raise NotJudged(f"the tests give the program an object of class {kind.__name__}, which Code does not judge")

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._channel.send(request)
            answer = self._channel.receive()
        except BrokenPipeError:
            answer = None
        if answer is None:
            self.ended = True
            raise ProgramEnded("the program is gone")
        if "error" in answer:
            self.error = str(answer["error"]["limit"])[:_SHOWN]
            raise self._exception(answer["error"])
        return answer

    def _exception(self, told: dict[str, Any]) -> BaseException:
        kind, arguments = self._class(told["classes"]), decode(told["args"])
        if not issubclass(kind, Exception) or issubclass(kind, StopIteration | StopAsyncIteration):  # of the tests' own
            return RuntimeError(f"it raised {kind.__name__}")
        try:
            return type.__call__(kind, *arguments)
        except TypeError:  # a class that wants to be made in its own way
            error = kind.__new__(kind)
            error.args = tuple(arguments)
            return error

    def _class(self, names: list[str]) -> type[BaseException]:
        """The builtin exception that `names` ends with, or a class of the program's that comes from it."""
        *own, base = map(str, names)
        kind = getattr(builtins, base, None)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError(f"{base} is no exception")
        for count in range(len(own), 0, -1):
            key = (*own[count - 1 :], base)
            kind = self._classes.setdefault(key, _ProgramClass(own[count - 1], (kind,), {}))
        return kind


class _ProgramClass(type):
    """An exception's class of the program, for `except` and `raises`. To call it is to call the program's."""

    call: Callable[..., Any] | None = None

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.call is None:
            raise TypeError(f"{cls.__name__} is no function of the program")
        return cls.call(*args, **kwargs)


def _change(argument: Any, state: Any) -> None:
    """Bring an argument to the state in which the program has left it."""
    if state is None or type(state) is not type(argument):
        return
    if isinstance(argument, list | bytearray):
        argument[:] = state
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(state)


class ValueTooDeep(ValueError):  # noqa: N818  (it is shown to people by this name)
    """A value is nested too deeply, or contains itself."""


class NotJudged(BaseException):
    """The tests need more of the program than plain values: nothing that a test catches."""


class Opaque:
    """Stands for an object that is no plain value. It equals only itself; it is true if all objects of its class are.

    Errors: NotJudged where it is used as no plain value could be.
    """

    __slots__ = ("_class", "_true")

    def __init__(self, class_name: str, true: bool) -> None:
        self._class, self._true = class_name, true

    def __bool__(self) -> bool:
        if not self._true:
            raise TypeError(f"the truth of {self} judges nothing; give a plain value")
        return True

    def __getattr__(self, name: str) -> Any:
        caller = sys._getframe(1)
        library = caller.f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names
        library |= "site-packages" in caller.f_code.co_filename  # whose attempt is not what the tests need
        if library or name.startswith("__") or any(hasattr(kind, name) for kind in _plain_types()):
            raise AttributeError(f"{name!r}: {self} is no plain value")
        raise NotJudged(f"the tests use .{name} of {self}, which Code does not judge")

    def __repr__(self) -> str:
        return f"an object of the program's class {self._class}"


class _OpaqueCallable(Opaque):
    __slots__ = ()

    def __call__(self, *_: object, **__: object) -> Any:
        raise NotJudged(f"the tests call {self}, which Code does not judge")


def encode(value: Any, depth: int = 0, *, other: Callable[[Any], Any] | None = None) -> Any:
    """`value` as JSON can hold it; what is no plain value becomes an `Opaque`, or what `other` answers for it.

    Instances of a subclass of list, str, int, ... become plain: its methods stay behind. Iterators are run for at most
    10,000 items, coroutines to their end. Errors: ValueTooDeep.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if depth > _DEEPEST:
        raise ValueTooDeep("a value is nested more than 100 deep, or contains itself")

    def items(of: Any) -> list[Any]:
        return [encode(item, depth + 1, other=other) for item in of]

    if isinstance(value, int):
        plain = int.__add__(value, 0)
        return plain if plain.bit_length() < _LONG else ["int", hex(plain)]
    if isinstance(value, float):
        return float.__mul__(value, 1.0)
    if isinstance(value, str):
        return str.__getitem__(value, slice(None))
    base: Any = next((base for base in (*_LISTED, *_MAPPED, *_BYTES) if isinstance(value, base)), None)
    if base in _LISTED:
        return [base.__name__, items(base.__iter__(value))]
    if base in _MAPPED:
        return [base.__name__, [items(pair) for pair in base.items(value)]]
    if base in _BYTES:
        return [base.__name__, base64.b64encode(bytes(memoryview(value))).decode()]
    if kind in _MADE_FROM:
        return [kind.__name__, *items(_MADE_FROM[kind][0](value))]
    if kind is type and _TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    if found := _of_numpy(value) or _running(value, items):
        return found
    if other is not None:
        return other(value)
    true = not any(hasattr(kind, name) for name in ("__bool__", "__len__"))
    return ["opaque", str(kind.__name__), true, callable(value)]


def _running(value: Any, items: Callable[[Any], list[Any]]) -> Any:
    """The items of an iterator, or the result of a coroutine."""
    if hasattr(type(value), "__await__"):

        async def result() -> Any:
            return await value

        return ["coroutine", *items([asyncio.run(result())])]
    if not hasattr(type(value), "__next__"):
        return None
    found = items(itertools.islice(value, _MOST_ITEMS + 1))
    return ["iterator", found[:_MOST_ITEMS], len(found) > _MOST_ITEMS]


def _plain_types() -> tuple[type, ...]:
    arrays: tuple[type, ...] = ()
    with suppress(ImportError):  # a test may use an array's attribute where no array has come so far
        numpy = importlib.import_module("numpy")
        arrays = (numpy.ndarray, numpy.generic)
    running = (types.GeneratorType, types.CoroutineType)
    return (str, int, float, *_LISTED, *_MAPPED, *_BYTES, *_MADE_FROM, *running, *arrays)


def _of_numpy(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "ndarray"):
        return None
    if isinstance(value, numpy.generic) and not isinstance(value.item(), numpy.generic | bytes | tuple):
        return ["one", encode(value.item())]
    if isinstance(value, numpy.ndarray) and value.dtype.kind in _ARRAYS:
        content = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
        return ["array", value.dtype.str, list(value.shape), content]
    return None


def decode(data: Any) -> Any:
    """The value of `encode`'s data. Errors: ValueError for anything else."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("not a value: a JSON object")
        return data
    try:
        kind, *rest = data
        return _MAKE[kind](*rest)
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"not a value: {type(error).__name__}: {error}") from error


def _mapped(base: Any, pairs: list[list[Any]]) -> Any:
    made = base()
    for key, value in pairs:
        made[decode(key)] = decode(value)
    return made


def _array(dtype: str, shape: list[int], content: str) -> Any:
    numpy = importlib.import_module("numpy")
    kind = numpy.dtype(dtype)
    if kind.kind not in _ARRAYS:
        raise ValueError(f"not a value: an array of {dtype}")
    return numpy.frombuffer(base64.b64decode(content), dtype=kind).reshape(shape).copy()


def _iterator(items: list[Any], more: bool) -> Iterator[Any]:
    yield from map(decode, items)
    if more:
        raise ValueError(f"an iterator of more than {_MOST_ITEMS} items")


_MAKE: dict[Any, Callable[..., Any]] = {
    **{base.__name__: lambda items, *, base=base: base([decode(item) for item in items]) for base in _LISTED},
    **{base.__name__: partial(_mapped, base) for base in _MAPPED},
    **{base.__name__: lambda text, *, base=base: base(base64.b64decode(text)) for base in _BYTES},
    **{kind.__name__: lambda *parts, make=make: make(*map(decode, parts)) for kind, (_, make) in _MADE_FROM.items()},
    "int": lambda text: int(text, 16),
    "one": decode,
    "array": _array,
    "type": _TYPES.__getitem__,
    "iterator": _iterator,
    "coroutine": lambda value: _ready(decode(value)),
    "opaque": lambda name, true, called: (_OpaqueCallable if called else Opaque)(name, true),
}


def take_objects(named: Callable[[str], Any]) -> None:
    """In the process of the program: let tests give it what it has defined, by name, and builtin exceptions."""
    _MAKE["program"] = named
    _MAKE["raised"] = lambda name, args: _TYPES[name](*decode(args))


async def _ready(value: Any) -> Any:
    return value
