"""Row references: the location of a column's rows as a small expression over rank outputs.

Pure. A `RankOutput` is the result of one rank in one call. Splitting, joining, repeating and selecting build nodes over
outputs; the process that reads a column `locate`s its rows and fetches the outputs that hold them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.batch.row_split import RowPlan
from hybridflow.errors import rank_at
from hybridflow.models.spec import Cost

Index = NDArray[np.int64]
_KEYS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """The call and rank that produced an output, for error messages; `node` and `step` as in a WorkerError."""

    role: str
    rank: int
    method: str
    node: str = ""
    step: int | None = None

    def __str__(self) -> str:
        return f"{self.role}.{self.method} on {self.at}"

    @property
    def at(self) -> str:
        """The rank, where it runs, and the step."""
        return rank_at(self.rank, self.node, self.step)


@dataclass(slots=True, eq=False)
class IssuedCall:
    """One call that the driver issued; `statuses` are the outcomes on all ranks, collected or not.

    `observed`: the driver has raised its failure. `incidents` are those of the session (`incidents.Incidents`).
    `timeout` bounds a wait for its results, in seconds. A trace notes with `on_read` that the driver reads them.
    `weights` identifies the weights that all of its results are of, where the driver knows (`WorkerGroup.weights`).
    `inputs` are the calls whose results it reads, by id, until it was waited for.
    """

    statuses: list[RankOutput]
    incidents: Any
    timeout: float
    observed: bool = False
    on_read: Callable[[IssuedCall], None] | None = None
    weights: object = None
    inputs: dict[int, IssuedCall] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class RankOutput:
    """The result of one rank: `ref` refers to its manifest, or is the manifest of a batch from the driver.

    `rows` is None until its call has finished. Two fields stay on the driver: `call`, the call that writes it, and
    `address`, a reference to the address of that process's `LivenessServer` (`liveness.py`).
    """

    ref: Any
    rows: int | None
    origin: CallOrigin
    call: IssuedCall | None = None
    address: Any = None

    def __reduce__(self):
        return RankOutput, (self.ref, self.rows, self.origin)

    @property
    def sent_ref(self) -> Any:
        """`ref`; None while the call is not sent."""
        return self.ref

    def note_read(self) -> None:
        if self.call is not None and self.call.on_read is not None:
            self.call.on_read(self.call)


@dataclass(frozen=True, slots=True)
class SplitSpec:
    """How `rows` rows are split over `parts` parts; processes cache the result by `key`.

    `weights` (tokens per row), or their `cost`, are spread evenly, rows of one of `groups` stay together, and each of
    `chunks` row ranges is split separately. The process that needs a part reads these columns.
    """

    weights: ColumnRef | None = field(default=None, compare=False)
    groups: ColumnRef | None = field(default=None, compare=False)
    chunks: int = field(default=1, compare=False)
    cost: Cost | None = field(default=None, compare=False)
    rows: int = 0
    parts: int = 1
    key: int = field(default_factory=_KEYS.__next__)

    def over(self, rows: int, parts: int) -> SplitSpec:
        return replace(self, rows=rows, parts=parts, weights=self.weights if parts > 1 else None)

    @property
    def contiguous(self) -> bool:
        """Whether every part is one even range of rows."""
        return self.weights is None and self.groups is None and self.chunks == 1

    @property
    def plan(self) -> RowPlan:
        return RowPlan(self.rows, self.parts, self.chunks)


@dataclass(frozen=True, slots=True)
class SplitPart:
    """A row selection: the rows that `split` gives to part `index`, `chunk_rows` of them in each mini-batch."""

    split: SplitSpec
    index: int
    chunk_rows: tuple[int, ...] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Unpermute:
    """A row selection that undoes `split`: rows lie part after part, `each` of them per row of the split, and return to
    their original order."""

    split: SplitSpec
    each: int = 1


RowSelection = range | Index | SplitPart | Unpermute


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """The rows `rows` of `source`, after repeating each of its rows `repeat` times (adjacent)."""

    source: Node
    rows: RowSelection
    repeat: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Concat:
    """Rows of all nodes concatenated; `rows[i]` of node i."""

    nodes: tuple[Node, ...]
    rows: tuple[int, ...]


Node = RankOutput | Gather | Concat


@dataclass(frozen=True, slots=True, eq=False)
class ColumnRef:
    """Column `stored` of the outputs below `node`. `unique` gives repeated rows different numbers (row_id)."""

    stored: str
    node: Node
    unique: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RankRows:
    """One rank's rows in a call, by reference, as sent to its host."""

    rows: int
    columns: Mapping[str, ColumnRef]
    chunk_rows: tuple[int, ...] | None = None


@dataclass
class Located:
    """For each wanted row: the output that holds it, its row there, and which `copy` of its `repeats` it is."""

    outputs: list[RankOutput]
    which: Index
    row: Index
    repeats: Index
    copy: Index

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """(output, start, stop) of maximal stretches of adjacent rows, in the wanted order."""
        if not len(self.row):
            return []
        breaks = np.flatnonzero((np.diff(self.row) != 1) | (np.diff(self.which) != 0)) + 1
        starts = np.concatenate([[0], breaks])
        stops = np.concatenate([breaks, [len(self.row)]])
        return [
            (int(self.which[a]), int(self.row[a]), int(self.row[b - 1]) + 1) for a, b in zip(starts, stops, strict=True)
        ]


class Stretches(NamedTuple):
    """Wanted rows that lie side by side: `runs` as in `Located`, without an entry for each row."""

    outputs: list[RankOutput]
    runs: list[tuple[int, int, int]]


def stretches(node: Node, rows: int) -> Stretches | None:
    """All `rows` rows of `node`; None where they are chosen one by one, or the node has no row."""
    numbers, runs = dict[int, int](), list[tuple[int, int, int]]()
    found = list(_stretches(node, 0, rows))
    if not found or any(one is None for one in found):
        return None
    for output, start, stop in found:  # type: ignore[misc]
        which = numbers.setdefault(id(output), len(numbers))
        if runs and runs[-1][0] == which and runs[-1][2] == start:
            runs[-1] = which, runs[-1][1], stop
        else:
            runs.append((which, start, stop))
    return Stretches(list({id(one[0]): one[0] for one in found if one}.values()), runs)


def _stretches(node: Node, start: int, stop: int) -> Iterator[tuple[RankOutput, int, int] | None]:
    if isinstance(node, RankOutput):
        if start < stop:
            yield node, start, stop
    elif isinstance(node, Concat):
        for child, a, b, _ in _overlaps(node, start, stop):
            yield from _stretches(child, a, b)
    elif isinstance(node.rows, range) and node.rows.step == 1 and node.repeat == 1:
        yield from _stretches(node.source, node.rows.start + start, node.rows.start + stop)
    else:
        yield None


def _overlaps(node: Concat, start: int, stop: int) -> Iterator[tuple[Node, int, int, int]]:
    """(child, start, stop, total rows) for the children that hold rows start:stop."""
    ends = list(itertools.accumulate(node.rows))
    for i in range(bisect_right(ends, start), bisect_left(ends, stop) + 1):
        if i < len(ends) and (rows := node.rows[i]):
            at = ends[i] - rows
            yield node.nodes[i], max(start - at, 0), min(stop - at, rows), rows


def outputs_of(nodes: Iterable[Node]) -> Iterator[RankOutput]:
    """Every output below the nodes, possibly several times."""
    for node in nodes:
        if isinstance(node, RankOutput):
            yield node
        else:
            yield from outputs_of(node.nodes if isinstance(node, Concat) else (node.source,))


Assign = Callable[[SplitSpec], Sequence[Index]]
"""Returns the rows of every part of a split; reads the data that this needs."""


def locate(node: Node, assign: Assign, want: Index | None = None) -> Located:
    """The locations of the wanted rows of `node` (default: all)."""
    if isinstance(node, RankOutput):
        want = np.arange(node.rows or 0) if want is None else want
        zeros = np.zeros(len(want), np.int64)
        return Located([node], zeros, want, np.ones_like(zeros), zeros)
    if isinstance(node, Concat):
        return _locate_in_concat(node, assign, want)
    rows = _selected(node.rows, assign)
    rows = rows if want is None else rows[want]
    if node.repeat == 1:
        return locate(node.source, assign, rows)
    base, copy = np.divmod(rows, node.repeat)
    found = locate(node.source, assign, base)
    return Located(found.outputs, found.which, found.row, found.repeats * node.repeat, found.copy * node.repeat + copy)


def _selected(rows: RowSelection, assign: Assign) -> Index:
    if isinstance(rows, range):
        return np.arange(rows.start, rows.stop)
    if isinstance(rows, SplitPart):
        return assign(rows.split)[rows.index]
    if isinstance(rows, Unpermute):
        inverse = np.argsort(np.concatenate(assign(rows.split)))
        return (inverse[:, None] * rows.each + np.arange(rows.each)).ravel()
    return rows


def _locate_in_concat(node: Concat, assign: Assign, want: Index | None) -> Located:
    bounds = np.cumsum((0, *node.rows))
    want = np.arange(bounds[-1]) if want is None else want
    if not len(want):  # an empty column still needs the type from an output
        return locate(node.nodes[0], assign, want)
    child_of = np.searchsorted(bounds, want, side="right") - 1
    order = np.argsort(child_of, kind="stable")
    children, starts = np.unique(child_of[order], return_index=True)
    outputs: list[RankOutput] = []
    out = Located(outputs, *(np.empty_like(want) for _ in range(4)))
    for i, mine in zip(children, np.split(order, starts[1:]), strict=True):
        found = locate(node.nodes[i], assign, want[mine] - bounds[i])
        out.which[mine], out.row[mine] = found.which + len(outputs), found.row
        out.repeats[mine], out.copy[mine] = found.repeats, found.copy
        outputs.extend(found.outputs)
    return out


def sliced(node: Node, start: int, stop: int, rows: int) -> Node:
    """Rows start:stop of a node of `rows` rows, merged with its own selection."""
    if start == 0 and stop == rows:
        return node
    if isinstance(node, Gather) and isinstance(node.rows, range):
        return Gather(node.source, node.rows[start:stop], node.repeat)
    if isinstance(node, Concat):
        kept = [(sliced(child, a, b, count), b - a) for child, a, b, count in _overlaps(node, start, stop)]
        if len(kept) == 1:
            return kept[0][0]
        if kept:
            return Concat(tuple(child for child, _ in kept), tuple(count for _, count in kept))
    return Gather(node, range(start, stop))
