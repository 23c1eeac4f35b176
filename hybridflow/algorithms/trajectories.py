"""Trajectories: rows that belong together are one sequence for estimators, losses, rewards and metrics.

Shapes: B rows, T trajectories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.masked import response_mask, row_column
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError


@dataclass(frozen=True)
class Trajectories:
    """The rows of a batch by trajectory: `order` [B] int64, `sizes` [T] int64 of them each."""

    order: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Trajectories | None:
        """By the column `trajectory_id` [B] int64, those of one in the order of `row_id`; None where every row is a
        trajectory. Errors: BatchError."""
        if "trajectory_id" not in batch:
            return None
        ids, named = torch.unique(row_column(batch, "trajectory_id"), return_inverse=True)
        if len(ids) == batch.rows:
            return None
        first = torch.full((len(ids),), batch.rows).scatter_reduce(0, named, torch.arange(batch.rows), "amin")
        order = _order_within(batch, ids, named)
        order = order[torch.argsort(first[named[order]], stable=True)]
        return cls(order, torch.unique_consecutive(named[order], return_counts=True)[1])

    @property
    def rows(self) -> list[Tensor]:
        """The rows of each trajectory, int64, in their order."""
        return list(self.order.split(self.sizes.tolist()))

    @property
    def last(self) -> Tensor:
        """[T] int64: the last row of each trajectory."""
        return self.order[self.sizes.cumsum(0) - 1]

    @property
    def of_row(self) -> Tensor:
        """[B] int64: the trajectory of each row."""
        return torch.repeat_interleave(torch.arange(len(self.sizes)), self.sizes)[torch.argsort(self.order)]

    def join(self, batch: Batch) -> Batch:
        """One row per trajectory: values per response token joined, other columns those of the last row."""
        responses, ends = response_mask(batch), batch.reorder(self.last)
        columns = {}
        for name in batch.columns:
            column = batch.peek(name)
            if isinstance(column, Ragged) and name != "prompt_ids" and column.offsets.equal(responses.offsets):
                columns[name] = self.joined(column)
        return ends.with_columns(**columns)

    def joined(self, tokens: Ragged) -> Ragged:
        """Ragged [B] per response token as ragged [T], differentiable."""
        own = tokens if self.order.equal(torch.arange(len(self.order))) else tokens.index(self.order)
        return Ragged(own.values, own.offsets[torch.cat([self.sizes.new_zeros(1), self.sizes.cumsum(0)])])

    def split(self, found: Batch, mask: Ragged) -> Batch:
        """Columns [T] as columns [B]: values per response token to their rows, others to each row of the trajectory.
        `mask` is that of the rows."""
        joined, back, columns = self.joined(mask), torch.argsort(self.order), {}
        lengths = mask.lengths[self.order]
        for name in found.columns:
            column = found.peek(name)
            if isinstance(column, Ragged) and column.offsets.equal(joined.offsets):
                columns[name] = Ragged.from_lengths(column.values, lengths).index(back)
        return self.spread(found).with_columns(**columns)

    def spread(self, found: Batch) -> Batch:
        """Columns [T] as columns [B]: that of its trajectory for each row."""
        return found.reorder(self.of_row)


def trajectories_of(loss: Callable[..., Any], batch: Batch) -> Trajectories | None:
    """`Trajectories.of(batch)`; None for a loss without a term of a whole sequence (`by_sequence`)."""
    return Trajectories.of(batch) if getattr(loss, "by_sequence", True) else None


def _order_within(batch: Batch, ids: Tensor, named: Tensor) -> Tensor:
    """The rows by `row_id`, which counts up within a trajectory; `named` is each row's place in `ids`. Errors:
    BatchError for two rows with one `row_id` in a trajectory, and for a trajectory with rows of two groups."""
    rows = torch.arange(batch.rows)
    if "group_id" in batch:
        groups = row_column(batch, "group_id")
        one = groups.new_zeros(len(ids)).scatter(0, named, groups)[named]
        if bool((bad := one != groups).any()):
            raise BatchError(
                f"trajectory {int(ids[named[bad]][0])} has rows of different groups: `group_id` must be equal for all "
                f"rows of a `trajectory_id`."
            )
    if "row_id" not in batch:
        return rows
    row_ids = row_column(batch, "row_id")
    pairs, counts = torch.unique(torch.stack([named, row_ids], 1), dim=0, return_counts=True)
    if bool((counts > 1).any()):
        place, row_id = pairs[counts > 1][0].tolist()
        raise BatchError(
            f"trajectory {int(ids[place])} has the row {row_id} twice. Rows of two calls with equal `row_id` need "
            f"another `trajectory_id` before they are joined."
        )
    return torch.argsort(row_ids, stable=True)
