"""Groups: the rows that answer the same prompt, and statistics of a score over them.

Shapes: B rows, G groups, V rows that count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Which rows answer the same prompt, and which of them count; rows of a group need not be adjacent.

    `number` [B] int64 is the group of each row, counted from 0; `counts` [B] bool says which rows take part (a row
    without a valid token does not), `sizes` [G] int64 how many of them each group has. What stands at rows that do not
    count, nan too, does not matter, and what is centred is 0 there.
    """

    number: Tensor
    counts: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, group_id: Tensor, counts: Tensor | None = None) -> Groups:
        """From `group_id` [B] of any integer type and `counts` [B] bool (by default every row counts)."""
        ids, number = torch.unique(group_id, return_inverse=True)
        counts = torch.ones_like(number, dtype=torch.bool) if counts is None else counts
        return cls(number, counts, number.new_zeros(len(ids)).index_add(0, number, counts.to(number.dtype)))

    def only(self, counts: Tensor) -> Groups:
        """The same groups, of which fewer rows count: those where `counts` [B] bool is True as well."""
        return Groups.of(self.number, self.counts & counts)

    @property
    def size(self) -> Tensor:
        """[B] int64: rows that count in the group of each row."""
        return self.sizes[self.number]

    def kept(self, x_B: Tensor) -> Tensor:
        """[B] float64: x at rows that count, 0 elsewhere."""
        return torch.where(self.counts, x_B.to(torch.float64), 0.0)

    def sum(self, x_B: Tensor) -> Tensor:
        """[B] float64: the sum of x over the group of each row."""
        kept = self.kept(x_B)
        return kept.new_zeros(len(self.sizes)).index_add(0, self.number, kept)[self.number]

    def mean(self, x_B: Tensor, weights: Tensor | None = None) -> Tensor:
        """[B] float64: the mean of x over the group of each row, weighted by `weights` [B] where they are given."""
        if weights is None:
            return self.sum(x_B) / self.size.clamp(min=1)
        weight = self.sum(weights)
        return torch.where(weight > 0, self.sum(self.kept(x_B) * self.kept(weights)) / weight, 0.0)

    def centred(self, x_B: Tensor) -> Tensor:
        """[B] float64: x minus the mean of its group; 0 in a group of one."""
        return self.kept(x_B - self.mean(x_B))

    def std(self, x_B: Tensor) -> Tensor:
        """[B] float64: the standard deviation of the group, with Bessel's correction; 0 in a group of one."""
        return (self.sum(self.centred(x_B).square()) / (self.size - 1).clamp(min=1)).sqrt()

    def differs(self, x_B: Tensor) -> Tensor:
        """[B] bool: whether x takes at least two values among the rows that count in the group of each row."""
        counted_V, number_V = x_B[self.counts].to(torch.float64), self.number[self.counts]
        low_G = counted_V.new_full((len(self.sizes),), torch.inf).scatter_reduce(0, number_V, counted_V, "amin")
        return self.counts & (self.sum(x_B > low_G[self.number]) > 0)
