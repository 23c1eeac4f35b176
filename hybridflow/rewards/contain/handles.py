"""Handles: stand-ins for objects that live on the other side of a channel.

A handle passes on what was asked of the object by name. It decides nothing by comparison: next to a plain value it is
never equal, whatever the object itself would say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

Ask = Callable[..., Any]  # (operation, *arguments) -> value
_ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lt",
    "le",
    "gt",
    "ge",
)
_DUNDERS = ("__name__", "__qualname__", "__doc__", "__dict__")


class Handle:
    """An object of the other side; `_is` its number there."""

    __slots__ = ("_ask", "_is")

    def __init__(self, ask: Ask, number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_is", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _DUNDERS:
            raise AttributeError(name)
        return self._ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Handle) and self._ask("equal", self, other) is True)

    def __hash__(self) -> int:
        return hash(self._is)

    def __bool__(self) -> bool:
        return self._ask("truth", self) is True

    def __str__(self) -> str:
        return _text(self._ask("text", self, "str"))

    def __repr__(self) -> str:
        return _text(self._ask("text", self, "repr"))

    def __enter__(self) -> Any:
        return self._ask("call", self._ask("get", self, "__enter__"), [], {})

    def __exit__(self, *_: object) -> None:
        self._ask("call", self._ask("get", self, "__exit__"), [None, None, None], {})


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("str() or repr() of an object did not give a str")
    return value


def _arithmetic(name: str) -> Callable[[Handle, Any], Any]:
    def method(self: Handle, other: Any) -> Any:
        # Next to a plain value the object could answer what is wanted.
        return self._ask("operate", name, self, other) if isinstance(other, Handle) else NotImplemented

    return method


for _name in _ARITHMETIC:
    setattr(Handle, f"__{_name}__", _arithmetic(_name))


class _Callable(Handle):
    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", self, list(args), kwargs)


class _Class(_Callable):
    __slots__ = ()

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Handle) and self._ask("instance", instance, self) is True


class _Iterable(Handle):
    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iter", self)
        while True:
            more, value = self._ask("next", iterator)
            if not more:
                return
            yield value


class _Iterator(_Iterable):
    __slots__ = ()

    def __next__(self) -> Any:
        more, value = self._ask("next", self)
        if not more:
            raise StopIteration
        return value


class _Sized(Handle):
    __slots__ = ()

    def __len__(self) -> int:
        return self._ask("len", self)


class _Indexed(Handle):
    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", self, key, value)


class _Coroutine(Handle):
    """Finished by the other side at the first step of whoever awaits it."""

    __slots__ = ()

    def send(self, _: Any) -> Any:
        raise StopIteration(self._ask("await", self))

    def throw(self, *error: Any) -> Any:
        raise error[0]

    def close(self) -> None:
        pass

    def __await__(self) -> Iterator[Any]:
        return self._ask("await", self)
        yield


_ABLE = {"w": _Coroutine, "t": _Class, "c": _Callable, "n": _Iterator, "i": _Iterable, "l": _Sized, "x": _Indexed}


def abilities(value: Any) -> str:
    """What an object can do, as letters: coroutine, class, callable, iterator, iterable, sized, indexed."""
    kind = type(value)
    return "".join(
        letter
        for letter, is_so in (
            ("w", hasattr(kind, "__await__")),
            ("t", isinstance(value, type)),
            ("c", callable(value) and not isinstance(value, type)),
            ("n", hasattr(kind, "__next__")),
            ("i", hasattr(kind, "__iter__") and not hasattr(kind, "__next__")),
            ("l", hasattr(kind, "__len__")),
            ("x", hasattr(kind, "__getitem__")),
        )
        if is_so
    )


@cache
def handle_class(able: str) -> type[Handle]:
    """The class of handles for objects with these abilities. Errors: KeyError for unknown ones."""
    bases = tuple(_ABLE[letter] for letter in able) or (Handle,)
    return type("Handle", bases, {"__slots__": ()})
