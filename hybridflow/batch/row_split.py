"""RowPlan: assigns rows to parts.

Pure. The one place that splits a batch, over data parallel ranks (parts) and over mini-batches (chunks). Chunks are
contiguous ranges of rows that do not depend on the number of parts, so an update sees the same mini-batches at any
data parallel size; inside a chunk the rows go to the parts contiguously or balanced by weight (tokens per row).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridflow.errors import BatchError
from hybridflow.topology import even_bounds

Assignment = list[list[Tensor]]
"""[part][chunk] -> row indices int64, ascending."""


@dataclass(frozen=True)
class RowPlan:
    """`rows` rows over `parts` parts, in `chunks` mini-batches. Parts and chunks may be empty; no row is lost.

    Errors: BatchError when rows is negative or parts or chunks is below one.
    """

    rows: int
    parts: int
    chunks: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (("rows", 0), ("parts", 1), ("chunks", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < minimum:
                raise BatchError(f"RowPlan({name}={value!r}): must be a whole number of at least {minimum}.")

    def counts(self) -> list[list[int]]:
        """[part][chunk] -> number of rows, whatever the weights are (with groups the counts depend on them)."""
        per_chunk = [_sizes(rows, self.parts) for rows in _sizes(self.rows, self.chunks)]
        return [[sizes[part] for sizes in per_chunk] for part in range(self.parts)]

    def assign(self, weights: Tensor | None = None, groups: Tensor | None = None) -> Assignment:
        """[part][chunk] -> row indices int64, ascending; contiguous ranges without `weights`.

        `weights` [rows] (tokens per row, any number dtype) balances the load of the parts inside each chunk and never
        leaves the heaviest part heavier than contiguous ranges would. `groups` [rows] int64 (equal ids adjacent):
        neither chunks nor parts cut a group, and chunks have equal numbers of them, as near as possible.

        Errors: BatchError for a wrong shape, weights that are negative or not finite, and scattered groups.
        """
        starts = self._unit_starts(groups)
        loads = self._unit_loads(weights, starts)
        out: Assignment = [[] for _ in range(self.parts)]
        for first, last in itertools.pairwise(even_bounds(len(starts) - 1, self.chunks)):  # units of one chunk
            for part, units in enumerate(self._split_chunk(starts[first : last + 1], loads, first)):
                at = units + first
                if len(starts) <= self.rows:  # some unit is a group of rows
                    spans = zip(starts[at].tolist(), starts[at + 1].tolist(), strict=True)
                    at = torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(a, b) for a, b in spans)])
                out[part].append(at)
        return out

    def _split_chunk(self, starts: Tensor, loads: Tensor | None, first: int) -> list[Tensor]:
        """[part] -> units of one chunk (0 is its first), ascending; `starts` [units + 1] their first rows."""
        units = len(starts) - 1
        even = [int(starts[0]) + bound for bound in even_bounds(int(starts[-1] - starts[0]), self.parts)]
        # the start of a unit nearest to each bound; a tie goes to the earlier one
        wanted = torch.tensor(even)
        right = torch.searchsorted(starts, wanted).clamp(max=units)
        left = (right - 1).clamp(min=0)
        bounds = torch.where(wanted - starts[left] <= starts[right] - wanted, left, right)
        contiguous = [torch.arange(a, b) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
        if loads is None or self.parts == 1 or units < 2:
            return contiguous
        chunk_loads = loads[first : first + units]
        balanced = balance(chunk_loads, self.parts)
        return balanced if _heaviest(chunk_loads, balanced) < _heaviest(chunk_loads, contiguous) else contiguous

    def _unit_starts(self, groups: Tensor | None) -> Tensor:
        """[units + 1] int64: the first row of every unit (a row, or a group), and `rows` at the end."""
        if groups is None:
            return torch.arange(self.rows + 1)
        if groups.shape != (self.rows,):
            raise BatchError(f"groups must have shape [{self.rows}], one id per row, got {list(groups.shape)}.")
        ids, lengths = torch.unique_consecutive(groups.cpu(), return_counts=True)
        unique, runs = ids.unique(return_counts=True)
        if len(unique) != len(ids):
            scattered = int(unique[runs > 1][0])
            raise BatchError(
                f"the rows of group {scattered} are not adjacent: bring the rows of each `group_id` (or "
                f"`trajectory_id`) together first, for example batch.reorder(batch['group_id'].argsort(stable=True))."
            )
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    def _unit_loads(self, weights: Tensor | None, starts: Tensor) -> Tensor | None:
        """[units] float64, summed over the rows of each unit."""
        if weights is None:
            return None
        if weights.shape != (self.rows,):
            raise BatchError(f"weights must have shape [{self.rows}], one per row, got {list(weights.shape)}.")
        exact = weights.detach().cpu().to(torch.float64)
        if not bool(torch.isfinite(exact).all() & (exact >= 0).all()):
            raise BatchError("weights must be finite and not negative: they are the tokens of each row.")
        total = torch.cat([exact.new_zeros(1), exact.cumsum(0)])
        return total[starts[1:]] - total[starts[:-1]]


def balance(loads: Tensor, parts: int) -> list[Tensor]:
    """[part] -> units int64, ascending: loads [units] evened out, counts as those of `even_bounds(units, parts)`.

    Balanced largest differencing (Michiels et al., 2003): units sorted by load fall into tuples of one unit per part;
    the two partial partitions with the largest spread are joined, heaviest onto lightest, until one is left.
    Deterministic: equal loads keep their row order.
    """
    units, rounds = len(loads), -(-len(loads) // parts)
    weights = loads.double().numpy()  # numpy: torch would start threads for each of these tiny steps
    tuples = np.full(rounds * parts, -1)  # -1: no unit; they are fewer than parts, so no part holds two
    tuples[:units] = np.argsort(-weights, kind="stable")
    tuples = tuples.reshape(rounds, parts)
    sums = np.where(tuples < 0, 0.0, weights[tuples] if units else 0.0)
    heap = [(float(row[-1] - row[0]), i, row, tuples[i][None]) for i, row in enumerate(sums)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, heavy, members = heapq.heappop(heap)
        _, i, light, others = heapq.heappop(heap)
        joined = heavy + light[::-1]
        at = np.argsort(-joined, kind="stable")
        joined, members = joined[at], np.concatenate([members, others[:, ::-1]])[:, at]
        heapq.heappush(heap, (float(joined[-1] - joined[0]), i, joined, members))
    columns = [np.sort(column[column >= 0]) for column in heap[0][3].T] if heap else []
    columns += [np.empty(0, dtype=np.int64)] * (parts - len(columns))
    ordered = sorted(columns, key=lambda column: (-len(column), column[:1].tolist()))
    return [torch.from_numpy(column) for column in ordered]


def _sizes(rows: int, parts: int) -> list[int]:
    bounds = even_bounds(rows, parts)
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def _heaviest(loads: Tensor, split: Sequence[Tensor]) -> float:
    return max(float(loads[units].sum()) for units in split)
