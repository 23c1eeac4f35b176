"""Options of a function that is chosen by name: those that its signature has. Pure."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from numbers import Real
from typing import Any

from hybridflow.errors import ConfigError, nearest


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


def check_above(what: str, options: Mapping[str, Any], limits: Mapping[str, float], optional: Iterable[str]) -> None:
    """Errors: ConfigError for an option of `limits` that is no finite number above its limit.

    Those of `optional` may be None. A limit of -inf says that any finite number will do.
    """
    for name in limits.keys() & options.keys():
        value, limit = options[name], limits[name]
        if value is None and name in optional:
            continue
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        if not (math.isfinite(number) and number > limit):
            above = "" if limit == -math.inf else f" above {limit:g}"
            none = " or None" if name in optional else ""
            raise ConfigError(f"{what}: {name}={value!r} must be a finite number{above}{none}.")
