"""Prompt groups: rows that answer the same prompt, statistics of a score over them, and estimators on top.

Shapes: B rows, G groups, V rows that count, R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.token_rewards import every_token, row_scores
from hybridflow.algorithms.masked import mask_column, response_mask, row_column, valid_lengths, whiten
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError


@dataclass(frozen=True)
class PromptGroups:
    """Which rows answer the same prompt, and which of them count; rows of a group need not be adjacent.

    `number` [B] int64 is the group of each row, counted from 0; `counts` [B] bool says which rows take part (a row
    without a valid token does not), `tokens` [B] the valid tokens of each row, `sizes` [G] int64 how many rows of each
    group count. Values of rows that do not count are ignored, even nan, and centred values are 0 there."""

    number: Tensor
    counts: Tensor
    tokens: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, group_id: Tensor, tokens: Tensor | None = None) -> PromptGroups:
        """From `group_id` [B] of any integer type and `tokens` [B] (rows with 0 do not count; by default all do)."""
        ids, number = torch.unique(group_id, return_inverse=True)
        tokens = torch.ones_like(number) if tokens is None else tokens
        everything = cls(number, torch.ones_like(number, dtype=torch.bool), tokens, number.new_zeros(len(ids)))
        return everything.only(tokens > 0)

    def only(self, counts: Tensor) -> PromptGroups:
        """The same groups, of which fewer rows count: those where `counts` [B] bool is True as well."""
        counts = self.counts & counts
        sizes = torch.zeros_like(self.sizes).index_add(0, self.number, counts.to(self.number.dtype))
        return replace(self, counts=counts, sizes=sizes)

    @property
    def size(self) -> Tensor:
        """[B] int64: rows that count in the group of each row."""
        return self.sizes[self.number]

    def zeroed(self, x_B: Tensor) -> Tensor:
        """[B] float64: x at rows that count, 0 elsewhere."""
        return torch.where(self.counts, x_B.to(torch.float64), 0.0)

    def sum(self, x_B: Tensor) -> Tensor:
        """[B] float64: the sum of x over the group of each row."""
        counted = self.zeroed(x_B)
        return counted.new_zeros(len(self.sizes)).index_add(0, self.number, counted)[self.number]

    def mean(self, x_B: Tensor, weights: Tensor | None = None) -> Tensor:
        """[B] float64: the mean of x over the group of each row, weighted by `weights` [B] where they are given."""
        if weights is None:
            return self.sum(x_B) / self.size.clamp(min=1)
        weight = self.sum(weights)
        return torch.where(weight > 0, self.sum(self.zeroed(x_B) * self.zeroed(weights)) / weight, 0.0)

    def centred(self, x_B: Tensor) -> Tensor:
        """[B] float64: x minus the mean of its group; 0 in a group of one."""
        return self.zeroed(x_B - self.mean(x_B))

    def std(self, x_B: Tensor) -> Tensor:
        """[B] float64: the standard deviation of the group, with Bessel's correction; 0 in a group of one."""
        return (self.sum(self.centred(x_B).square()) / (self.size - 1).clamp(min=1)).sqrt()

    def differs(self, x_B: Tensor) -> Tensor:
        """[B] bool: whether x takes at least two values among the rows that count in the group of each row."""
        counted_V, number_V = x_B[self.counts].to(torch.float64), self.number[self.counts]
        low_G = counted_V.new_full((len(self.sizes),), torch.inf).scatter_reduce(0, number_V, counted_V, "amin")
        return self.counts & (self.sum(x_B > low_G[self.number]) > 0)


def groups_of(batch: Batch) -> PromptGroups:
    """The groups of the batch, of which rows without a valid token do not count. Errors: BatchError when no group has
    two rows."""
    group_id = row_column(batch, "group_id")
    if len(group_id.unique()) == len(group_id):
        raise BatchError(
            f"{len(batch)} rows fall into {len(group_id)} groups of one response, which have no other response to be "
            f"compared with. Generate n >= 2 responses per prompt."
        )
    return PromptGroups.of(group_id, valid_lengths(mask_column(batch)))


class GroupEstimator(Estimator):
    """Base of estimators that compare the responses to one prompt: one advantage for all tokens of a response.

    `whitens` says that the advantages are whitened over the valid tokens of the batch. `returns` are the score of the
    row, its summed reward, at every valid token."""

    reads = ("group_id",)
    whitens = False

    def __call__(self, rewards: Ragged, batch: Batch, /) -> tuple[Ragged, Ragged]:
        mask = mask_column(batch)
        scores = row_scores(rewards, mask)
        advantages = every_token(self.row_advantages(scores, groups_of(batch)), mask)
        return whiten(advantages, mask) if self.whitens else advantages, every_token(scores, mask)

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        """[B] float64: the advantage of each response, by its score [B] float: by default over its group's mean."""
        return groups.centred(scores)


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Groups by whether their scores differ: row positions of each group, in order of its first row.

    Only `informative` groups can teach a group-relative algorithm something; in `degenerate` ones all scores are equal.
    `total` and `rows` are the sum and the number of the scores that count."""

    informative: list[list[int]] = field(default_factory=list)
    degenerate: list[list[int]] = field(default_factory=list)
    total: float = 0.0
    rows: int = 0


def filter_groups(batch: Batch, by: str) -> GroupFilter:
    """Groups by whether the scores in column `by`, per row or per token (summed over valid tokens), differ.

    A row without a valid token or with a score of NaN (a reward that does not apply to it) does not count. The paper
    keeps groups with some, but not all answers right; with other rewards than 0 and 1 that is a group with two
    different scores. Yu et al., "DAPO" (2025), section 3.2, equation 11.
    Errors: BatchError when `by` or `group_id` is not a column of numbers."""
    mask = response_mask(batch) if "response_mask" in batch else None
    scores = row_scores(batch.peek(by), mask, by)
    tokens = None if mask is None else valid_lengths(mask)
    groups = PromptGroups.of(row_column(batch, "group_id"), tokens).only(~scores.isnan())
    differing = set(groups.number[groups.differs(scores)].tolist())
    members: dict[int, list[int]] = {}
    for row, number in enumerate(groups.number.tolist()):
        members.setdefault(number, []).append(row)
    return GroupFilter(
        informative=[rows for number, rows in members.items() if number in differing],
        degenerate=[rows for number, rows in members.items() if number not in differing],
        total=float(scores[groups.counts].sum()),
        rows=int(groups.counts.sum()),
    )
