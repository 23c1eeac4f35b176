"""Trajectories: rows that belong together, as one sequence for an estimator or a loss, and results by row again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.masked import response_mask, row_column
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError


@dataclass(frozen=True)
class JoinedTrajectories:
    """`batch` has one row per trajectory: the response tokens of its rows in the order of `row_id`, and the last row's
    other columns, so a reward [B] is that of the last row, at its last valid token."""

    batch: Batch
    _order: Tensor  # of the rows, so that those of a trajectory are adjacent
    _trajectory: Tensor  # of each row, in that order
    _offsets: Tensor  # of the rows' responses, in that order

    @classmethod
    def of(cls, batch: Batch) -> JoinedTrajectories | None:
        """By the column `trajectory_id` [B] int64; None where every row is a trajectory. Errors: BatchError."""
        if "trajectory_id" not in batch:
            return None
        ids, named = torch.unique(row_column(batch, "trajectory_id"), return_inverse=True)
        if len(ids) == batch.rows:
            return None
        rows = torch.arange(batch.rows)
        first = torch.full((len(ids),), batch.rows).scatter_reduce(0, named, rows, "amin")
        order = _order_within(batch, ids, named)
        order = order[torch.argsort(first[named[order]], stable=True)]
        own = batch.reorder(order)
        began = first[named][order]
        trajectory = torch.cat([torch.zeros(1, dtype=torch.int64), (began[1:] != began[:-1]).cumsum(0)])
        last = torch.cat([(trajectory[1:] != trajectory[:-1]).nonzero()[:, 0], rows[-1:]])
        responses = response_mask(own)
        offsets = torch.cat([responses.offsets[:1], responses.offsets[1:][last]])
        ends, columns = own.reorder(last), {}
        for name in own.columns:
            column = own.peek(name)
            if isinstance(column, Ragged) and name != "prompt_ids" and column.offsets.equal(responses.offsets):
                columns[name] = Ragged(column.values, offsets)
        return cls(ends.with_columns(**columns), order, trajectory, responses.offsets)

    def rows(self) -> list[Tensor]:
        """The rows of each trajectory, int64, in their order."""
        return list(self._order.split(torch.unique_consecutive(self._trajectory, return_counts=True)[1].tolist()))

    def joined(self, tokens: Ragged) -> Ragged:
        """Values per response token of rows that lie in this order, by trajectory."""
        ends = torch.cat([self._trajectory[1:] != self._trajectory[:-1], torch.ones(1, dtype=torch.bool)])
        return Ragged(tokens.values, torch.cat([self._offsets[:1], self._offsets[1:][ends]]))

    def split(self, found: Batch) -> Batch:
        """Columns of the trajectories as those of the rows: tokens to their rows, other values to each row."""
        back = torch.argsort(self._order)
        offsets = found.peek("advantages").offsets  # type: ignore[union-attr]
        columns = {}
        for name in found.columns:
            column = found.peek(name)
            if isinstance(column, Ragged) and column.offsets.equal(offsets):
                columns[name] = Ragged(column.values, self._offsets).index(back)
            elif isinstance(column, Tensor | Ragged):
                index = self._trajectory[back]
                columns[name] = column[index] if isinstance(column, Tensor) else column.index(index)
            else:
                columns[name] = [column[at] for at in self._trajectory[back].tolist()]
        return Batch(columns)


def _order_within(batch: Batch, ids: Tensor, named: Tensor) -> Tensor:
    """The rows by `row_id`, which counts up within a trajectory; `named` is each row's place in `ids`.

    Errors: BatchError for two rows with one `row_id` in a trajectory, and for a trajectory with rows of two groups.
    """
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
