"""LM and SFT datasets: rows of text for a language-model loss, in batches without end."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.data.records import open_records
from hybridflow.data.resumable_sampler import Dataset, Draw, ResumableSampler, check_sizes
from hybridflow.data.tokenizer import (
    MOST_CHARACTERS,
    Tokenizer,
    TokenizerLike,
    as_tokenizer,
    check_prompt,
    prompt_tokenizer,
)
from hybridflow.errors import ConfigError, PromptError
from hybridflow.settings import by_name

logger = logging.getLogger(__name__)

Row = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""
_NEAR = 1024  # characters


class TextSource(ResumableSampler):
    """The batches of a `TextLoader`, with its arguments, on this process alone: it yields `Batch`es without end."""

    @by_name
    def __init__(
        self,
        texts: Any,
        *,
        tokenizer: TokenizerLike,
        batch_size: int,
        max_tokens: int,
        text: str | None = None,
        prompt: str | None = None,
        completion: str | tuple[str, str] | None = None,
        scored: bool = False,
        split: str | None = None,
        name: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        steps: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 0,
    ) -> None:
        check_sizes(batch_size=batch_size)
        check_sizes(2, max_tokens=max_tokens)  # at least one token is predicted
        if (prompt is None) != (completion is None) or (prompt is not None and text is not None):
            raise ConfigError(
                f"text={text!r}, prompt={prompt!r}, completion={completion!r}: name one column with text=, or two with "
                f"prompt= and completion=."
            )
        loaded = prompt_tokenizer(tokenizer, chat_template_kwargs) or as_tokenizer(tokenizer)
        records = open_records(texts, split=split, name=name, what="texts")
        pair = completion if isinstance(completion, tuple | list) else None
        if (pair is not None and len(pair) != 2) or type(scored) is not bool or (scored and pair is None):
            raise ConfigError(
                f"completion={completion!r}, scored={scored!r}: pairs have two columns, the preferred one first: "
                f"completion=('chosen', 'rejected'); scored=True is of pairs."
            )
        self._rows: LMDataset | SFTDataset | PairDataset
        if prompt is None or completion is None:
            self._rows = LMDataset(records, text or "text", loaded, max_tokens)
        elif isinstance(completion, str):
            self._rows = SFTDataset(records, prompt, completion, loaded, max_tokens)
        else:
            self._rows = PairDataset(records, prompt, completion, loaded, max_tokens, scored)
        identity = {"texts": len(self._rows), "fingerprint": self._rows.fingerprint, "max_tokens": max_tokens}
        identity |= {"scored": True} if scored else {}
        identity |= {"chat_template_kwargs": dict(chat_template_kwargs)} if chat_template_kwargs else {}
        super().__init__(self._rows, identity, batch_size, steps, seed, shuffle, workers)

    def whole(self) -> Batch:
        """All texts, each once and in their order: of a text longer than `max_tokens` its first piece."""
        return self._rows.whole()


class _TextDataset(Dataset):
    """The columns of rows of token ids, prompt and response."""

    filtered = 0

    def batch(self, numbers: range, rows: list[Row]) -> Batch:
        responses = Ragged.from_rows([response for _, response in rows], torch.int64)
        return Batch(
            {
                "row_id": torch.arange(numbers.start, numbers.stop),
                "prompt_ids": Ragged.from_rows([prompt for prompt, _ in rows], torch.int64),
                "response_ids": responses,
                "response_mask": responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool)),
                "num_tokens": torch.tensor([len(prompt) + len(response) for prompt, response in rows]),
            }
        )


def section_of(max_tokens: int) -> int:
    """Characters of a text that are tokenised at a time: most rows of `max_tokens` are full."""
    return min(max(1 << 16, 8 * max_tokens), MOST_CHARACTERS)


class LMDataset(_TextDataset):
    """Whole texts: the first token of a piece is its prompt, the rest its response."""

    def __init__(self, records: Any, column: str, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._records, self._column, self._tokenizer, self._max = records, column, tokenizer, max_tokens
        self._section = section_of(max_tokens)
        (self.fingerprint,) = _fingerprints(records, {column: partial(check_prompt, chat=False)}, [(column,)])

    def __len__(self) -> int:
        return len(self._records)

    def read(self, draws: list[Draw]) -> list[Row]:
        """Each epoch takes another piece of a long text, or a piece of another section of a very long one, so the
        tokenised length is bounded."""
        texts = [self._records[draw.index][self._column] for draw in draws]
        counts = [-(-len(text) // self._section) for text in texts]
        at = [draw.epoch % count for draw, count in zip(draws, counts, strict=True)]
        texts = [_cut(text, i, count) for text, i, count in zip(texts, at, counts, strict=True)]
        whole = [i for i, count in enumerate(counts) if count == 1]
        rows = self._tokenizer.continuations([text for text, count in zip(texts, counts, strict=True) if count > 1])
        for i, ids in zip(whole, self._tokenizer.encode([texts[i] for i in whole]), strict=True):
            rows.insert(i, ids)
        return [
            self._piece(draw, self._ended(ids, i == 0, i == count - 1), draw.epoch // count)
            for draw, ids, i, count in zip(draws, rows, at, counts, strict=True)
        ]

    def _ended(self, ids: list[int], first: bool, last: bool) -> list[int]:
        """Adds the tokenizer's begin and end tokens, if any, to a text's first and last section."""
        tokenizer = self._tokenizer
        begin, end = ([] if one is None else [one] for one in (tokenizer.raw.bos_token_id, tokenizer.end_id))
        ids = begin + ids if first and ids[:1] != begin else ids
        return ids + end if last and tokenizer.end_ids.isdisjoint(ids[-1:]) else ids

    def _piece(self, draw: Draw, ids: list[int], epoch: int) -> Row:
        """Adjacent pieces share one token, so every token is predicted."""
        if len(ids) < 2:
            place = self._records.place(draw.index)
            raise PromptError(f"{place}: column {self._column!r} has {len(ids)} tokens; none is left to predict.")
        step = self._max - 1
        pieces = -(-(len(ids) - 1) // step)
        start = epoch % pieces * step
        return ids[start : start + 1], ids[start + 1 : start + self._max]


def _cut(text: str, number: int, count: int) -> str:
    """Section `number` of `count` equal ones; each begins with a space where there is one near."""

    def bound(number: int) -> int:
        at = len(text) * number // count
        return at if number in (0, count) else max(at, text.find(" ", at, at + _NEAR))

    return text[bound(number) : bound(number + 1)]


class SFTDataset(_TextDataset):
    """Prompts with completions: the response is the completion's tokens and the end token; after chat messages, the
    tokens that end a turn in the chat template. `others` are further columns of completions, for `rows`."""

    def __init__(
        self, records: Any, prompt: str, completion: str, tokenizer: Tokenizer, max_tokens: int, *others: str
    ) -> None:
        self._records, self._prompt, self._completion = records, prompt, completion
        self._tokenizer, self._max = tokenizer, max_tokens
        every = (completion, *others)

        def check(place: str, column: str, completion: Any) -> None:
            check_prompt(place, column, _completion_text(completion), chat=False)

        checks = {prompt: check_prompt, **dict.fromkeys(every, check)}
        self.fingerprints = _fingerprints(records, checks, [(prompt, one) for one in every])
        self.fingerprint = self.fingerprints[0]
        self._kept = self._fitting()
        self.filtered = len(records) - len(self._kept)

    def _fitting(self) -> torch.Tensor:
        kept, every = [], len(self._records)
        for chunk in self._records.scan((self._prompt,)):
            places = [self._records.place(row) for row, _ in chunk]
            lengths = self._tokenizer.lengths([record[self._prompt] for _, record in chunk], places, self._prompt)
            kept += [row for (row, _), length in zip(chunk, lengths, strict=True) if length < self._max]
        if not kept:
            raise PromptError(f"{self._records.where}: every prompt has max_tokens={self._max} tokens or more.")
        if len(kept) < every:
            logger.warning(
                "%s: %d of %d texts are left out, whose prompt has max_tokens=%d tokens or more.",
                *(self._records.where, every - len(kept), every, self._max),
            )
        return torch.tensor(kept)

    def __len__(self) -> int:
        return len(self._kept)

    def read(self, draws: list[Draw]) -> list[Row]:
        return self.rows(draws, self._completion)

    def rows(self, draws: list[Draw], completion: str) -> list[Row]:
        """The rows with the completions of this column."""
        at = [int(self._kept[draw.index]) for draw in draws]
        records = [self._records[row] for row in at]
        prompts = self._tokenizer.encode([record[self._prompt] for record in records])
        texts = [_completion_text(record[completion]) for record in records]
        begun = [text[: section_of(self._max)] for text in texts]  # later text would be cut off
        kinds = {chat: self._tokenizer.closing_ids(chat) for chat in (False, True)}
        ends = [kinds[isinstance(record[self._prompt], list)] for record in records]
        answers, rows = self._tokenizer.continuations(begun), []
        for row, ids, answer, text, end in zip(at, prompts, answers, texts, ends, strict=True):
            ended = len(text) > section_of(self._max) or not self._tokenizer.end_ids.isdisjoint(answer[-1:])
            ended = ended or (bool(end) and answer[-len(end) :] == end)
            response = [*answer, *([] if ended else end)][: self._max - len(ids)]
            if not response:
                place = self._records.place(row)
                raise PromptError(f"{place}: column {completion!r} has no token, so nothing to predict.")
            rows.append((ids, response))
        return rows


class PairDataset(_TextDataset):
    """Prompts with two completions, the preferred one first: two rows of one trajectory, which a loss gets joined.

    `scored`: each response has one more token, its last again, and the value before it is the score of the response.
    """

    def __init__(
        self,
        records: Any,
        prompt: str,
        completions: Sequence[str],
        tokenizer: Tokenizer,
        max_tokens: int,
        scored: bool,
    ) -> None:
        chosen, rejected = self._completions = completions
        self._first = first = SFTDataset(records, prompt, chosen, tokenizer, max_tokens - scored, rejected)
        self._scored, self.filtered = scored, first.filtered  # which follows from the prompts
        self.fingerprint = hashlib.blake2b("".join(first.fingerprints).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._first)

    def read(self, draws: list[Draw]) -> list[Row]:
        """The rows of both sides in turn."""
        sides = (self._first.rows(draws, completion) for completion in self._completions)
        rows = [row for pair in zip(*sides, strict=True) for row in pair]
        return [(ids, response + response[-1:]) for ids, response in rows] if self._scored else rows

    def batch(self, numbers: range, rows: list[Row]) -> Batch:
        """Of each pair two rows with its number as `trajectory_id`, and `preference` [B, R]: 1.0, or -1.0."""
        out = super().batch(range(2 * numbers.start, 2 * numbers.stop), rows)
        signs = [[1.0 - 2.0 * (i % 2)] * len(response) for i, (_, response) in enumerate(rows)]
        return out.with_columns(trajectory_id=out["row_id"] // 2, preference=Ragged.from_rows(signs, torch.float32))


def read_texts(texts: Sequence[Any], tokenizer: Tokenizer, max_tokens: int | None = None) -> Batch:
    """All of these texts, each once and in order, as the columns of a `TextLoader`; `loader.text_batch` has the forms.

    Errors: PromptError naming the row.
    """
    if isinstance(texts, str | Mapping) or not isinstance(texts, Sequence) or not texts:
        raise PromptError(f"texts= is {texts!r:.60}: give a list of texts, or of (prompt, completion) pairs.")
    if max_tokens is not None:
        check_sizes(2, max_tokens=max_tokens)
    records, longest = open_records([_as_record(row) for row in texts], what="texts"), max_tokens or MOST_CHARACTERS
    if all(isinstance(row, str) for row in texts):
        rows: LMDataset | SFTDataset = LMDataset(records, "text", tokenizer, longest)
    else:
        rows = SFTDataset(records, "prompt", "completion", tokenizer, longest)
    if rows.filtered:
        raise PromptError(f"the prompts of {rows.filtered} texts have max_tokens={max_tokens} tokens or more.")
    return rows.whole()


def _as_record(row: Any) -> Any:
    """A text, a pair of prompt and completion, or messages that an assistant ends, as a record of columns."""
    if isinstance(row, str):
        return {"text": row}
    if isinstance(row, Mapping) and "messages" in row:
        row = row["messages"]
    if isinstance(row, Sequence) and len(row) > 1 and all(isinstance(message, Mapping) for message in row):
        return {"prompt": list(row[:-1]), "completion": [row[-1]]}
    if isinstance(row, Sequence) and len(row) == 2:
        return {"prompt": row[0], "completion": row[1]}
    return row


def _completion_text(completion: Any) -> Any:
    """The text of a completion, which may be the one message of an assistant."""
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], Mapping):
        message = completion[0]
        return message.get("content") if message.get("role") == "assistant" else completion
    return completion


def _fingerprints(
    records: Any, checks: Mapping[str, Callable[[str, str, Any], None]], sides: Sequence[tuple[str, ...]]
) -> list[str]:
    """A hash of each side's columns of all records, all checked in one pass. Errors: PromptError naming place and
    column."""
    if records.columns is not None:
        _has(records.where, records.columns, checks)
    digests = [hashlib.blake2b(digest_size=16) for _ in sides]
    for chunk in records.scan(tuple(checks)):
        for row, record in chunk:
            place = records.place(row)
            if not isinstance(record, Mapping):
                raise PromptError(f"{place} is a {type(record).__name__}; every record must be an object.")
            _has(place, record, checks)
            for column, check in checks.items():
                check(place, column, record[column])
            for digest, columns in zip(digests, sides, strict=True):
                for column in columns:
                    digest.update(repr(record[column]).encode())
    return [digest.hexdigest() for digest in digests]


def _has(place: str, found: Any, columns: Iterable[str]) -> None:
    for column in columns:
        if column not in found:
            raise PromptError(f"{place} has no column {column!r}; it has {sorted(map(str, found))}.")
