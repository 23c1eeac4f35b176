"""Tools: their JSON schemas (by transformers' `get_json_schema`), and CallFormat: how a chat template writes calls of
them, read off the template itself, and how to read them back.

A template is asked to write one call whose name, arguments and values are known. Three forms cover the models of the
field: JSON with the name and the arguments (Hermes and Qwen, Llama 3, Mistral), a name before the JSON of its arguments
(DeepSeek), and marks around names and values (Qwen-Coder, GLM).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybridflow.errors import ConfigError

_NAME, _KEYS, _VALUES = "qzname", ("qzfirst", "qzsecond"), ("qzone", "qztwo")
PROBE = {"name": _NAME, "arguments": dict(zip(_KEYS, _VALUES, strict=True))}
"""The call that a template is asked to write."""
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it. `error`: why it cannot be made; `name` and `arguments` may then be missing."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class CallFormat:
    """Reads the calls in what a model wrote. Made by `call_format`."""

    begin: str  # what stands before a call; "" where a response is either a call or text
    read: Callable[[str, int], tuple[list[ToolCall], int]]  # calls that begin at a position, and where they end
    end: str

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """What the model said beside its calls, and the calls, in order. A call that is damaged has an `error`."""
        if not self.begin:
            return self._bare(text)
        said, found, at = [], [], 0
        while (start := text.find(self.begin, at)) >= 0:
            said.append(text[at:start])
            calls, at = self._next(text, start + len(self.begin))
            found += calls
        return "".join([*said, text[at:]]).strip(), found

    def _next(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        try:
            calls, at = self.read(text, at)
        except ValueError as error:
            over = text.find(self.end, at) if self.end else -1
            at = len(text) if over < 0 else over + len(self.end)
            return [ToolCall("", error=f"the call cannot be read: {error}")], at
        start = _skip(text, at)
        return calls, start + len(self.end) if self.end and text.startswith(self.end, start) else at

    def _bare(self, text: str) -> tuple[str, list[ToolCall]]:
        body = text.strip()
        try:
            calls, at = self.read(body, 0)
        except ValueError:
            return body, []
        while at < len(body):  # several calls, one after another
            try:
                more, at = self.read(body, _skip(body, at, " \n;,"))
            except ValueError:
                return body, []
            calls += more
        return "", calls


def call_format(written: str) -> CallFormat:
    """The format of `written`: what a template makes of the assistant's call PROBE, without what surrounds the turn.

    Errors: ConfigError for a template that does not write calls, or in none of the known forms.
    """
    if _NAME not in written:
        raise ConfigError(
            "the chat template of this model leaves out calls of tools: it was made for a model that makes none. Give "
            "a model whose template writes `tool_calls`, or an environment that reads plain text."
        )
    return _json(written) or _named_json(written) or _marked(written)


def _json(written: str) -> CallFormat | None:
    """JSON with name and arguments, alone or in a list."""
    for start, value, end in _objects(written):
        body = _body(value[0] if isinstance(value, list) and len(value) == 1 else value)
        given = body.items() if isinstance(body, dict) else ()
        name = [key for key, value in given if value == _NAME]
        arguments = [key for key, value in given if parsed(value) == PROBE["arguments"]]
        if name and arguments:
            read = partial(_read_json, keys=(name[0], arguments[0]))
            return CallFormat(written[:start].strip(), read, written[end:].strip())
    return None


def _body(call: Any) -> Any:
    """Of a call as JSON: what has its name and arguments."""
    inner = call.get("function") if isinstance(call, dict) else None
    return inner if isinstance(inner, dict) else call


def _read_json(text: str, at: int, keys: tuple[str, str]) -> tuple[list[ToolCall], int]:
    value, end = _DECODER.raw_decode(text, _skip(text, at))
    found = []
    for body in map(_body, value if isinstance(value, list) else [value]):
        if not isinstance(body, dict) or not isinstance(body.get(keys[0]), str):
            raise ValueError(f"it needs {keys[0]!r} and {keys[1]!r}")
        arguments = parsed(body.get(keys[1], {}))
        if not isinstance(arguments, dict):
            raise ValueError(f"{keys[1]!r} must be an object")
        found.append(ToolCall(body[keys[0]], arguments))
    return found, end


def _named_json(written: str) -> CallFormat | None:
    """A name, a mark, and the JSON of the arguments."""
    at = written.index(_NAME)
    for start, value, end in _objects(written, at):
        if value == PROBE["arguments"]:
            begin, between = written[:at].strip(), written[at + len(_NAME) : start].strip()
            if not begin or not between:
                return None

            def read(text: str, at: int, between: str = between) -> tuple[list[ToolCall], int]:
                name, mark, _ = text[at:].partition(between)
                if not mark:
                    raise ValueError(f"{between!r} is missing after the name")
                value, end = _DECODER.raw_decode(text, _skip(text, at + len(name) + len(mark)))
                if not isinstance(value, dict):
                    raise ValueError("the arguments must be an object")
                return [ToolCall(name.strip(), value)], end

            return CallFormat(begin, read, written[end:].strip())
    return None


def _marked(written: str) -> CallFormat:
    """Marks around the name and around each argument and value."""
    spots = [written.find(part) for part in (_NAME, _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])]
    if -1 in spots or spots != sorted(spots):
        raise ConfigError(
            f"the chat template writes calls of tools in a form that is not known: {written!r}. Give an environment "
            f"that reads plain text, or change the template to one of the known forms (docs/environments.md)."
        )
    name, key, value, key2, value2 = spots
    begin = written[:name].strip()
    head = written[name + len(_NAME) : key]  # the end of the name, then the mark before a key
    middle = written[key + len(_KEYS[0]) : value].strip()
    between = written[value + len(_VALUES[0]) : key2]  # the end of a value, then the mark before a key
    tail = written[value2 + len(_VALUES[1]) :]
    size = next(n for n in range(min(len(head), len(between)), -1, -1) if head.endswith(between[len(between) - n :]))
    before = between[len(between) - size :].strip()
    after = between[: len(between) - size].strip()
    named = head[: len(head) - size].strip()
    end = tail.strip().removeprefix(after).strip()
    if not begin or not before or not middle or not after:
        raise ConfigError(f"the chat template writes calls of tools without marks around them: {written!r}.")
    pair = re.compile(rf"\s*{re.escape(before)}(.*?){re.escape(middle)}(.*?)\s*{re.escape(after)}", re.DOTALL)
    stop = re.compile("|".join(re.escape(mark) for mark in (named, before, end) if mark))

    def read(text: str, at: int) -> tuple[list[ToolCall], int]:
        found = stop.search(text, at)
        if found is None:
            raise ValueError(f"{(named or end)!r} is missing after the name")
        called = text[at : found.start()].strip()
        at = found.end() if named and found.group() == named else found.start()
        arguments: dict[str, Any] = {}
        while (one := pair.match(text, at)) is not None:
            arguments[one[1].strip()], at = parsed(one[2].strip("\n")), one.end()
        return [ToolCall(called, arguments)], at

    return CallFormat(begin, read, end)


def parsed(value: Any) -> Any:
    """What a text that is JSON says: a number, a list; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _objects(text: str, at: int = 0) -> Iterator[tuple[int, Any, int]]:
    """Where JSON objects or lists begin, outermost first, what they are, and where they end."""
    for match in re.compile(r"[\[{]").finditer(text, at):
        with suppress(ValueError):
            yield match.start(), *_DECODER.raw_decode(text, match.start())


def _skip(text: str, at: int, blanks: str | None = None) -> int:
    return len(text) - len(text[at:].lstrip(blanks))


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
    parameters = {"type": "object", "properties": own, **({"required": list(required)} if required else {})}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
