"""Rows of a batch as samples: prompt, response, rewards and, token by token, log-probs, advantages and versions."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.data.tokenizer import Tokenizer, TokenizerLike, as_tokenizer

_PER_ROW = ("prompt", "response", "answer", "rewards", "costs", "finished", "turns", "stop")
_PER_TOKEN = ("log_probs", "advantages", "policy_version", "turn_ids")
_SOURCES = ("group_id", "response_ids")


class SampledBatches:
    """Samples of batches that may not have been computed yet, until their iteration is written."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, str, Batch | BatchRef, Future[Tokenizer] | None]] = []
        self._tokenizers: dict[str, Future[Tokenizer]] = {}

    def add(self, step: int, title: str, batch: Batch | BatchRef, tokenizer: Future[Tokenizer] | None) -> None:
        """`batch` is what `sampled` returned, `tokenizer` what `load` did."""
        self._waiting.append((step, title, batch, tokenizer))

    def take(self, step: int) -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
        """(step, title, rows) of iterations up to `step`, once they are there. Errors: as `sample_rows`, and as
        `as_tokenizer`."""
        while self._waiting and self._waiting[0][0] <= step:
            at, title, batch, tokenizer = self._waiting.pop(0)
            yield at, title, sample_rows(batch, None if tokenizer is None else tokenizer.result())

    def clear(self) -> None:
        self._waiting.clear()

    def load(self, given: TokenizerLike | None) -> Future[Tokenizer] | None:
        """The tokenizer; that of a directory is read once, in a thread: importing its library takes seconds."""
        if given is None:
            return None
        name = os.fspath(given) if isinstance(given, str | os.PathLike) else str(id(given))
        if name not in self._tokenizers:
            pool = ThreadPoolExecutor(1, "tokenizer")
            self._tokenizers[name] = pool.submit(as_tokenizer, given)
            pool.shutdown(wait=False)
        return self._tokenizers[name]


def sampled(batch: Batch | BatchRef, rows: int, columns: Sequence[str] = ()) -> Batch | BatchRef:
    """The first rows, with the columns of a sample and the additional `columns`. Errors: MissingColumnError."""
    usual = [name for name in (*_PER_ROW, *_PER_TOKEN, *_SOURCES) if name in batch]
    return batch.select(list(dict.fromkeys([*usual, *columns])))[: max(rows, 0)]


def sample_rows(batch: Batch | BatchRef, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """One object per row, for `samples.jsonl`; waits for a batch by reference.

    `group` numbers the prompts of the batch; `tokens` are the texts of the response's tokens, with a tokenizer.
    Errors: WorkerError of the call that failed.
    """
    rows = (batch.get() if isinstance(batch, BatchRef) else batch).to_dicts()
    groups: dict[int, int] = {}
    out = []
    for number, row in enumerate(rows):
        ids = row.pop("response_ids", None)
        group = groups.setdefault(row.pop("group_id", number), len(groups))
        tokens = {"tokens": [tokenizer.raw.decode([one]) for one in ids]} if tokenizer and ids is not None else {}
        out.append({"group": group, **{name: _short(value) for name, value in row.items()}, **tokens})
    return out


def _short(value: Any) -> Any:
    """Numbers with six digits: float32 has no more. JSON has no NaN: what is not finite becomes None."""
    if isinstance(value, list):
        return [_short(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
