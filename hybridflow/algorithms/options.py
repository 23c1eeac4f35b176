"""Options of a function that is chosen by name: those that its signature has. Pure."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

from hybridflow.errors import ConfigError, nearest

_F = TypeVar("_F", bound=Callable[..., Any])


def check_options(what: str, function: Callable[..., object], options: Iterable[str], after: int) -> None:
    """Errors: ConfigError for an option that is no parameter of `function` after its first `after` ones.

    `what` names the function in the message, which names the nearest option. With `**options` it takes any.
    """
    known = options_of(function, after)
    if known is not None:
        check_names(what, known, options)


def options_of(function: Callable[..., object], after: int) -> dict[str, Parameter] | None:
    """Parameters after the first `after` ones that can be given by name; None when it takes any, as `**options`."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name: p for p in parameters[after:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def check_names(what: str, known: Iterable[str], options: Iterable[str]) -> None:
    """Errors: ConfigError for an option that is not among the `known` ones, with the nearest of them."""
    known = list(known)
    for name in options:
        if name not in known:
            hint = nearest(name, known) if known else " It takes none."
            raise ConfigError(f"{what} has no option {name!r}.{hint}")


def inputs_of(function: Callable[..., object]) -> tuple[str, ...]:
    """Names of the parameters that have to be given by position: those without a default that may be."""
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in positional and p.default is p.empty)


def takes_options_of(pure: Callable[..., object], *, without: Iterable[str] = ()) -> Callable[[_F], _F]:
    """For a function that hands its `**options` on to `pure`: its signature then shows the keyword-only parameters of
    `pure` (all but `without`) in their place, so that names and defaults are written down once."""

    def named(function: _F) -> _F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        hidden = {p.name for p in own} | set(without)
        theirs = inspect.signature(pure).parameters.values()
        passed = [p for p in theirs if p.kind is p.KEYWORD_ONLY and p.name not in hidden]
        function.__signature__ = signature.replace(parameters=[*own, *passed])  # type: ignore[attr-defined]
        return function

    return named


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number, of Python or numpy; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number, of Python or numpy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_above(what: str, options: Mapping[str, Any], limits: Mapping[str, float], optional: Iterable[str]) -> None:
    """Errors: ConfigError for an option of `limits` that is no finite number above its limit.

    Those of `optional` may be None. A limit of -inf says that any finite number will do.
    """
    for name in limits.keys() & options.keys():
        value, limit = options[name], limits[name]
        if value is None and name in optional:
            continue
        if not (is_number(value) and value > limit):
            above = "" if limit == -math.inf else f" above {limit:g}"
            none = " or None" if name in optional else ""
            raise ConfigError(f"{what}: {name}={value!r} must be a finite number{above}{none}.")


def check_not_negative(what: str, options: Mapping[str, Any], *names: str) -> None:
    """Errors: ConfigError for one of these options that is no finite number of at least 0."""
    for name in names:
        if name in options and not (is_number(options[name]) and options[name] >= 0):
            raise ConfigError(f"{what}: {name}={options[name]!r} must be a finite number of at least 0.")
