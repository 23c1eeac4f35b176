"""Splitting: how the rows of a call are split over its ranks, and what a part is of the whole."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hybridflow.cluster.columns import ColumnRef, Order
from hybridflow.cluster.store import Reader
from hybridflow.model_spec import Cost
from hybridflow.rows import RowPlan

_ORDER_KEYS = itertools.count(1)


@dataclass(frozen=True)
class Splitting:
    """How rows are split: the columns that decide, and the plans that were made, which batches of one call share.

    `weights` (tokens per row), or their `cost`, are spread evenly, rows of one of `groups` stay together, and each of
    `chunks` ranges of rows is split on its own.
    """

    weights: ColumnRef | None = None
    groups: ColumnRef | None = None
    chunks: int = 1
    cost: Cost | None = None
    plans: dict[tuple[int, int], tuple[Order, list[list[int]]]] = field(default_factory=dict, compare=False, repr=False)

    def plan(self, rows: int, parts: int, timeout: float) -> tuple[Order, list[list[int]]] | None:
        """The order, and [part][chunk] row counts; None where contiguous even ranges are wanted."""
        weights = self.weights if parts > 1 else None
        if weights is None and self.groups is None and self.chunks == 1:
            return None
        if (rows, parts) not in self.plans:
            plan = RowPlan(rows, parts, self.chunks)
            order = Order(plan, weights, self.groups, next(_ORDER_KEYS), self.cost)
            counts = plan.counts()
            if self.groups is not None:  # group boundaries are data: the documented exception that waits
                counts = [[len(chunk) for chunk in part] for part in Reader(timeout).assignment(order)]
            self.plans[rows, parts] = order, counts
        return self.plans[rows, parts]


@dataclass(frozen=True)
class Piece:
    """What a batch is of the one it was split from: a range of rows from `start`, or part `part` of `order`.

    `chunk_rows` are its rows in each mini-batch; `repeat` rows of it stand for each row that the order placed.
    """

    order: Order | None = None
    part: int = 0
    repeat: int = 1
    start: int | None = None
    chunk_rows: tuple[int, ...] | None = None
