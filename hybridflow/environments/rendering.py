"""ChatRenderer: a conversation as token ids, by the model's own chat template, and the next turn as an extension of the
ids that exist.

Sampled tokens are never rendered again. The conversation is rendered with the new messages, and what stands after the
last turn there follows the sampled tokens. Where the text before does not say what the ids say (a template that removes
the thinking of past turns), the conversation cannot be extended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from hybridflow.data.tokenizer import Tokenizer
from hybridflow.environments.tool_calls import PROBE, CallFormat, ToolCall, call_format
from hybridflow.errors import ConfigError, PromptError

Message = Mapping[str, Any]
_SAID = "qzsaid"
_CALL_ID = "qzcall001"  # Mistral's template wants nine characters


class ContextFullError(PromptError):
    """The conversation leaves no room for a response within the context of the model."""


class ChatRenderer:
    """Renders conversations for a model whose turns end with one of `stop_ids`.

    `tools` are JSON schemas, as of `transformers.utils.get_json_schema`; `options` go to the chat template (such as
    `enable_thinking=False`).
    Errors: ConfigError without a chat template, for one that refuses these messages, and with `tools` for one that has
    no place for them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer.raw.chat_template is None:
            raise ConfigError(
                "the tokenizer has no chat template, which says how turns of a conversation are written. Add "
                "chat_template to its tokenizer_config.json, or use a model that was made for conversations."
            )
        self.tokenizer, self.tools, self._options = tokenizer, list(tools), dict(options or {})
        self._stops: dict[str, int] = {tokenizer.raw.convert_ids_to_tokens(number): number for number in stop_ids}
        if tools:
            name = tools[0]["function"]["name"]
            if name not in self._text([{"role": "user", "content": _SAID}]):
                raise ConfigError(
                    "the chat template of this model has no place for tools: it does not mention them. Use a model "
                    "that was made for tools, or an environment, which talks in plain messages."
                )
            _ = self.calls

    @cached_property
    def calls(self) -> CallFormat:
        """How the model writes calls of tools."""
        asked: Message = {"role": "user", "content": _SAID}
        call = {"id": _CALL_ID, "type": "function", "function": PROBE}
        said = self._text([asked, {"role": "assistant", "content": _SAID}])
        called = self._text([asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
        differing = (at for at, pair in enumerate(zip(said, called, strict=False)) if pair[0] != pair[1])
        return call_format(self._turn(called[next(differing, len(said)) :])[0])

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that the model is to answer."""
        return self._ids(self._text(messages, True))

    def extension(
        self, messages: Sequence[Message], new: Sequence[Message], sampled: Sequence[int]
    ) -> list[int] | None:
        """Token ids that follow `sampled`, the last turn of `messages`, for `new` messages and the model's next turn.

        None where the template writes the past in another way once `new` follow.
        """
        prompt, whole = self._text(messages[:-1], True), self._text([*messages, *new], True)
        if not whole.startswith(prompt):
            return None
        said, stop, rest = self._turn(whole[len(prompt) :])
        if not stop or _squeezed(messages[-1].get("content")) not in _squeezed(said):
            return None
        closed = list(sampled[-1:]) == [self._stops[stop]]
        return self._ids(rest if closed else stop + rest)

    def answer(self, sampled: Sequence[int]) -> tuple[dict[str, Any], list[ToolCall]]:
        """The assistant's message that a turn's token ids are, and its calls of tools (those that can be made and not).

        The message has `tool_calls` for those that can be made.
        """
        ids = list(sampled)
        if ids and ids[-1] in self._stops.values():
            ids = ids[:-1]
        text = self.tokenizer.raw.decode(ids, skip_special_tokens=False)
        said, calls = self.calls.parse(text) if self.tools else (text, [])
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if made := [call for call in calls if not call.error]:
            message["tool_calls"] = [
                {
                    "id": f"call{number:05d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(made)
            ]
        elif calls:
            message["content"] = text  # what the model wrote instead of a call stays visible to it
        return message, calls

    def _turn(self, text: str) -> tuple[str, str, str]:
        """The turn of the assistant at the beginning of `text`: what it says, the stop token's text, what follows."""
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return text, "", ""
        at, stop = min(found)
        return text[:at], stop, text[at + len(stop) :]

    def _text(self, messages: Sequence[Message], answered: bool = False) -> str:
        options = self._options | ({"tools": self.tools} if self.tools else {})
        try:
            return self.tokenizer.render(list(messages), add_generation_prompt=answered, **options)
        except Exception as error:  # the template is the checkpoint's program and may raise anything
            raise PromptError(
                f"the chat template of this model refuses the messages "
                f"{' '.join(str(message.get('role')) for message in messages)}: {error}."
            ) from error

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.continuations([text])[0]


def _squeezed(text: str | None) -> str:
    """Without blanks, which templates strip."""
    return "".join((text or "").split())
