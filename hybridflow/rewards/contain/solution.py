"""The program's side of a judgement: loads the program, and lets the tests call it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from hybridflow.rewards.contain.peer import Peer

NAME = "solution"  # of the module; not __main__, so its main part does not run


def serve(
    source: str,
    reading: int,
    writing: int,
    *,
    load: Callable[[str, str], types.ModuleType],
    told: Callable[[BaseException], bool],
) -> None:
    """Load the program and answer the tests until they are through."""
    module, failure = None, None
    try:
        module = load(source, NAME)
    except Exception as error:  # the program's, told to the tests when they ask for its names
        failure = error
        told(error)

    def names(wanted: list[str]) -> dict[str, Any]:
        if module is None:
            raise failure or RuntimeError("the program was not loaded")
        return {name: vars(module)[name] for name in wanted if name in vars(module)}

    def last_function() -> str:
        """Name of the function that the program defines last, "" if it defines none."""
        own = vars(module).items() if module is not None else ()
        found = [name for name, value in own if isinstance(value, types.FunctionType) and value.__module__ == NAME]
        return found[-1] if found else ""

    Peer(reading, writing, told=told, operations={"names": names, "last_function": last_function}).serve()
