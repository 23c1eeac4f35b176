"""BatchRef: a batch as the controller sees it: names, row counts, references, never a tensor (architecture, idea 1)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hybridflow.batch import Batch
from hybridflow.cluster.columns import (
    ColumnRef,
    Concat,
    Node,
    Order,
    Origin,
    Part,
    Picked,
    Restored,
    View,
    parts_of,
    sliced,
)
from hybridflow.cluster.store import Manifest, Reader, write
from hybridflow.columns import Column
from hybridflow.errors import BatchError, MissingColumnError, WorkerError, nearest
from hybridflow.rows import RowPlan

if TYPE_CHECKING:
    from hybridflow.cluster.future import Future
    from hybridflow.cluster.session import Session

_ORDER_KEYS = itertools.count(1)


@dataclass(frozen=True)
class Splitting:
    """How an operation wants its rows split; `BatchRef.split` obeys it."""

    balance: str | None = None
    groups: bool = False
    chunks: int = 1


@dataclass(frozen=True, repr=False)
class BatchRef:
    """`rows` rows of named columns that lie wherever they were written.

    Combining, selecting, splitting and repeating rearrange references and return at once; `get` is the only way to
    bring data home. Columns are those of `Batch`.
    """

    rows: int
    column_refs: Mapping[str, ColumnRef] = field(repr=False)
    session: Session | None = field(default=None, repr=False, compare=False)
    splitting: Splitting = field(default=Splitting(), repr=False)
    order: Order | None = field(default=None, repr=False)
    part: int = field(default=0, repr=False)
    chunk_rows: tuple[int, ...] | None = field(default=None, repr=False)

    @classmethod
    def from_batch(cls, batch: Batch, session: Session | None = None) -> BatchRef:
        """Store a batch that this process made."""
        part = Part(write(batch, on_driver=True), batch.rows, Origin("driver", 0, "from_batch"))
        return cls(batch.rows, {name: ColumnRef(name, part) for name in batch.columns}, session)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.column_refs)

    @property
    def stored_part(self) -> Part:
        """The part that holds all columns of what one rank has just returned."""
        node = next(iter(self.column_refs.values())).node
        assert isinstance(node, Part)
        return node

    @property
    def may_fail(self) -> bool:
        """Whether any of it comes from a call (what the driver stored itself is there)."""
        nodes = {id(ref.node): ref.node for ref in self.column_refs.values()}
        return any(not isinstance(part.ref, Manifest) for part in parts_of(nodes.values()))

    def __repr__(self) -> str:
        return f"BatchRef({self.rows} rows by reference: {', '.join(self.columns)})"

    def __len__(self) -> int:
        return self.rows

    def __contains__(self, name: object) -> bool:
        return name in self.column_refs

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a BatchRef holds references: iterate over .get(), or over .columns for the names.")

    def __getitem__(self, key: str | slice) -> Any:
        """`ref["rewards"]` is one column as a reference with `.get()`; `ref[2:8]` are rows."""
        if isinstance(key, str):
            return OneColumn(self.select(key))
        start, stop, step = key.indices(self.rows)
        if step != 1:
            raise BatchError(f"rows can only be sliced with step 1, got {step}. Use .get() and Batch.reorder.")
        return self._rows(start, max(start, stop))

    def __or__(self, other: BatchRef | Batch) -> BatchRef:
        return self.union(other)

    def union(self, other: BatchRef | Batch) -> BatchRef:
        """Columns of both, row by row; those of `other` win. Errors: BatchError when row counts differ."""
        if isinstance(other, Batch):
            other = BatchRef.from_batch(other, self.session)
        if not isinstance(other, BatchRef):
            raise BatchError(f"only another batch can be united with a batch, got {type(other).__name__}.")
        if other.rows != self.rows:
            raise BatchError(
                f"cannot unite a batch of {self.rows} rows with one of {other.rows} rows: rows must correspond."
            )
        refs = {**self.column_refs, **other.column_refs}
        return replace(self, column_refs=refs, splitting=Splitting(), order=None, chunk_rows=None)

    def select(self, *names: str) -> BatchRef:
        for name in names:
            if name not in self.column_refs:
                raise MissingColumnError(f"the batch has no column {name!r}.{nearest(name, self.columns)}")
        return replace(self, column_refs={name: self.column_refs[name] for name in names})

    def without(self, *names: str) -> BatchRef:
        self.select(*names)
        return replace(self, column_refs={n: ref for n, ref in self.column_refs.items() if n not in names})

    def rename(self, **old_to_new: str) -> BatchRef:
        self.select(*old_to_new)
        return replace(self, column_refs={old_to_new.get(n, n): ref for n, ref in self.column_refs.items()})

    def split(self, parts: int, **how: Any) -> list[BatchRef]:
        """`parts` batches that cover every row once; without options contiguous and even (sizes differ by one).

        Options (`Splitting`): `balance` spreads the sum of that column (or the lengths of a ragged one) evenly,
        `groups=True` never cuts rows of one `group_id`, `chunks` splits each of so many row ranges on its own.
        """
        splitting = replace(self.splitting, **how)
        balance = splitting.balance if splitting.balance in self.column_refs and parts > 1 else None
        grouped = splitting.groups and "group_id" in self.column_refs
        plan = RowPlan(self.rows, parts, splitting.chunks)
        counts = plan.counts()
        if not balance and not grouped and splitting.chunks == 1:
            starts = list(itertools.accumulate((c[0] for c in counts), initial=0))
            return [self._rows(a, b) for a, b in itertools.pairwise(starts)]
        order = Order(
            plan,
            self.column_refs[balance] if balance else None,
            self.column_refs["group_id"] if grouped else None,
            next(_ORDER_KEYS),
        )
        if grouped:
            counts = self._grouped_counts(order)
        return [
            replace(
                self,
                rows=sum(counts[i]),
                column_refs=_mapped(self.column_refs, lambda node, i=i: _picked(node, order, i)),
                order=order,
                part=i,
                chunk_rows=tuple(counts[i]),
                splitting=Splitting(),
            )
            for i in range(parts)
        ]

    def _grouped_counts(self, order: Order) -> list[list[int]]:
        """Group boundaries are data: reads the two small columns (a call that waits)."""
        return [[len(chunk) for chunk in part] for part in Reader(self._timeout).assignment(order)]

    def repeat(self, n: int) -> BatchRef:
        """Each row n times, adjacent. `group_id` becomes the old row_id (unless it is there), row_id row_id*n + k."""
        if type(n) is not int or n < 1:
            raise BatchError(f"repeat({n!r}): must be a whole number of at least 1.")
        rows = self.rows * n
        repeated = _mapped(self.column_refs, lambda node: View(node, 0, rows, n) if n > 1 else node)
        if "row_id" in repeated:
            row_id = repeated["row_id"]
            repeated.setdefault("group_id", replace(row_id, unique=False))
            repeated["row_id"] = replace(row_id, unique=True)
        return replace(self, rows=rows, column_refs=repeated, splitting=Splitting(), order=None, chunk_rows=None)

    def _rows(self, start: int, stop: int) -> BatchRef:
        refs = _mapped(self.column_refs, lambda node: sliced(node, start, stop, self.rows))
        return replace(self, rows=stop - start, column_refs=refs, splitting=Splitting(), chunk_rows=None)

    @staticmethod
    def concat(parts: Sequence[BatchRef]) -> BatchRef:
        """Rows of all parts, one after the other; the parts of one balanced split come back in their old order."""
        if not parts:
            raise BatchError("BatchRef.concat needs at least one batch.")
        first = parts[0]
        names = first.columns
        for part in parts:
            if set(part.columns) != set(names):
                raise BatchError(f"cannot join batches with columns {sorted(names)} and {sorted(part.columns)}.")
        order = first.order
        together = order is not None and [(p.order, p.part) for p in parts] == [
            (order, i) for i in range(order.plan.parts)
        ]
        if len(parts) == 1 and not together:
            return first
        rows = tuple(part.rows for part in parts)
        joined: dict[tuple[int, ...], Node] = {}
        refs = {}
        for name in names:
            nodes = tuple(part.column_refs[name].node for part in parts)
            key = tuple(map(id, nodes))
            if key not in joined:
                joined[key] = Restored(nodes, order) if together and order else Concat(nodes, rows)
            unique = any(part.column_refs[name].unique for part in parts)
            refs[name] = ColumnRef(first.column_refs[name].stored, joined[key], unique)
        return replace(first, rows=sum(rows), column_refs=refs, order=None, part=0, chunk_rows=None)

    @property
    def _timeout(self) -> float:
        return self.session.deadlines.peers if self.session else 600.0

    def get(self, columns: str | Sequence[str] | None = None, timeout: float | None = None) -> Batch:
        """Bring the batch (or some columns) home; waits for the calls that write them.

        Errors: WorkerError of the call that failed, WaitTimeoutError after `timeout` seconds.
        """
        names = self.columns if columns is None else (columns,) if isinstance(columns, str) else tuple(columns)
        reader = Reader(self._timeout if timeout is None else timeout)
        try:
            return reader.read(self.select(*names).column_refs)
        except WorkerError as error:
            raise error.as_cause() from None

    def metrics(self) -> Future:
        """Figures of rewards, lengths, KL, drift and advantages, computed on the helper process; a future."""
        if self.session is None:
            raise BatchError("this batch belongs to no session: metrics() needs the driver's batch.")
        return self.session.helper.batch_metrics(self)

    def __reduce__(self):
        return _rebuild, (self.rows, self.column_refs, self.chunk_rows)


@dataclass(frozen=True)
class OneColumn:
    """One column of a batch, by reference."""

    batch: BatchRef

    def __len__(self) -> int:
        return len(self.batch)

    def get(self, timeout: float | None = None) -> Column:
        """The column as a Tensor, Ragged or list."""
        return self.batch.get(timeout=timeout)[self.batch.columns[0]]


def _rebuild(rows, column_refs, chunk_rows) -> BatchRef:
    return BatchRef(rows, column_refs, chunk_rows=chunk_rows)


def _mapped(refs: Mapping[str, ColumnRef], change: Any) -> dict[str, ColumnRef]:
    """Apply `change` to every node, keeping nodes that columns share shared."""
    done: dict[int, Node] = {}
    for ref in refs.values():
        if id(ref.node) not in done:
            done[id(ref.node)] = change(ref.node)
    return {name: ColumnRef(ref.stored, done[id(ref.node)], ref.unique) for name, ref in refs.items()}


def _picked(node: Node, order: Order, index: int) -> Node:
    return Picked(node, order, index)
