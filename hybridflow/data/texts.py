"""Texts: rows for a pretraining loss, drawn in batches without end."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hybridflow.batch import Batch
from hybridflow.data.drawing import Drawing, State, check_sizes
from hybridflow.data.messages import check_prompt, check_text
from hybridflow.data.order import Draw
from hybridflow.data.sources import open_records
from hybridflow.data.tokenizer import Tokenizer, TokenizerLike, as_tokenizer
from hybridflow.errors import ConfigError, PromptError
from hybridflow.ragged import Ragged

logger = logging.getLogger(__name__)

Row = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""


class TextSource:
    """The batches of a `TextLoader`, with its arguments, on this process alone.

    Yields `Batch`es without end, with the columns that a `TextLoader` gives. `state()` and `load_state` are as those
    of a `PromptSource`. Errors: PromptError naming file, row and column, ConfigError, CheckpointError.
    """

    def __init__(
        self,
        texts: Any,
        *,
        tokenizer: TokenizerLike,
        batch_size: int,
        max_tokens: int,
        text: str | None = None,
        prompt: str | None = None,
        completion: str | None = None,
        split: str | None = None,
        name: str | None = None,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 0,
    ) -> None:
        check_sizes(batch_size=batch_size, max_tokens=max_tokens)
        check_sizes(0, workers=workers)
        if max_tokens < 2:
            raise ConfigError(f"max_tokens={max_tokens}: a row has at least two tokens, one of which is predicted.")
        if (prompt is None) != (completion is None) or (prompt is not None and text is not None):
            raise ConfigError(
                f"text={text!r}, prompt={prompt!r}, completion={completion!r}: name one column with text=, or two with "
                f"prompt= and completion=."
            )
        loaded = as_tokenizer(tokenizer)
        records = open_records(texts, split=split, name=name, what="texts")
        if prompt is None or completion is None:
            self._rows: Texts | Pairs = Texts(records, text or "text", loaded, max_tokens)
        else:
            self._rows = Pairs(records, prompt, completion, loaded, max_tokens)
        self._drawing = Drawing(
            self._rows,
            batch_size=batch_size,
            steps=None,
            seed=seed,
            shuffle=shuffle,
            workers=workers,
            of={"texts": len(self._rows), "fingerprint": self._rows.fingerprint, "max_tokens": max_tokens},
        )

    @property
    def filtered(self) -> int:
        """Records that are left out because their prompt leaves no room for a completion."""
        return self._rows.filtered

    def __iter__(self) -> Iterator[Batch]:
        """Goes on where the last iteration, or `load_state`, stopped."""
        for numbers, rows in self._drawing:
            responses = Ragged.from_rows([response for _, response in rows], torch.int64)
            yield Batch(
                {
                    "row_id": torch.arange(numbers.start, numbers.stop),
                    "prompt_ids": Ragged.from_rows([prompt for prompt, _ in rows], torch.int64),
                    "response_ids": responses,
                    "response_mask": responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool)),
                    "num_tokens": torch.tensor([len(prompt) + len(response) for prompt, response in rows]),
                }
            )

    def state(self) -> State:
        """Plain data to be saved with a checkpoint."""
        return self._drawing.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Errors: ConfigError when the state is of other texts, another batch size or seed."""
        self._drawing.load_state(state)


class Texts:
    """Whole texts: the first token of a piece is its prompt, what follows its response."""

    filtered = 0

    def __init__(self, records: Any, column: str, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._records, self._column, self._tokenizer, self._max = records, column, tokenizer, max_tokens
        self.fingerprint = _fingerprint(records, (column,), (self._check,))

    def _check(self, place: str, text: Any) -> None:
        _check_text(place, self._column, text)

    def __len__(self) -> int:
        return len(self._records)

    def read(self, draws: list[Draw]) -> list[Row]:
        return [self._piece(draw, ids) for draw, ids in zip(draws, self._token_ids(draws), strict=True)]

    def _token_ids(self, draws: list[Draw]) -> list[list[int]]:
        """Each text between the tokenizer's tokens for beginning and end, as far as it has them."""
        raw = self._tokenizer.raw
        rows = self._tokenizer.encode([self._records[draw.index][self._column] for draw in draws])
        begin, end = ([] if one is None else [one] for one in (raw.bos_token_id, raw.eos_token_id))
        rows = [ids if ids[:1] == begin else begin + ids for ids in rows]
        return [ids if ids[-1:] == end else ids + end for ids in rows]

    def _piece(self, draw: Draw, ids: list[int]) -> Row:
        """Each epoch takes another piece of a long text; pieces share one token, so that every token is predicted."""
        if len(ids) < 2:
            place = self._records.place(draw.index)
            raise PromptError(f"{place}: column {self._column!r} has {len(ids)} tokens; there is none to predict.")
        step = self._max - 1
        pieces = -(-(len(ids) - 1) // step)
        start = draw.epoch % pieces * step
        return ids[start : start + 1], ids[start + 1 : start + self._max]


class Pairs:
    """Prompts with the completion that is to be learned: only its tokens, and the end, are the response."""

    def __init__(self, records: Any, prompt: str, completion: str, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._records, self._prompt, self._completion = records, prompt, completion
        self._tokenizer, self._max = tokenizer, max_tokens
        columns, checks = (prompt, completion), (self._check_prompt, self._check_completion)
        self.fingerprint = _fingerprint(records, columns, checks)
        self._kept = self._fitting()
        self.filtered = len(records) - len(self._kept)

    def _check_prompt(self, place: str, prompt: Any) -> None:
        check_prompt(place, self._prompt, prompt)

    def _check_completion(self, place: str, completion: Any) -> None:
        _check_text(place, self._completion, _said(completion))

    def _fitting(self) -> torch.Tensor:
        kept, at = [], 0
        for chunk in self._records.scan((self._prompt,)):
            places = range(at, at + len(chunk))
            at += len(chunk)
            names = [self._records.place(place) for place in places]
            rows = self._tokenizer.encode([record[self._prompt] for record in chunk], names)
            for place, where, ids in zip(places, names, rows, strict=True):
                if not ids:
                    raise PromptError(f"{where}: column {self._prompt!r} has a prompt without any token.")
                if len(ids) < self._max:
                    kept.append(place)
        if not kept:
            raise PromptError(f"{self._records.where}: every prompt has max_tokens={self._max} tokens or more.")
        if len(kept) < at:
            logger.warning(
                "%s: %d of %d texts are left out, whose prompt has max_tokens=%d tokens or more.",
                *(self._records.where, at - len(kept), at, self._max),
            )
        return torch.tensor(kept)

    def __len__(self) -> int:
        return len(self._kept)

    def read(self, draws: list[Draw]) -> list[Row]:
        at = [int(self._kept[draw.index]) for draw in draws]
        records = [self._records[row] for row in at]
        prompts = self._tokenizer.encode([record[self._prompt] for record in records])
        texts = [_said(record[self._completion]) for record in records]
        end = self._tokenizer.raw.eos_token_id
        rows = []
        for row, ids, answer in zip(at, prompts, self._tokenizer.continuations(texts), strict=True):
            response = [*answer, *([] if end is None else [end])][: self._max - len(ids)]
            if not response:
                place = self._records.place(row)
                raise PromptError(f"{place}: column {self._completion!r} has no token; there is none to predict.")
            rows.append((ids, response))
        return rows


def _said(completion: Any) -> Any:
    """The text of a completion, which may be the one message of an assistant."""
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], Mapping):
        message = completion[0]
        return message.get("content") if message.get("role") == "assistant" else completion
    return completion


def _check_text(place: str, column: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        shown = "empty" if text == "" else "null" if text is None else f"a {type(text).__name__}"
        raise PromptError(f"{place}: column {column!r} is {shown}; it must be text.")
    check_text(f"{place}: column {column!r}", text)


def _fingerprint(records: Any, columns: Sequence[str], checks: Sequence[Any]) -> str:
    """A hash of these columns of all records, each of them checked. Errors: PromptError naming place and column."""
    if records.columns is not None:
        _has(records.where, records.columns, columns)
    digest, at = hashlib.blake2b(digest_size=16), 0
    for chunk in records.scan(columns):
        for row, record in enumerate(chunk, start=at):
            place = records.place(row)
            if not isinstance(record, Mapping):
                raise PromptError(f"{place} is a {type(record).__name__}; every record must be an object.")
            _has(place, record, columns)
            for column, check in zip(columns, checks, strict=True):
                check(place, record[column])
                digest.update(repr(record[column]).encode())
        at += len(chunk)
    return digest.hexdigest()


def _has(place: str, found: Any, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in found:
            raise PromptError(f"{place} has no column {column!r}; it has {sorted(map(str, found))}.")
