"""Settings of a worker's constructor by name, with their defaults. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hybridflow.settings import bound_settings, require


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
