"""The program as the tests see it: functions that take and return plain values, and exceptions by their classes."""

from __future__ import annotations

import builtins
import json
import os
import struct
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hybridflow.rewards.sandbox.values import NotJudged, Opaque, decode, encode

NAME = "solution"  # of the program as a module; not __main__, so its main part does not run
_HEADER = struct.Struct("<I")
_LARGEST = 64 << 20


class ProgramEnded(BaseException):
    """The program is gone: nothing that a test catches."""


class Channel:
    """Messages to and from the other process."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink

    def send(self, message: dict[str, Any]) -> None:
        """Errors: ValueError for one of more than 64 MiB, BrokenPipeError when the other process is gone."""
        data = json.dumps(message).encode()
        if len(data) > _LARGEST:
            raise ValueError(f"a value of {len(data) >> 20} MiB is too large to be passed on")
        rest = memoryview(_HEADER.pack(len(data)) + data)
        while rest:
            rest = rest[os.write(self._sink, rest) :]

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other process is gone. Errors: ValueError for anything else."""
        header = self._read(_HEADER.size)
        (length,) = _HEADER.unpack(header) if header else (0,)
        if length > _LARGEST:
            raise ValueError(f"a message of {length} bytes")
        data = self._read(length) if header else b""
        if not data:
            return None
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def _read(self, length: int) -> bytes:
        parts, left = [], length
        while left:
            part = os.read(self._source, min(left, 1 << 20))
            if not part:
                return b""
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


class Remote:
    """A program in another process. `asked` counts its uses, `ended` says that it is gone.

    `error`: the last exception that it told, as the last line of a traceback; "" for none.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._classes: dict[tuple[str, ...], type[BaseException]] = {}
        self.asked, self.ended, self.error = 0, False, ""

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """What the program has of these names. Errors: what was raised while it was loaded."""
        found = {}
        for name, what in self._ask({"names": wanted})["names"].items():
            if name not in wanted:
                raise ValueError(f"{name} was not asked for")
            if "raises" in what:
                found[name] = self._class(what["raises"])
            elif "call" in what:
                found[name] = self._function(name)
            else:
                found[name] = decode(what["value"])
                self.asked += 1  # a constant is used without asking
        return found

    def last_function(self) -> str:
        """Name of the function that the program defines last, "" if it defines none."""
        return str(self._ask({"names": []})["last"])

    def _function(self, name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            given = {
                key: encode(value, other=self._refuse) for key, value in {"args": [*args], "kwargs": kwargs}.items()
            }
            answer = self._ask({"call": name, **given})
            for argument, state in zip(args, answer.get("changed") or []):
                _change(argument, decode(state))
            return decode(answer.get("value"))

        function.__name__ = function.__qualname__ = name
        return function

    def _refuse(self, value: Any) -> NoReturn:
        if isinstance(value, Opaque):
            raise TypeError(f"{value!r} is no plain value")
        kind = type(value).__name__
        raise NotJudged(
            f"the tests give the program an object of class {kind}, which only Code(same_process=True) judges"
        )

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
            self.error = str(answer["error"]["limit"])
            raise self._exception(answer["error"])
        return answer

    def _exception(self, told: dict[str, Any]) -> BaseException:
        kind, arguments = self._class(told["classes"]), decode(told["args"])
        if not issubclass(kind, Exception) or issubclass(kind, StopIteration | StopAsyncIteration):  # of the tests' own
            return RuntimeError(f"it raised {kind.__name__}")
        try:
            return kind(*arguments)
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
            kind = self._classes.setdefault(key, type(own[count - 1], (kind,), {}))
        return kind


class Local:
    """A program in the process of the tests, which it can then reach: its objects are used as they are."""

    def __init__(self, load: Callable[[], Mapping[str, Any]]) -> None:
        self.asked, self.ended, self.error = 1, False, ""
        self._load, self._loaded = load, None

    def names(self, wanted: list[str]) -> dict[str, Any]:
        if self._loaded is None:
            self._loaded = self._load()
        found = {name: find(self._loaded, name) for name in wanted}
        return {name: value for name, value in found.items() if value is not MISSING}

    def last_function(self) -> str:
        self.names([])
        return last_function(self._loaded or {})


MISSING = object()


def find(names: Mapping[str, Any], name: str) -> Any:
    """What the program means by a name: its own, or a method of its class Solution; MISSING for neither."""
    solution = names.get("Solution")
    if name in names or not isinstance(solution, type) or not hasattr(solution, name):
        return names.get(name, MISSING)
    return lambda *args, **kwargs: getattr(solution(), name)(*args, **kwargs)


def last_function(names: Mapping[str, Any]) -> str:
    """Name of the function that the program defines last, "" if it defines none."""
    found = [name for name, value in names.items() if isinstance(value, types.FunctionType)]
    own = [name for name in found if names[name].__module__ == NAME]
    return own[-1] if own else ""


def _change(argument: Any, state: Any) -> None:
    """Bring an argument to the state in which the program has left it."""
    if state is None or type(state) is not type(argument):
        return
    if isinstance(argument, list | bytearray):
        argument[:] = state
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(state)
