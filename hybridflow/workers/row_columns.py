"""The columns of generated rows, and those that a session adds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.engines.contract import Row
from hybridflow.environments.agent import Acted
from hybridflow.environments.trajectory import TrajectoryRow
from hybridflow.errors import DivergenceError

WRITTEN = ("prompt_ids", "response_ids", "log_probs", "policy_version", "response_mask", "num_tokens", "finished")
WRITTEN += ("temperature",)
SESSION_ROWS = ("row_id", "response_index", "oldest_version", "newest_version", "spans", "recomputed_tokens")
SESSION_ROWS += ("response_tokens",)


def row_columns(rows: Sequence[Row], tokenizer: Tokenizer | None) -> Batch:
    """WRITTEN, and `response` with a tokenizer. `response_mask` leaves out tokens whose log-probability is not finite.

    Errors: DivergenceError when that of no token is.
    """
    response_ids = Ragged.from_rows([row.token_ids for row in rows], torch.int64)
    log_probs = Ragged.from_rows([row.log_probs for row in rows], torch.float32)
    temperatures = [1.0 if row.sampling.greedy else row.sampling.temperature for row in rows]
    finite = log_probs.values.isfinite()
    if not bool(finite.all()) and not bool((finite & (log_probs.values != 0)).any()):  # 0: not the model's, of an agent
        raise DivergenceError(
            f"generation has sampled {int((~finite).sum())} tokens, and the log-probability of each is not finite: "
            f"weights that it was given are nan or infinite, or the model overflows in its dtype (hf.VLLM(dtype=...)). "
            f"Load weights from before that, see hf.Checkpoints."
        )
    columns: dict[str, Any] = {
        "prompt_ids": Ragged.from_rows([row.prompt_ids for row in rows], torch.int64),
        "response_ids": response_ids,
        "log_probs": log_probs,
        "policy_version": Ragged.from_rows([row.policy_version for row in rows], torch.int32),
        "response_mask": log_probs.map(torch.isfinite),
        "num_tokens": torch.tensor([len(row.prompt_ids) + len(row.token_ids) for row in rows], dtype=torch.int64),
        "finished": torch.tensor([row.finished for row in rows], dtype=torch.bool),
        "temperature": torch.tensor(temperatures, dtype=torch.float32),
    }
    if tokenizer is not None:
        skips = [row.sampling.skip_special_tokens for row in rows]
        texts = {skip: tokenizer.decode([row.token_ids for row in rows], not skip) for skip in {*skips}}
        columns["response"] = [texts[skip][at] for at, skip in enumerate(skips)]
    return Batch(columns)


def with_session(columns: Batch, rows: Iterable[tuple[Row, Sequence[int], int]]) -> Batch:
    """Adds SESSION_ROWS: of each row its name and counters, the versions of its tokens (none: 0 and -1), its tokens."""
    numbers = [
        (row.row_id, row.index, min(versions, default=0), max(versions, default=-1), row.spans, row.recomputed, tokens)
        for row, versions, tokens in rows
    ]
    more = torch.tensor(numbers, dtype=torch.int64).reshape(-1, len(SESSION_ROWS)).unbind(1)
    return columns.with_columns(**dict(zip(SESSION_ROWS, more, strict=True)))


def trajectory_session(
    acted: Sequence[Acted], several: Sequence[Sequence[tuple[Row, TrajectoryRow]]]
) -> list[tuple[Row, list[int], int]]:
    """For `with_session`: the versions are those of the whole trajectory, its counters are in the first of its rows."""
    out = []
    for one, rows in zip(acted, several, strict=True):
        versions = [version for row, _ in rows for version in row.policy_version if version >= 0]
        for at, (row, _) in enumerate(rows):
            out.append((row if at else one.begun, versions, len(row.token_ids)))
    return out
