"""Tokenizer of a checkpoint directory: texts to token ids and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.errors import CheckpointError, PromptError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def has_tokenizer(directory: str | os.PathLike[str]) -> bool:
    return any((Path(directory) / name).is_file() for name in _FILES)


class Tokenizer:
    """A Hugging Face tokenizer for lists of texts. `raw` is the tokenizer itself."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of texts (with the tokenizer's own special tokens) or of chat messages (by its chat template).

        Errors: PromptError for anything else, and for messages without a chat template.
        """
        out: list[list[int]] = []
        for row, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                continue
            if not isinstance(prompt, list):
                raise PromptError(f"prompt {row} is {type(prompt).__name__}: give text or a list of chat messages.")
            if self.raw.chat_template is None:
                raise PromptError(f"prompt {row} is a list of messages and the tokenizer has no chat template.")
        texts = [prompt if isinstance(prompt, str) else self._template(prompt) for prompt in prompts]
        if texts:
            special = [isinstance(prompt, str) for prompt in prompts]
            if all(special) or not any(special):
                return self.raw(texts, add_special_tokens=special[0])["input_ids"]
            out = [
                self.raw(text, add_special_tokens=own)["input_ids"] for text, own in zip(texts, special, strict=True)
            ]
        return out

    def _template(self, messages: list[dict[str, str]]) -> str:
        return self.raw.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Texts without special tokens."""
        return self.raw.batch_decode(rows, skip_special_tokens=True) if len(rows) else []


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Errors: CheckpointError when the directory has no tokenizer."""
    if not has_tokenizer(directory):
        raise CheckpointError(f"{directory} has no tokenizer: none of {', '.join(_FILES)} is there.")
    from transformers import AutoTokenizer

    return Tokenizer(AutoTokenizer.from_pretrained(str(directory)))
