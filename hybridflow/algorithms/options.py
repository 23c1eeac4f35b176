"""Options of a function that is chosen by name: those that its signature has. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from hybridflow.errors import ConfigError, nearest


def check_options(what: str, function: Callable[..., object], options: Iterable[str], after: int) -> None:
    """Errors: ConfigError for an option that is no parameter of `function` after its first `after` ones.

    `what` names the function in the message, which names the nearest option. With `**options` it takes any.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters[after:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for name in options:
        if name not in known:
            hint = nearest(name, known) if known else " It takes none."
            raise ConfigError(f"{what} has no option {name!r}.{hint}")
