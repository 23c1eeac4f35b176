"""Settings: frozen, keyword-only dataclasses that validate their fields at construction. Pure."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, wraps
from inspect import Signature, get_annotations, signature
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

import yaml

from hybridflow.errors import ConfigError, nearest

STAGING = "HYBRIDFLOW_STAGING"  # the environment's name for the directory of all staging directories
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])


class Check(NamedTuple):
    """Requirement on a setting, as text and test: `Annotated[float, Check("above 1", lambda value: value > 1)]`.

    None passes where the annotation says `| None`. `bool` and `Literal[...]` settings are checked without a Check; a
    list given for a `tuple[...]` becomes a tuple (YAML has no tuples).
    """

    words: str
    holds: Callable[[Any], bool]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite Python or numpy number; bools are not."""
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    return abs(number) <= sys.float_info.max  # a whole number may be too large for math.isfinite


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether `value` is a Python or numpy integer; bools are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


Finite = Annotated[float, Check("a finite number", is_number)]
NonNegative = Annotated[float, Check("at least 0", lambda value: is_number(value) and value >= 0)]
Positive = Annotated[float, Check("a finite number above 0", lambda value: is_number(value) and value > 0)]
Fraction = Annotated[float, Check("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)]
PositiveFraction = Annotated[float, Check("in (0, 1]", lambda value: is_number(value) and 0 < value <= 1)]
Count = Annotated[int, Check("a whole number of at least 0", lambda value: type(value) is int and value >= 0)]
Size = Annotated[int, Check("a whole number of at least 1", lambda value: type(value) is int and value >= 1)]


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """Decorator: a frozen, keyword-only dataclass with fields checked at construction (`Check`).

    Errors: ConfigError for a value out of range, and for an unknown name, with the nearest one.
    """
    made = dataclass(frozen=True, kw_only=True)(cls)
    generated: Any = made.__init__

    @wraps(generated)
    def init(self: Any, *unnamed: Any, **values: Any) -> None:
        if unnamed:
            raise ConfigError(f"{cls.__name__} takes its settings by name, got {unnamed[0]!r}.")
        _check_names(made, values)
        generated(self, **{name: checked(made, name, value) for name, value in values.items()})

    made.__init__ = init  # type: ignore[method-assign]
    return made


def bound_settings(
    signature: Signature, where: str, args: Sequence[Any], kwargs: Mapping[str, Any], defaults: bool = True
) -> dict[str, Any]:
    """The arguments of a method or constructor by name, with `**options`. Errors: ConfigError with the nearest name."""
    known = [name for name in signature.parameters if name != "self"]
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError as error:
        more = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        unknown = None if more else next((name for name in kwargs if name not in known), None)
        hint = f"no setting {unknown!r}.{nearest(unknown, known)}" if unknown else f"{error}."
        raise ConfigError(f"{where}: {hint}") from None
    if defaults:
        bound.apply_defaults()
    out = dict(list(bound.arguments.items())[1:])
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            out |= out.pop(name, {})
    return out


def by_name(init: F) -> F:
    """Decorator of a constructor: what `bound_settings` refuses is refused."""
    known = signature(init)

    @wraps(init)
    def checked_init(self: Any, *args: Any, **values: Any) -> None:
        bound_settings(known, type(self).__name__, args, values, defaults=False)
        init(self, *args, **values)

    return cast(F, checked_init)


def _check_names(cls: type, values: Mapping[str, Any]) -> None:
    known = {field.name: field for field in fields(cls)}
    for name in values:
        if name not in known:
            instead = getattr(cls, "_instead", {}).get(name)  # hint for a setting of other classes
            hint = f" {instead}" if instead else nearest(name, known) if known else " It takes none."
            raise ConfigError(f"{cls.__name__} has no setting {name!r}.{hint}")
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{cls.__name__} needs {name}=, which has no default.")


def check_fields(owner: Any) -> None:
    """Check every field of a dataclass as `settings` does. Errors: ConfigError."""
    for field in fields(owner):
        if field.init:
            checked(type(owner), field.name, getattr(owner, field.name))


def checked(cls: type, name: str, value: Any) -> Any:
    """`value` converted to the setting's annotation. Errors: ConfigError for a wrong type or range."""
    kind, optional = _annotations(cls)[name]
    if value is None and optional:
        return None
    shown = f"{cls.__name__}({name}={value!r})"
    if get_origin(kind) is Annotated:
        text = ", and this is a text: write it without quotes" if isinstance(value, str) else ""
        more = f"{' or None' if optional else ''}{text}"
        for check in kind.__metadata__:
            require(check.holds(value), f"{shown}: must be {check.words}{more}.")
        kind = kind.__origin__
    if kind is bool:
        require(type(value) is bool, f"{shown}: give True or False.")
    elif get_origin(kind) is Literal:
        if value not in (known := get_args(kind)):
            raise ConfigError(f"{shown} is unknown.{nearest(str(value), known)}")
    elif get_origin(kind) is tuple:
        if not isinstance(value, Iterable):
            raise ConfigError(f"{shown}: give a list.")
        return (value,) if isinstance(value, str) else tuple(value)
    return value


@cache
def _annotations(cls: type) -> dict[str, tuple[Any, bool]]:
    """For each field its type without `| None`, and whether None is allowed."""
    found = {}
    hints = (get_annotations(base, eval_str=True) for base in reversed(cls.__mro__))
    for name, kind in chain.from_iterable(each.items() for each in hints):
        options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        others = [option for option in options if option is not type(None)]
        found[name] = (others[0] if len(others) == 1 else Any, len(others) < len(options))
    return found


def is_address(path: Any) -> bool:
    """Whether a path is an address of another machine, such as s3://bucket/run, which would name a folder here."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.:-]+:/", text) is not None  # pathlib has taken one of two slashes


def local_path(path: str | os.PathLike[str]) -> str:
    """The path. Errors: ConfigError for an address."""
    text = os.fspath(path)
    require(not is_address(text), f"{text!r} is an address of another machine: give a directory that is mounted here.")
    return text


def staging_directory(address: str | os.PathLike[str]) -> Path:
    """The local directory for an address: below $HYBRIDFLOW_STAGING, otherwise ~/.cache/hybridflow/staging.

    Errors: ConfigError, as check_address."""
    check_address(address)
    scheme, _, rest = os.fspath(address).partition(":")
    home = os.environ.get(STAGING) or cache_directory() / "staging"
    return Path(home).absolute().joinpath(scheme, *(part for part in rest.split("/") if part))


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybridflow"


def check_address(address: str | os.PathLike[str]) -> None:
    """Errors: ConfigError for an address with a password, which would be in names of directories, logs and messages;
    and for one that leaves its directory."""
    text = os.fspath(address)
    if found := re.search(r":/{1,2}[^/@\[]*:(?!\d*(/|$))", text):  # what follows a host's ":" is a port
        raise ConfigError(
            f"the address {text[: found.start()]}://... has a password: credentials go into the environment or into "
            f"fsspec's configuration."
        )
    require(".." not in text.partition(":")[2].split("/"), f"{text!r} leaves its directory: give one without '..'.")


def require(condition: bool, message: str) -> None:
    """Errors: ConfigError with `message` unless `condition`."""
    if not condition:
        raise ConfigError(message)


def read_yaml(path: str | Path, what: str, error: type[Exception] = ConfigError) -> Any:
    """Content of a YAML file, called `what` in messages. Errors: `error` for a file that cannot be read."""
    try:
        return yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise error(f"there is no {what} {path}.") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{path} cannot be read: {problem}.") from None
    except yaml.YAMLError as problem:
        raise error(f"{path} is not a {what}, nor valid YAML: {problem}.") from None


def constructor_settings(worker_class: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a worker with their defaults: its own, and what a base class has for those that the constructor
    may pass on in `**settings`. Errors: ConfigError with the nearest name."""
    if worker_class.__init__ is object.__init__:
        require(not settings, f"{worker_class.__name__} takes no settings, got {sorted(settings)}.")
        return {}
    own = bound_settings(signature(worker_class.__init__), worker_class.__name__, (), settings)
    return _inherited(worker_class) | own


def own_settings(worker_class: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that its constructor gets: without defaults of a base class, for which it may have values of its own."""
    inherited = _inherited(worker_class)
    return {
        name: value
        for name, value in settings.items()
        if name not in inherited or type(value) is not type(inherited[name]) or value != inherited[name]
    }


def _inherited(worker_class: type) -> dict[str, Any]:
    found, names = dict[str, Any](), set[str]()
    for each in worker_class.__mro__[:-1]:
        if "__init__" in vars(each):
            parameters = list(signature(each.__init__).parameters.values())[1:]
            if names:  # not the class's own
                found |= {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in names}
            names |= {p.name for p in parameters}
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                break
    return found
