"""Functions as tools: their JSON schemas, from type hints and docstrings (transformers' `get_json_schema`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hybridflow.errors import ConfigError


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function with type hints and a docstring in Google's style, which describes each argument.

    Errors: ConfigError for a function without them.
    """
    from transformers.utils import get_json_schema

    name = getattr(tool, "__name__", None)
    if not callable(tool) or name is None:
        raise ConfigError(f"tools= has {tool!r}, which is no function. Give functions with type hints and a docstring.")
    try:
        return get_json_schema(tool)
    except Exception as error:  # transformers raises several kinds for what it cannot read
        raise ConfigError(
            f"the tool {name} cannot be described to the model: {error} A tool needs a type hint for each argument, "
            f"and a docstring that says what it does and has a line under Args: for each."
        ) from error


def check_tools(tools: Sequence[Callable[..., Any]]) -> None:
    """Errors: ConfigError for no tools, two of one name, and as `schema_of`."""
    if not isinstance(tools, list | tuple) or not tools:
        raise ConfigError(f"tools={tools!r}: give a list of functions.")
    names = Counter(schema_of(tool)["function"]["name"] for tool in tools)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"two tools are called {twice[0]}: the model could not tell them apart. Rename one.")
