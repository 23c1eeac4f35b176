"""Packing: sequences of different length in one row without padding, and which of them share a row. Pure.

Shapes: B sequences, S positions of a packed row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hybridflow.errors import BatchError


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a packed row [1, S], one after the other: `lengths` (on the host) add up to S.

    `offsets` [B + 1] int32 say where each begins and end with S; `positions` [S] int64 count from 0 in each sequence.
    Both are on the device that computes.
    """

    lengths: tuple[int, ...]
    offsets: Tensor
    positions: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Sequences:
        """On the CPU. Errors: BatchError without a sequence, or for one without a token."""
        if not len(lengths) or min(lengths) < 1:
            raise BatchError(f"sequences of a packed row have at least one token each, got {list(lengths)[:20]}.")
        sizes = torch.as_tensor(lengths, dtype=torch.int64)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        positions = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], sizes)
        return cls(tuple(sizes.tolist()), offsets.to(torch.int32), positions)

    @property
    def tokens(self) -> int:
        return len(self.positions)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(how many, length) of neighbouring sequences of equal length: they are rows of one dense tensor."""
        return tuple((len(list(equal)), length) for length, equal in itertools.groupby(self.lengths))

    def to(self, device: torch.device) -> Sequences:
        if self.positions.device == device:
            return self
        moved = (x.to(device, non_blocking=True) for x in (self.offsets, self.positions))
        return Sequences(self.lengths, *moved)


def pack(tokens: Tensor, budget: int, count: int = 1, costs: Tensor | None = None) -> list[Tensor]:
    """Rows of `tokens` [rows] int64 each -> row indices of every bin, int64 and ascending; no bin is empty.

    A bin has at most `budget` tokens, or one longer row. There are as few bins as first-fit decreasing finds (at most
    11/9 of the fewest that exist, and two thirds of one; Dósa, 2007), but at least `count` where there are as many
    rows. Within that number bins are made as alike in cost as the largest-first rule can (`costs` [rows], by default
    the tokens): stages of a pipeline and data parallel ranks wait for the costliest.

    Errors: BatchError for a budget or a count below one.
    """
    if budget < 1 or count < 1:
        raise BatchError(f"pack(budget={budget}, count={count}): both must be at least 1.")
    rows = len(tokens)
    sizes = np.minimum(tokens.numpy(), budget)  # a longer row fills a bin of its own
    if not rows:
        return []
    if count == 1 and int(sizes.sum()) <= budget:
        return [torch.arange(rows)]
    loads = sizes.astype(np.float64) if costs is None else costs.double().numpy()
    bins = _first_fit(sizes, budget)
    wanted = max(len(bins), min(count, rows))
    found = _even(sizes, loads, budget, wanted) or _halved(bins, loads, wanted)
    return [torch.from_numpy(np.sort(np.array(members, dtype=np.int64))) for members in found]


def _first_fit(sizes: np.ndarray, budget: int) -> list[list[int]]:
    """First-fit decreasing: each row, longest first, into the first bin with room for it."""
    room, bins = np.full(len(sizes), budget), []
    for row in np.argsort(-sizes, kind="stable").tolist():
        at = int(np.argmax(room >= sizes[row]))  # a bin that was not opened has room for everything
        if at == len(bins):
            bins.append([])
        bins[at].append(row)
        room[at] -= sizes[row]
    return bins


def _even(sizes: np.ndarray, loads: np.ndarray, budget: int, count: int) -> list[list[int]]:
    """Each row, costliest first, into the cheapest of `count` bins that has room; [] when some row finds none."""
    room, spent = np.full(count, budget), np.zeros(count)
    bins: list[list[int]] = [[] for _ in range(count)]
    for row in np.argsort(-loads, kind="stable").tolist():
        at = int(np.argmin(np.where(room >= sizes[row], spent, np.inf)))
        if room[at] < sizes[row]:
            return []
        bins[at].append(row)
        room[at] -= sizes[row]
        spent[at] += loads[row]
    return bins if all(bins) else []


def _halved(bins: list[list[int]], loads: np.ndarray, count: int) -> list[list[int]]:
    """The costliest bins of several rows cut in two until there are `count`."""
    bins = list(bins)
    while len(bins) < count:
        at = max((i for i, rows in enumerate(bins) if len(rows) > 1), key=lambda i: loads[bins[i]].sum())
        rows = bins.pop(at)
        bins += [rows[::2], rows[1::2]]
    return bins
