"""An environment in an interpreter of its own, which runs this file and needs the standard library only (3.8 or later).

Requests come on standard input, one JSON object a line, and each gets one line back: {"value": ...}, or {"error":
[kind, text]}. What the environment prints goes to standard error. See `interpreter.py`, which starts it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import traceback
import typing

_CONTRACT = ("reset", "step", "get_reward", "close")
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
_PR_SET_PDEATHSIG = 1


def main() -> None:
    setup = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup["parent"]:
        return
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[0] = setup["directory"]  # in place of this file's
    served = _Served(setup["target"])
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"value": getattr(served, request.pop("do"))(**request)}
            text = json.dumps(answer, default=_plain)
        except Exception as error:
            text = json.dumps({"error": _described(error)})
        answers.write(text + "\n")
        answers.flush()


class _Served:
    """The class at `target`, and the environment made from it last."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._environment: typing.Any = None

    def describe(self) -> typing.Any:
        kind = self._kind
        if hasattr(kind, "PACKAGE"):  # `package_adapters.py` says so of what it imports late
            importlib.import_module(kind.PACKAGE)
        names = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
        tools = [_tool(name, getattr(kind, name)) for name in names if name not in _CONTRACT]
        return {"contract": [name for name in _CONTRACT if name in names], "tools": tools}

    def make(self, settings: dict) -> None:
        self._environment = None
        self._environment = self._kind(**settings)

    def call(self, name: str, args: list, kwargs: dict) -> typing.Any:
        """`reset` is given the columns that it takes."""
        method = getattr(self._environment, name)
        if name == "reset":
            parameters = inspect.signature(method).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                kwargs = {column: kwargs[column] for column in parameters if column in kwargs}
        return method(*args, **kwargs)

    @functools.cached_property
    def _kind(self) -> typing.Any:
        where, _, name = self._target.rpartition(":")
        return getattr(_module(where), name)


def _module(where: str) -> typing.Any:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    name = os.path.splitext(os.path.basename(where))[0]
    spec = importlib.util.spec_from_file_location(name, where)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tool(name: str, method: typing.Any) -> typing.Any:
    """A method's name, docstring, and parameters as JSON schemas (without descriptions)."""
    hints = typing.get_type_hints(method)
    properties, required = {}, []
    for one in list(inspect.signature(method).parameters.values())[1:]:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        if one.name not in hints:
            raise TypeError(f"{name}: the argument {one.name} has no type hint")
        properties[one.name] = _schema(hints[one.name])
        if one.default is one.empty:
            required.append(one.name)
    return {"name": name, "doc": inspect.getdoc(method) or "", "properties": properties, "required": required}


def _schema(hint: typing.Any) -> typing.Any:
    kind: typing.Any = getattr(hint, "__origin__", hint)
    inner: typing.Any = getattr(hint, "__args__", ())
    if kind in _TYPES:
        found = {"type": _TYPES[kind]}
        if kind is list and inner and not isinstance(inner[0], typing.TypeVar):
            found["items"] = _schema(inner[0])
        return found
    if kind is getattr(typing, "Literal", None):
        return {"type": _TYPES[type(inner[0])], "enum": list(inner)}
    if kind is typing.Union or type(hint).__name__ == "UnionType":
        several = [_schema(one) for one in inner if one is not type(None)]
        found = several[0] if len(several) == 1 else {"anyOf": several}
        return {**found, "nullable": True} if type(None) in inner else found
    if hint is typing.Any:
        return {}
    raise TypeError(f"the type hint {hint} has no JSON schema")


def _plain(value: typing.Any) -> typing.Any:
    """Numbers and arrays of numpy and torch as JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be sent back: {value!r}"[:500])


def _described(error: BaseException) -> typing.Any:
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return [type(error).__name__, f"{error}{place}"]


if __name__ == "__main__":
    main()
