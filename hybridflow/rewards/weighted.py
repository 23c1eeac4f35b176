"""Several reward functions with weights: names of their columns, and the sum over those that apply to a row."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.errors import ConfigError, nearest
from hybridflow.rewards.answers import is_number
from hybridflow.rewards.signature import innermost


def weighted_sum(values: Sequence[float | list[float] | None], weights: Sequence[float]) -> float | list[float] | None:
    """Sum of weight * value over the functions whose value for the row is not None; None when no function applies.

    Values are numbers, or lists of one length (one number per token), which are added token by token.
    """
    given = [(weight, value) for weight, value in zip(weights, values, strict=True) if value is not None]
    if not given:
        return None
    if isinstance(given[0][1], list):
        columns = zip(*(value for _, value in given), strict=True)  # type: ignore[arg-type]
        return [sum(w * v for (w, _), v in zip(given, column, strict=True)) for column in columns]
    return sum(weight * value for weight, value in given)  # type: ignore[operator]


def named(functions: Any) -> dict[str, Any]:
    """Functions by the name of their column: the names of a mapping, else their own, made unique with _2, _3, ...

    A function counts by its name, a callable object by its class (`ExactMatch` is exact_match).
    Errors: ConfigError when there is none.
    """
    if isinstance(functions, Mapping):
        if bad := [name for name in functions if not isinstance(name, str) or not name]:
            raise ConfigError(f"reward functions are named by texts that are not empty, got {bad[0]!r}.")
        given = list(functions.items())
    else:
        several = functions if isinstance(functions, list | tuple) else [functions]
        given = [(_column_name(function), function) for function in several]
    if not given:
        raise ConfigError("there is no reward function in the list: give at least one.")
    out: dict[str, Any] = {}
    for name, function in given:
        number = 1
        unique = name
        while unique in out:
            number += 1
            unique = f"{name}_{number}"
        out[unique] = function
    return out


def weights_of(weights: Sequence[float] | Mapping[str, float] | None, names: Sequence[str]) -> list[float]:
    """One weight per function, 1 where none is given. Errors: ConfigError for a wrong count, name or value."""
    if weights is None:
        return [1.0] * len(names)
    if isinstance(weights, Mapping):
        if unknown := [name for name in weights if name not in names]:
            raise ConfigError(f"weights: there is no reward function {unknown[0]!r}.{nearest(str(unknown[0]), names)}")
        weights = [weights.get(name, 1.0) for name in names]
    if isinstance(weights, str) or not isinstance(weights, Sequence) or len(weights) != len(names):
        raise ConfigError(f"weights={weights!r}: give one per reward function ({', '.join(names)}), or a mapping.")
    if bad := [weight for weight in weights if not is_number(weight)]:
        raise ConfigError(f"weights: {bad[0]!r} is not a finite number.")
    return [float(weight) for weight in weights]


def _column_name(function: Any) -> str:
    inner = innermost(function)
    name = getattr(inner, "__name__", None)
    if name is None or isinstance(inner, functools.partial):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(inner).__name__).lower()
    return "function" if name == "<lambda>" else name
