"""Settings of constructors and calls by name, with their defaults. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.errors import ConfigError, nearest
from hybridflow.settings import require


def bound_settings(
    signature: inspect.Signature, where: str, args: Sequence[Any], kwargs: Mapping[str, Any], defaults: bool = True
) -> dict[str, Any]:
    """The arguments of a method by name, including `**options`. Errors: ConfigError with the nearest name."""
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


def constructor_settings(worker_class: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a worker with their defaults: its own, and what a base class has for those that the constructor
    may pass on in `**settings`. Errors: ConfigError with the nearest name."""
    if worker_class.__init__ is object.__init__:
        require(not settings, f"{worker_class.__name__} takes no settings, got {sorted(settings)}.")
        return {}
    signature = inspect.signature(worker_class.__init__)
    return _inherited(worker_class) | bound_settings(signature, worker_class.__name__, (), settings)


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
            parameters = list(inspect.signature(each.__init__).parameters.values())[1:]
            if names:  # not the class's own
                found |= {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in names}
            names |= {p.name for p in parameters}
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                break
    return found
