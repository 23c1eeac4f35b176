"""Functions as tools: their JSON schemas, from type hints and docstrings (transformers' `get_json_schema`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridflow.errors import ConfigError

_NEEDED = (
    "A tool needs a type hint for each argument, and a docstring that says what it does and has a line under Args: "
    "for each."
)


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function with type hints and a docstring in Google's style, which describes each argument; its
    attribute `json_schema` where it has one.

    Errors: ConfigError for a function without them.
    """
    name = getattr(tool, "__name__", None)
    if not callable(tool) or name is None:
        raise ConfigError(f"tools= has {tool!r}, which is no function. Give functions with type hints and a docstring.")
    given = getattr(tool, "json_schema", None)
    if isinstance(given, dict):
        return given
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # transformers raises several kinds for what it cannot read
        raise ConfigError(f"the tool {name} cannot be described to the model: {error} {_NEEDED}") from error


def schema_from(name: str, doc: str, properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """The schema of a function that is elsewhere: `properties` are its arguments' types, `doc` describes them.

    Errors: ConfigError for an argument without a description.
    """
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    description, arguments, _ = parse_google_format_docstring(doc)
    lacking = [one for one in properties if one not in (arguments or {})]
    if not description or lacking:
        what = f"its docstring does not describe {', '.join(lacking)}." if lacking else "it has no docstring."
        raise ConfigError(f"the tool {name} cannot be described to the model: {what} {_NEEDED}")
    own = {one: {**kind, "description": (arguments or {})[one]} for one, kind in properties.items()}
    parameters: dict[str, Any] = {"type": "object", "properties": own}
    if required:
        parameters["required"] = list(required)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
