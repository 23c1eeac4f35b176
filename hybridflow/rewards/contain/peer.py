"""Peer: one end of the channel between the tests and the program; each calls what the other one holds."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import json
import operator
import os
import struct
import types
from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.rewards.contain.handles import Handle, abilities, handle_class
from hybridflow.rewards.contain.values import decode, encode

_HEADER = struct.Struct("<I")
_LARGEST = 64 << 20
_MUTABLE = (list, dict, set, bytearray)


class PeerEnded(ConnectionError):  # noqa: N818  (a fact about the other side, not a mistake of this one)
    """The other side is gone."""


class Peer:
    """Asks the other side, and serves it meanwhile.

    `operations`: what it may ask for beyond the usual. `open_to(object, name)`: whether it may use that attribute of an
    object that it holds, and no other operations than using it; None: anything. `told(error)` sees what calls raise.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        *,
        operations: Mapping[str, Callable[..., Any]] | None = None,
        open_to: Callable[[Any, str], bool] | None = None,
        told: Callable[[BaseException], bool] | None = None,
    ) -> None:
        self._source, self._sink, self._open_to, self._told = source, sink, open_to, told
        self._operations = {**_OPERATIONS, **(operations or {})}
        self._ours: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._theirs: dict[int, Any] = {}

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Have the other side do something. Errors: what it raised; PeerEnded; ValueError for a broken answer."""
        self._send({"ask": operation, "with": [encode(argument, self._export) for argument in arguments]})
        while True:
            message = self._receive()
            if "ask" in message:
                self._answer(message)
            elif "error" in message:
                raise self._exception(message["error"])
            else:
                break
        if operation == "call":
            self._mutate(arguments[1], message.get("changed") or [])
        return decode(message.get("value"), self._resolve)

    def serve(self) -> None:
        """Answer until the other side is gone."""
        while True:
            try:
                message = self._receive()
            except PeerEnded:
                return
            self._answer(message)

    def _answer(self, message: dict[str, Any]) -> None:
        operation = message["ask"]
        try:
            arguments = [decode(argument, self._resolve) for argument in message["with"]]
            self._check(operation, arguments)
            before = [json.dumps(a) for a in message["with"][1][1]] if operation == "call" else []
            answer: dict[str, Any] = {"value": encode(self._operations[operation](*arguments), self._export)}
            if before:
                answer["changed"] = self._changed(arguments[1], before)
        except PeerEnded:
            raise
        except Exception as error:  # of the code that is served: it belongs to the side that asked
            if self._told:
                self._told(error)
            answer = {"error": self._describe(error)}
        self._send(answer)

    def _check(self, operation: str, arguments: list[Any]) -> None:
        if self._open_to is None:
            return
        subject = arguments[0] if arguments else None
        held = operation in _USES and self._ours.get(self._numbers.get(id(subject), -1)) is subject
        named = operation not in ("get", "set") or self._open_to(subject, arguments[1])
        if not (held and named):
            raise PermissionError(f"{operation} is not for this side")

    def _changed(self, arguments: list[Any], before: list[str]) -> list[Any]:
        """The new state of every argument that the call changed in place, else None."""
        found: list[Any] = []
        for argument, old in zip(arguments, before):
            new = encode(argument, self._export) if type(argument) in _MUTABLE else None
            found.append(None if new is None or json.dumps(new) == old else new)
        return found if any(found) else []

    def _mutate(self, arguments: list[Any], changed: list[Any]) -> None:
        for argument, state in zip(arguments, changed):
            value = decode(state, self._resolve)
            if value is None or type(value) is not type(argument):
                continue
            if isinstance(argument, list | bytearray):
                argument[:] = value
            elif isinstance(argument, dict | set):
                argument.clear()
                argument.update(value)

    def _export(self, value: Any) -> Any:
        if isinstance(value, Handle):
            return ["yours", value._is]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._ours)
            self._ours[number] = value  # kept, so that the id stays its own
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["raises", number, value.__name__, _builtin_base(value).__name__]
        return ["mine", number, abilities(value)]

    def _resolve(self, data: list[Any]) -> Any:
        kind, name = data[0], data[1]
        if kind == "yours" and name in self._ours:
            return self._ours[name]
        if kind == "module":
            return importlib.import_module(name)
        if kind == "raises" and type(name) is int:
            return self._theirs.setdefault(name, _exception_class(data[2], data[3]))
        if kind == "mine" and type(name) is int:
            return self._theirs.setdefault(name, handle_class(data[2])(self.ask, name))
        raise ValueError(f"not a value: {str(data)[:80]}")

    def _describe(self, error: BaseException) -> dict[str, Any]:
        kind = type(error)
        try:
            arguments = encode(list(error.args), self._export)
            state = encode({k: v for k, v in vars(error).items() if isinstance(k, str)}, self._export)
        except Exception as second:  # a value that cannot be sent; the class is what counts
            arguments, state = ["list", [type(second).__name__]], None
        return {"class": encode(kind, self._export), "args": arguments, "state": state}

    def _exception(self, told: dict[str, Any]) -> BaseException:
        kind = decode(told["class"], self._resolve)
        arguments = decode(told["args"], self._resolve)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            return RuntimeError(f"it raised {kind!r}")
        try:
            error = kind(*arguments)
        except TypeError:  # a class that wants to be made in its own way
            error = kind.__new__(kind)
            error.args = tuple(arguments)
        if _builtin_base(kind) is not kind:
            error.__dict__.update(decode(told["state"], self._resolve) or {})
        return error

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        if len(data) > _LARGEST:
            raise ValueError(f"a value of {len(data) >> 20} MiB is too large to be passed on")
        rest = memoryview(_HEADER.pack(len(data)) + data)
        try:
            while rest:
                rest = rest[os.write(self._sink, rest) :]
        except BrokenPipeError:
            raise PeerEnded("the other side is gone") from None

    def _receive(self) -> dict[str, Any]:
        (length,) = _HEADER.unpack(self._read(_HEADER.size))
        if length > _LARGEST:
            raise ValueError(f"a message of {length} bytes")
        message = json.loads(self._read(length))
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def _read(self, length: int) -> bytes:
        parts, left = [], length
        while left:
            part = os.read(self._source, min(left, 1 << 20))
            if not part:
                raise PeerEnded("the other side is gone")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def _builtin_base(kind: type) -> type[BaseException]:
    return next(base for base in kind.__mro__ if base.__module__ == "builtins" and issubclass(base, BaseException))


def _exception_class(name: str, base: str) -> type[BaseException]:
    parent = getattr(builtins, base)
    if not (isinstance(parent, type) and issubclass(parent, BaseException)):
        raise ValueError(f"{base} is no exception")
    return type(str(name), (parent,), {})


def _next(iterator: Any) -> list[Any]:
    for value in iterator:
        return [True, value]
    return [False, None]


async def _wait(awaitable: Any) -> Any:
    return await awaitable


_USES = ("call", "get", "set", "item", "setitem", "len", "iter", "next", "truth", "text")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "await": lambda awaitable: asyncio.run(_wait(awaitable)),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "setitem": operator.setitem,
    "len": lambda of: len(of),
    "iter": iter,
    "next": _next,
    "truth": bool,
    "text": lambda of, how: {"str": str, "repr": repr}[how](of),
    "equal": lambda one, other: bool(one == other),
    "instance": isinstance,
    "operate": lambda name, one, other: getattr(operator, name if name not in ("and", "or") else f"{name}_")(
        one, other
    ),
}
