"""Which groups of responses differ in their scores: only those can teach a group-relative algorithm something.

Shapes: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.algorithms.typed_columns import response_mask, row_column
from hybridflow.batch import Batch
from hybridflow.ragged import Ragged


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The positions of the rows of each group, in order of its first row: scores differ in `kept`, not in `flat`.

    `total` and `rows` are the sum and the number of the scores that count.
    """

    kept: list[list[int]] = field(default_factory=list)
    flat: list[list[int]] = field(default_factory=list)
    total: float = 0.0
    rows: int = 0


def group_spread(scores: Tensor, group_id: Tensor, counts: Tensor) -> Spread:
    """Groups by whether their scores differ. Yu et al., "DAPO" (2025), section 3.2, equation 11.

    `scores` [B] float, `group_id` [B] int64 (rows of a group need not be adjacent), `counts` [B] bool: rows whose score
    counts. The paper keeps groups with some, but not all answers right; with other rewards than 0 and 1 that is a
    group with two different scores.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(group_id.tolist()):
        members.setdefault(group, []).append(row)
    kept: list[list[int]] = []
    flat: list[list[int]] = []
    for rows in members.values():
        found = scores[rows][counts[rows]]
        (kept if len(found) and bool(found.max() > found.min()) else flat).append(rows)
    return Spread(kept=kept, flat=flat, total=float(scores[counts].sum()), rows=int(counts.sum()))


def batch_spread(batch: Batch, by: str) -> Spread:
    """`group_spread` of the column `by` of a batch, per row or per token (summed over valid tokens).

    A row without a valid token or with a score of NaN (a reward that does not apply to it) does not count.
    Errors: BatchError when `by` or `group_id` is no column of numbers.
    """
    masked = "response_mask" in batch
    mask = response_mask(batch) if masked else None
    column = batch.peek(by)
    if isinstance(column, Ragged):
        values = column.values if mask is None else torch.where(mask.values, column.values, 0.0)
        scores = column.with_values(values.double()).row_sum()
    else:
        scores = row_column(batch, by).double()
    counts = ~scores.isnan()
    if mask is not None:
        counts &= mask.with_values(mask.values.long()).row_sum() > 0
    return group_spread(scores, row_column(batch, "group_id"), counts)
