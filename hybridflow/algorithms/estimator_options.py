"""Values of the options of the built-in advantage estimators: what each must be, checked without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridflow.algorithms.lagrange import Lagrange, LagrangeState
from hybridflow.algorithms.options import is_number, is_whole
from hybridflow.errors import ConfigError


def _share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def _switch(value: Any) -> bool:
    return isinstance(value, bool)


def _names(value: Any) -> bool:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return several and len(value) == len(set(map(str, value))) > 0 and all(isinstance(name, str) for name in value)


def _numbers(value: Any) -> bool:
    return value is None or (isinstance(value, Sequence) and not isinstance(value, str) and all(map(is_number, value)))


def _set_size(value: Any) -> bool:
    return value is None or (is_whole(value) and value >= 2)


def _multiplier(value: Any) -> bool:
    return isinstance(value, LagrangeState) or (is_number(value) and value >= 0)


_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "gamma": (_share, "a number from 0 to 1"),
    "lam": (_share, "a number from 0 to 1"),
    "eps": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "normalize": (_switch, "True or False"),
    "whiten": (_switch, "True or False"),
    "k": (_set_size, "None (the whole group) or a whole number of at least 2"),
    "components": (_names, 'names of reward components, such as ("correct", "format"), each once'),
    "weights": (_numbers, "None (1 each) or one number for each of components"),
    "lagrange": (_multiplier, "a number of at least 0 (a multiplier that stays), or Lagrange(limit=...), which learns"),
}


def check_values(what: str, options: Mapping[str, Any]) -> None:
    """Errors: ConfigError for a value out of range; `what` names the estimator in the message."""
    for name, value in options.items():
        fits, wanted = _VALUES.get(name, (None, ""))
        if fits is not None and not fits(value):
            hint = " Pure functions take LagrangeState(Lagrange(...))." if isinstance(value, Lagrange) else ""
            raise ConfigError(f"{what}: {name}={value!r} must be {wanted}.{hint}")
    weights, components = options.get("weights"), options.get("components")
    if weights is not None and components is not None and len(weights) != len(components):
        raise ConfigError(f"{what}: {len(weights)} weights for {len(components)} components {tuple(components)}.")
