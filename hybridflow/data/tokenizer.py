"""Tokenizer of a checkpoint directory: texts to token ids and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.data.messages import check_messages, plain_messages
from hybridflow.errors import CheckpointError, PromptError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def has_tokenizer(directory: str | os.PathLike[str]) -> bool:
    return any((Path(directory) / name).is_file() for name in _FILES)


class Tokenizer:
    """A Hugging Face tokenizer for lists of texts. `raw` is the tokenizer itself."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def encode(self, prompts: Sequence[Any], places: Sequence[str] | None = None) -> list[list[int]]:
        """Token ids of texts (with the tokenizer's own special tokens) or of chat messages (by its chat template).

        `places` name the prompts in errors. Errors: PromptError for anything else, for messages without a chat
        template, and for messages that the template refuses.
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
        try:
            return self.raw.apply_chat_template(plain_messages(prompt), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # the template is a program of the checkpoint, which may raise what it likes
            raise PromptError(f"{place}: the tokenizer's chat template refuses the messages: {error}.") from error

    def continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that follow a prompt: no special tokens are added."""
        return self.raw(list(texts), add_special_tokens=False)["input_ids"] if len(texts) else []

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Texts without special tokens."""
        return self.raw.batch_decode(rows, skip_special_tokens=True) if len(rows) else []


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
