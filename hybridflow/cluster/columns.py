"""Where the rows of a column lie: a small expression over stored parts, rearranged without touching data. Pure.

A `Part` is what one rank returned from one call. Splitting, joining, repeating and token balancing only build nodes
over parts; the process that reads a column `locate`s the rows that it wants and fetches the parts that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridflow.model_spec import Cost
from hybridflow.rows import RowPlan

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Origin:
    """Which call on which rank produced something: for error messages."""

    role: str
    rank: int
    method: str


@dataclass(slots=True, eq=False)
class Issued:
    """One call as the driver issued it: `statuses` tell how it went on every rank, collected or not.

    `met` says that the driver was told of its failure; `reported` holds the ids of the errors that it was told, and is
    shared by all calls of a session (a call fails with the error of the one before it).
    """

    statuses: list[Part]
    reported: set[str]
    met: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The stored output of one rank: `ref` refers to its manifest, or is the manifest where the driver made it.

    `rows` is None until its call has finished. `call` stays on the driver: the call that writes it.
    """

    ref: Any
    rows: int | None
    origin: Origin
    call: Issued | None = None

    def __reduce__(self):
        return Part, (self.ref, self.rows, self.origin)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Rows `start:stop` of `source` after repeating each of its rows `repeat` times (adjacent)."""

    source: Node
    start: int
    stop: int
    repeat: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Concat:
    """Rows of all nodes, one after the other; `rows[i]` of node i."""

    nodes: tuple[Node, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A row plan whose assignment may depend on data: `weights` and `groups` are columns, read where it is needed.

    With a `cost`, `weights` are the tokens that it is a function of."""

    plan: RowPlan
    weights: ColumnRef | None = None
    groups: ColumnRef | None = None
    key: int = 0
    cost: Cost | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Picked:
    """The rows that `order` assigns to part `index`."""

    source: Node
    order: Order
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """Rows computed in the parts of `order`, back in the order that they had before it; `repeat` rows from each."""

    nodes: tuple[Node, ...]
    order: Order
    repeat: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """The rows `rows` of `source`, in that order."""

    source: Node
    rows: Index


Node = Part | View | Concat | Picked | Restored | Taken


@dataclass(frozen=True, slots=True, eq=False)
class ColumnRef:
    """Column `stored` of the parts below `node`. `unique` numbers repeated rows apart (row_id)."""

    stored: str
    node: Node
    unique: bool = False


@dataclass(slots=True)
class Located:
    """For each wanted row: which of `parts` holds it, at which row, and which `copy` of its `repeats` it is."""

    parts: list[Part]
    part: Index
    row: Index
    repeats: Index
    copy: Index

    def runs(self) -> list[tuple[int, int, int]]:
        """(part, start, stop) of maximal stretches of adjacent rows, in the wanted order."""
        if not len(self.row):
            return []
        breaks = np.flatnonzero((np.diff(self.row) != 1) | (np.diff(self.part) != 0)) + 1
        starts = np.concatenate([[0], breaks])
        stops = np.concatenate([breaks, [len(self.row)]])
        return [
            (int(self.part[a]), int(self.row[a]), int(self.row[b - 1]) + 1) for a, b in zip(starts, stops, strict=True)
        ]


def stretches(node: Node, start: int = 0, stop: int | None = None) -> list[tuple[Part, int, int]] | None:
    """(part, start, stop) of the rows of a node, where that follows from its form alone; None where it does not."""
    if isinstance(node, Part):
        last = node.rows if stop is None else stop
        return None if last is None else [(node, start, last)]
    if isinstance(node, View) and node.repeat == 1:
        return stretches(node.source, node.start + start, node.stop if stop is None else node.start + stop)
    if not isinstance(node, Concat):
        return None
    out: list[tuple[Part, int, int]] = []
    at, end = 0, sum(node.rows) if stop is None else stop
    for child, rows in zip(node.nodes, node.rows, strict=True):
        first, last = max(start - at, 0), min(end - at, rows)
        if first < last:
            if (found := stretches(child, first, last)) is None:
                return None
            out += found
        at += rows
    return out or None


def parts_of(nodes: Iterable[Node]) -> Iterator[Part]:
    """Every part below the nodes; one that several hold may come several times."""
    for node in nodes:
        if isinstance(node, Part):
            yield node
        else:
            yield from parts_of(node.nodes if isinstance(node, Concat | Restored) else (node.source,))


Assign = Callable[[Order], Sequence[Index]]
"""Gives the rows of every part of an order; the caller reads the data that this takes."""


def locate(node: Node, assign: Assign, want: Index | None = None) -> Located:
    """Where the wanted rows of `node` lie (all rows when `want` is omitted)."""
    if isinstance(node, Part):
        want = np.arange(node.rows or 0) if want is None else want
        zeros = np.zeros(len(want), np.int64)
        return Located([node], zeros, want, np.ones_like(zeros), zeros)
    if isinstance(node, View):
        expanded = np.arange(node.start, node.stop) if want is None else want + node.start
        if node.repeat == 1:
            return locate(node.source, assign, expanded)
        base, copy = np.divmod(expanded, node.repeat)
        found = locate(node.source, assign, base)
        return Located(found.parts, found.part, found.row, found.repeats * node.repeat, found.copy * node.repeat + copy)
    if isinstance(node, Picked):
        rows = assign(node.order)[node.index]
        return locate(node.source, assign, rows if want is None else rows[want])
    if isinstance(node, Taken):
        return locate(node.source, assign, node.rows if want is None else node.rows[want])
    if isinstance(node, Restored):
        assigned = assign(node.order)
        inverse = np.empty(node.order.plan.rows, np.int64)
        inverse[np.concatenate(assigned)] = np.arange(node.order.plan.rows)
        counts = tuple(len(rows) * node.repeat for rows in assigned)
        want = np.arange(node.order.plan.rows * node.repeat) if want is None else want
        base, copy = np.divmod(want, node.repeat)
        return locate(Concat(node.nodes, counts), assign, inverse[base] * node.repeat + copy)
    return _locate_in_concat(node, assign, want)


def _locate_in_concat(node: Concat, assign: Assign, want: Index | None) -> Located:
    bounds = np.cumsum((0, *node.rows))
    want = np.arange(bounds[-1]) if want is None else want
    which = np.searchsorted(bounds, want, side="right") - 1
    parts: list[Part] = []
    out = Located(parts, *(np.empty_like(want) for _ in range(4)))
    for i in np.unique(which) if len(want) else (0,):  # no rows still have a type, which some part knows
        mine = np.flatnonzero(which == i)
        found = locate(node.nodes[i], assign, want[mine] - bounds[i])
        out.part[mine], out.row[mine] = found.part + len(parts), found.row
        out.repeats[mine], out.copy[mine] = found.repeats, found.copy
        parts.extend(found.parts)
    return out


def sliced(node: Node, start: int, stop: int, rows: int) -> Node:
    """Rows start:stop of a node of `rows` rows, without piling up views."""
    if start == 0 and stop == rows:
        return node
    if isinstance(node, View):
        return View(node.source, node.start + start, node.start + stop, node.repeat)
    if isinstance(node, Concat):
        kept, at = [], 0
        for child, count in zip(node.nodes, node.rows, strict=True):
            a, b = max(start - at, 0), min(stop - at, count)
            if a < b:
                kept.append((sliced(child, a, b, count), b - a))
            at += count
        if len(kept) == 1:
            return kept[0][0]
        if kept:
            return Concat(tuple(child for child, _ in kept), tuple(count for _, count in kept))
    return View(node, start, stop)
