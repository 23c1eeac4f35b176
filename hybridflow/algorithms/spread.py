"""Which groups of responses differ in their scores: only those can teach a group-relative algorithm something.

Shapes: B rows, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.algorithms.credit import row_scores
from hybridflow.algorithms.group import Groups
from hybridflow.algorithms.typed_columns import response_mask, row_column
from hybridflow.algorithms.valid_lengths import valid_lengths
from hybridflow.batch import Batch


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
    groups = Groups.of(group_id, counts)
    differs_G = torch.zeros(len(groups.sizes), dtype=torch.bool)
    differs_G[groups.number[groups.differs(scores)]] = True
    members_G = groups.number.argsort(stable=True).split(groups.number.bincount(minlength=len(differs_G)).tolist())
    kept: list[list[int]] = []
    flat: list[list[int]] = []
    for rows, differs in zip(members_G, differs_G.tolist(), strict=True):
        (kept if differs else flat).append(rows.tolist())
    return Spread(kept=sorted(kept), flat=sorted(flat), total=float(scores[counts].sum()), rows=int(counts.sum()))


def batch_spread(batch: Batch, by: str) -> Spread:
    """`group_spread` of the column `by` of a batch, per row or per token (summed over valid tokens).

    A row without a valid token or with a score of NaN (a reward that does not apply to it) does not count.
    Errors: BatchError when `by` or `group_id` is no column of numbers.
    """
    mask = response_mask(batch) if "response_mask" in batch else None
    scores = row_scores(batch.peek(by), mask, by)
    counts = ~scores.isnan()
    if mask is not None:
        counts &= valid_lengths(mask) > 0
    return group_spread(scores, row_column(batch, "group_id"), counts)
