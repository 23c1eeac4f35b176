"""Rows of a batch as samples: prompt, response, rewards and, token by token, log-probs, advantages and versions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.data.tokenizer import Tokenizer, TokenizerLike, as_tokenizer

_PER_ROW = ("prompt", "response", "answer", "rewards", "costs", "finished", "turns", "stop")
_PER_TOKEN = ("log_probs", "advantages", "policy_version", "turn_ids")
_SOURCES = ("group_id", "response_ids")


def loading(given: TokenizerLike) -> Future[Tokenizer]:
    """The tokenizer, read in a thread: importing its library takes seconds. Errors of the future: as `as_tokenizer`."""
    pool = ThreadPoolExecutor(1, "tokenizer")
    found = pool.submit(as_tokenizer, given)
    pool.shutdown(wait=False)
    return found


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
    """Numbers with six digits: float32 has no more. JSON has no NaN: None."""
    if isinstance(value, list):
        return [_short(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
