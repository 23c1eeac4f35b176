"""Chat messages: checks of prompts, and their form for chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import PromptError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAY_SAY_NOTHING = ("assistant", "tool")  # tool calls, and some tool answers, have no text


def check_prompt(place: str, column: str, prompt: Any) -> None:
    """Refuse a prompt other than text or chat messages. Errors: PromptError naming place, column and message."""
    if isinstance(prompt, list):
        check_messages(place, column, prompt)
    elif not isinstance(prompt, str) or not prompt:
        shown = "empty" if prompt == "" else "null" if prompt is None else f"a {type(prompt).__name__}"
        raise PromptError(f"{place}: column {column!r} is {shown}; it must be text or a list of chat messages.")
    else:
        check_text(f"{place}: column {column!r}", prompt)


def check_text(where: str, text: str) -> None:
    """Refuse text that no tokenizer takes. Errors: PromptError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where} has half of a surrogate pair at character {error.start}, which is no text."
        ) from None


def check_messages(place: str, column: str, messages: list[Any]) -> None:
    """Refuse messages without a known `role` and a `content` of text or parts of text."""
    if not messages:
        raise PromptError(f"{place}: column {column!r} is an empty list; it must be text or a list of messages.")
    for number, message in enumerate(messages):
        where = f"{place}: column {column!r}, message {number}"
        if not isinstance(message, Mapping):
            raise PromptError(f"{where} is a {type(message).__name__}; it needs 'role' and 'content'.")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise PromptError(f"{where} has no 'role'; it needs 'role' and 'content'.")
        if role not in ROLES:
            raise PromptError(f"{where} has the unknown role {role!r}.{nearest(role, ROLES)}")
        if content is None and not message.get("tool_calls"):
            raise PromptError(f"{where} ({role}) has no content; it needs 'role' and 'content'.")
        _check_content(f"{where} ({role})", content)
        if not text_of(content) and role not in _MAY_SAY_NOTHING:
            raise PromptError(f"{where} ({role}) has empty content.")


def _check_content(where: str, content: Any) -> None:
    if isinstance(content, str):
        check_text(where, content)
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise PromptError(f"{where} has content that is a {type(content).__name__}; it must be text.")
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PromptError(f"{where} has content with a part of type {kind!r}; only text is read.")
        check_text(where, part["text"])


def text_of(content: str | list[Any] | None) -> str:
    """The text of a message's content, its parts joined."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def characters(prompt: str | list[Any]) -> int:
    """Number of characters of a text, or of the contents of messages."""
    return len(prompt) if isinstance(prompt, str) else sum(len(text_of(message.get("content"))) for message in prompt)


def plain_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages for templates of text models: content in one piece, no fields without a value.

    In tables every message has the fields of all messages; a template would read a null as a value.
    """
    return [
        {key: value for key, value in message.items() if value is not None}
        | {"content": text_of(message.get("content"))}
        for message in messages
    ]
