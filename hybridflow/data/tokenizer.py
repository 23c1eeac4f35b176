"""Tokenizer of a checkpoint directory: texts to token ids and back."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hybridflow.data.messages import check_messages, plain_messages
from hybridflow.errors import CheckpointError, ConfigError, PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenizerLike: TypeAlias = "str | os.PathLike[str] | Tokenizer | PreTrainedTokenizerBase"
"""What `as_tokenizer` takes."""
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def has_tokenizer(directory: str | os.PathLike[str]) -> bool:
    return any((Path(directory) / name).is_file() for name in _FILES)


class Tokenizer:
    """A Hugging Face tokenizer for lists of texts. `raw` is the tokenizer itself."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def encode(self, prompts: Sequence[Any], places: Sequence[str] | None = None) -> list[list[int]]:
        """Token ids of texts (with the tokenizer's own special tokens) or of chat messages (by its chat template).

        The template opens the turn that is to be generated; messages that end with one of the assistant are left
        open behind it, to be continued. `places` name the prompts in errors. Errors: PromptError for anything else,
        for messages without a chat template, and for messages that the template refuses or nothing can follow.
        """
        out: list[list[int]] = []
        names = places or [f"prompt {row}" for row in range(len(prompts))]
        texts = [self._text(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
        if texts:
            special = [isinstance(prompt, str) for prompt in prompts]
            if all(special) or not any(special):
                return self.raw(texts, add_special_tokens=special[0])["input_ids"]
            out = [
                self.raw(text, add_special_tokens=own)["input_ids"] for text, own in zip(texts, special, strict=True)
            ]
        return out

    def _text(self, place: str, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list):
            raise PromptError(f"{place} is {type(prompt).__name__}: give text or a list of chat messages.")
        if self.raw.chat_template is None:
            raise PromptError(f"{place} is a list of messages and the tokenizer has no chat template.")
        check_messages(place, "prompt", prompt)
        begun = prompt[-1]["role"] == "assistant"
        if begun and prompt[-1].get("tool_calls"):
            raise PromptError(f"{place} ends with a call of a tool, which only the tool can answer. Add its message.")
        try:
            return self.raw.apply_chat_template(
                plain_messages(prompt), tokenize=False, add_generation_prompt=not begun, continue_final_message=begun
            )
        except Exception as error:  # the template is a program of the checkpoint, which may raise what it likes
            raise PromptError(f"{place}: the tokenizer's chat template refuses the messages: {error}.") from error

    def continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that follow a prompt: no special tokens are added."""
        return self.raw(list(texts), add_special_tokens=False)["input_ids"] if len(texts) else []

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Texts without special tokens."""
        return self.raw.batch_decode(rows, skip_special_tokens=True) if len(rows) else []


def as_tokenizer(given: TokenizerLike) -> Tokenizer:
    """The tokenizer that is meant: of a directory or hub name, a tokenizer of transformers, or a `Tokenizer` as it is.

    Errors: ConfigError for anything else, CheckpointError as `load_tokenizer`.
    """
    if isinstance(given, Tokenizer):
        return given
    if isinstance(given, str | os.PathLike):
        return load_tokenizer(given)
    library = sys.modules.get("transformers")  # whoever has one of its tokenizers has imported it
    if library is not None and isinstance(given, library.PreTrainedTokenizerBase):
        return Tokenizer(given)
    raise ConfigError(
        f"tokenizer= is a {type(given).__name__}: give a checkpoint directory, a name on the Hugging Face Hub, or a "
        f"tokenizer of transformers."
    )


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a directory or of a name on the Hugging Face Hub.

    Errors: CheckpointError when the directory has no tokenizer, and for a name that the hub does not give here.
    """
    name, path = os.fspath(directory), Path(directory)
    named = not path.exists() and not path.is_absolute() and not name.startswith(".") and name.count("/") == 1
    if not named and not has_tokenizer(directory):
        raise CheckpointError(f"{directory} has no tokenizer: none of {', '.join(_FILES)} is there.")
    from transformers import AutoTokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError) as error:
        if not named:
            raise CheckpointError(f"the tokenizer of {directory} cannot be read: {error}.") from error
        raise CheckpointError(
            f"{name} is neither a directory nor a model whose tokenizer the hub gives here: {type(error).__name__}."
        ) from error
