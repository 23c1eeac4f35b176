"""Retokenizer: converts rows of the actor's token ids for a reward model with another tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from hybridflow.algorithms.masked import row_column, token_column
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.data.tokenizer import Tokenizer, check_messages, has_tokenizer, load_tokenizer, plain_messages
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.errors import CheckpointError, ConfigError, PromptError, RewardError, nearest
from hybridflow.models.images import GRIDS
from hybridflow.settings import require

Template = Literal["auto", "plain", "chat"]
TEXT_READS = ("prompt|prompt_ids", "response|response_ids", "response_ids?", "finished?", "row_id?", f"{GRIDS}?")
"""Columns of rows that are re-tokenised."""


def check_reward_model(worker: str, role: str, settings: Mapping[str, Any]) -> None:
    """Check a reward model's checkpoint on the driver.

    Errors: CheckpointError without a head, ConfigError for an unusable template or tokenizer.
    """
    model, template = settings["model"], settings["template"]
    checkpoint = Checkpoint(model)
    if checkpoint.find("score.weight") is None:
        found = "a language model's lm_head.weight" if checkpoint.find("lm_head.weight") else "no head"
        raise CheckpointError(
            f"{role}: {model} has {found} and no score.weight: as a {role} model it would give 0 "
            f"for every row. Give a sequence-classification checkpoint (one label), or function=."
        )
    if template not in get_args(Template):
        raise ConfigError(f"{worker}(template={template!r}) is unknown.{nearest(str(template), get_args(Template))}")
    needed = "tokenizer=" if settings["tokenizer"] is not None else "template='chat'" if template == "chat" else None
    require(
        needed is None or has_tokenizer(model),
        f"{worker}({needed}): {model} has no tokenizer of its own, so rows cannot be put into its tokens. Add its "
        f"tokenizer files to the directory; or leave {needed} out, and ids go in as they are.",
    )
    require(
        template != "chat" or load_tokenizer(model).raw.chat_template is not None,
        f"{worker}(template='chat'): the tokenizer of {model} has no chat template. Use template='plain', or add one "
        f"(chat_template.jinja).",
    )
    require(
        settings["level"] != "token" or not retokenizes(settings),
        f"{worker}(level='token'): rows are re-tokenised for {model}, so its tokens are not those of the response. Use "
        f"level='sample', or a model with the actor's tokenizer and template='auto'.",
    )


def retokenizes(settings: Mapping[str, Any]) -> bool:
    """Whether token ids must pass through text: a chat template is requested, or the tokenizers differ.

    Tokenizers are equal if their vocabularies and their begin and end tokens are: rows without padding hold no others.
    """
    if settings["template"] == "chat":
        return True
    model, tokenizer = settings["model"], settings["tokenizer"]
    return tokenizer is not None and not _same_tokenizer(str(model), str(tokenizer))


@lru_cache(maxsize=16)
def _same_tokenizer(one: str, other: str) -> bool:
    if Path(one).resolve() == Path(other).resolve():
        return True
    found, expected = load_tokenizer(one).raw, load_tokenizer(other).raw
    ends = ("bos_token_id", "eos_token_id")
    same_ends = all(getattr(found, name) == getattr(expected, name) for name in ends)
    return same_ends and found.get_vocab() == expected.get_vocab()


class Retokenizer:
    """Decodes rows with the actor's tokenizer (default: the reward model's own) and re-encodes them.

    Prompts of chat messages, with `template="chat"` all prompts, go through the reward model's chat template with the
    response as the assistant's turn (or its continuation), which stays open where the response was cut. Other rows are
    prompt + response as one text, with the special tokens that the model's tokenizer adds, and its end token where the
    response was ended. `limit` is the reward model's maximum of tokens.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None,
        template: Template,
        limit: int,
    ) -> None:
        self.own = load_tokenizer(model)
        self.actors: Tokenizer = self.own if tokenizer is None else load_tokenizer(tokenizer)
        self.template, self.limit = template, limit

    def __call__(self, batch: Batch) -> Batch:
        """`prompt_ids` ragged [B, S] int64 with whole rows in the reward model's tokens, and empty `response_ids`.
        Errors: RewardError naming the row, for messages that cannot be rendered, no tokens, or too many; ConfigError
        for rows with images.
        """
        if GRIDS in batch and (seen := int((token_column(batch, GRIDS).lengths > 0).sum())):
            raise ConfigError(
                f"{seen} of {len(batch)} rows have images, of which a reward model with a tokenizer of its own would "
                f"read the text only. Use a function, or a reward model of the policy's family without tokenizer=."
            )
        rows = row_column(batch, "row_id").tolist() if "row_id" in batch else list(range(len(batch)))
        prompts, responses = self._texts(batch, "prompt"), self._texts(batch, "response")
        chat = [self.template == "chat" or not isinstance(prompt, str) for prompt in prompts]
        whole, texts = self._ended(batch), []
        for row, prompt, response, rendered, ended in zip(rows, prompts, responses, chat, whole, strict=True):
            text = self._chat(row, prompt, response) if rendered else prompt + response
            texts.append(text.removesuffix(self.own.turn_end) if rendered and ended is False else text)
        ids = self._encoded(texts, chat)
        end = self.own.end_id
        for tokens, rendered, ended in zip(ids, chat, whole, strict=True):
            # some tokenizers add it themselves
            if ended and not rendered and end is not None and self.own.end_ids.isdisjoint(tokens[-1:]):
                tokens.append(end)
        for row, tokens in zip(rows, ids, strict=True):
            self._check(row, len(tokens))
        nothing = Ragged.from_lengths(torch.empty(0, dtype=torch.int64), [0] * len(ids))
        return Batch({"prompt_ids": Ragged.from_rows(ids, torch.int64), "response_ids": nothing})

    def _texts(self, batch: Batch, name: str) -> Sequence[Any]:
        return batch[name] if name in batch else self.actors.decode(token_column(batch, f"{name}_ids").tolist())

    def _ended(self, batch: Batch) -> Sequence[bool | None]:
        """[B]: whether the model ended each response: the column `finished`, or its end token; None: not known."""
        if "finished" in batch:
            return row_column(batch, "finished").tolist()
        ends = self.actors.end_ids
        if "response_ids" not in batch or not ends:
            return [None] * len(batch)
        return [bool(len(row)) and int(row[-1]) in ends for row in token_column(batch, "response_ids").rows()]

    def _encoded(self, texts: Sequence[str], chat: Sequence[bool]) -> list[list[int]]:
        """Token ids of all texts; chat templates have already added their special tokens."""
        out: list[list[int]] = [[]] * len(texts)
        for rendered in (False, True):
            if at := [i for i, kind in enumerate(chat) if kind is rendered]:
                for i, ids in zip(at, self.own.ids([texts[i] for i in at], special=not rendered), strict=True):
                    out[i] = ids
        return out

    def _chat(self, row: int, prompt: Any, response: str) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.template == "plain" or self.own.raw.chat_template is None:
            why = "template='plain' takes texts" if self.template == "plain" else "its tokenizer has no chat template"
            raise RewardError(
                f"row {row}: the prompt is chat messages and the reward model cannot read them: {why}. Leave the "
                f"column 'prompt' out to have prompt_ids decoded, or use a model and template that can."
            )
        if not isinstance(messages, list):
            raise RewardError(f"row {row}: the prompt is {type(messages).__name__}, neither text nor chat messages.")
        try:
            check_messages(f"row {row}", "prompt", messages)
        except PromptError as error:
            raise RewardError(str(error)) from None
        turns = plain_messages(messages)
        if turns[-1]["role"] == "assistant":  # the response continues what the prompt began
            turns[-1]["content"] += response
        else:
            turns.append({"role": "assistant", "content": response})
        try:
            return self.own.render(turns)
        except Exception as error:  # templates are third-party programs: any error is reported with its row
            raise RewardError(f"row {row}: the reward model's chat template refuses the messages: {error}.") from error

    def _check(self, row: int, length: int) -> None:
        if not length:
            raise RewardError(f"row {row} is empty text: the reward model has nothing to score.")
        if length > self.limit:
            raise RewardError(
                f"row {row} has {length} tokens in the reward model's tokenizer, its context is {self.limit}. Make "
                f"prompts or responses shorter, or take a reward model with a longer context."
            )
