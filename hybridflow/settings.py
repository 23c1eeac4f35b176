"""Settings: frozen, keyword-only dataclasses that say what is wrong when they are written, and their checks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from typing import Any, TypeVar, dataclass_transform, get_args

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
            hint = f" {instead}" if instead else nearest(name, known)
            raise ConfigError(f"{cls.__name__} has no setting {name!r}.{hint}")
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{cls.__name__} needs {name}=, which has no default.")


def require(condition: bool, message: str) -> None:
    """Errors: ConfigError with `message` unless `condition`."""
    if not condition:
        raise ConfigError(message)


def at_least(owner: Any, minimum: float, *names: str) -> None:
    """The settings `names` are finite numbers of at least `minimum`, or None where that is their default."""
    for name in names:
        value = getattr(owner, name)
        if value is None and getattr(type(owner), name, 0) is None:
            continue
        good = isinstance(value, int | float) and type(value) is not bool and math.isfinite(value) and value >= minimum
        require(good, f"{type(owner).__name__}({name}={value!r}): must be at least {minimum}.")


def whole(owner: Any, minimum: int, *names: str) -> None:
    """The settings `names` are whole numbers of at least `minimum`, or None where that is their default."""
    for name in names:
        value = getattr(owner, name)
        if not (value is None and getattr(type(owner), name, 0) is None):
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
