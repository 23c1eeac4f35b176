"""Functions as tools: their JSON schemas, from type hints and docstrings (transformers' `get_json_schema`)."""

from __future__ import annotations

from collections.abc import Callable
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
