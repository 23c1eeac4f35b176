"""Settings: frozen, keyword-only dataclasses that say what is wrong when they are written, and their checks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar, dataclass_transform, get_args

from hybridflow.errors import ConfigError, nearest

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass whose constructor answers a wrong name with the nearest one (ConfigError)."""
    made = dataclass(frozen=True, kw_only=True)(cls)
    generated: Any = made.__init__

    @wraps(generated)
    def init(self: Any, *unnamed: Any, **values: Any) -> None:
        if unnamed:
            raise ConfigError(f"{cls.__name__} takes its settings by name, got {unnamed[0]!r}.")
        _check_names(made, values)
        generated(self, **values)

    made.__init__ = init  # type: ignore[method-assign]
    return made


def _check_names(cls: type, values: Mapping[str, Any]) -> None:
    known = {field.name: field for field in fields(cls)}
    for name in values:
        if name not in known:
            instead = getattr(cls, "_instead", {}).get(name)  # of what others have and this one does in its own way
            hint = f" {instead}" if instead else nearest(name, known) if known else " It takes none."
            raise ConfigError(f"{cls.__name__} has no setting {name!r}.{hint}")
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{cls.__name__} needs {name}=, which has no default.")


def require(condition: bool, message: str) -> None:
    """Errors: ConfigError with `message` unless `condition`."""
    if not condition:
        raise ConfigError(message)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number, of Python or numpy; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number, of Python or numpy; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def at_least(owner: Any, minimum: float, *names: str) -> None:
    """The settings `names` are finite numbers of at least `minimum`, or None where that is their default."""
    for name, value in _given(owner, names):
        good = is_number(value) and value >= minimum
        require(good, f"{type(owner).__name__}({name}={value!r}): must be at least {minimum}.")


def above(owner: Any, limit: float, *names: str) -> None:
    """The settings `names` are finite numbers above `limit` (-inf: any), or None where that is their default."""
    for name, value in _given(owner, names):
        bound = "" if limit == -math.inf else f" above {limit:g}"
        none = " or None" if getattr(type(owner), name, 0) is None else ""
        good = is_number(value) and value > limit
        require(good, f"{type(owner).__name__}({name}={value!r}): must be a finite number{bound}{none}.")


def share(owner: Any, *names: str) -> None:
    """The settings `names` are numbers from 0 to 1."""
    for name, value in _given(owner, names):
        good = is_number(value) and 0 <= value <= 1
        require(good, f"{type(owner).__name__}({name}={value!r}): must be a number from 0 to 1.")


def _given(owner: Any, names: Iterable[str]) -> list[tuple[str, Any]]:
    """The named settings with their values, without those that are None by default."""
    values = [(name, getattr(owner, name)) for name in names]
    return [(name, value) for name, value in values if value is not None or getattr(type(owner), name, 0) is not None]


def whole(owner: Any, minimum: int, *names: str) -> None:
    """The settings `names` are whole numbers of at least `minimum`, or None where that is their default."""
    for name, value in _given(owner, names):
        good = type(value) is int and value >= minimum
        require(good, f"{type(owner).__name__}({name}={value!r}): must be a whole number of at least {minimum}.")


def as_tuple(owner: object, name: str) -> None:
    """A list (as YAML gives it) becomes a tuple, so that the value can be hashed; a single text becomes one entry."""
    value = getattr(owner, name)
    require(isinstance(value, Iterable), f"{type(owner).__name__}({name}={value!r}): give a list.")
    object.__setattr__(owner, name, (value,) if isinstance(value, str) else tuple(value))


def one_of(owner: object, name: str, literal: Any) -> None:
    """The setting `name` is one of the values of a Literal."""
    value, known = getattr(owner, name), get_args(literal)
    if value not in known:
        raise ConfigError(f"{type(owner).__name__}({name}={value!r}) is unknown.{nearest(str(value), known)}")


def true_or_false(owner: object, *names: str) -> None:
    """The settings `names` are of type bool."""
    for name in names:
        value = getattr(owner, name)
        require(type(value) is bool, f"{type(owner).__name__}({name}={value!r}): give True or False.")
