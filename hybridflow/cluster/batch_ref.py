"""BatchRef: a batch as the controller sees it: names, row counts, references, never a tensor (architecture, idea 1)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hybridflow.batch import Batch
from hybridflow.cluster.columns import (
    ColumnRef,
    Concat,
    Node,
    Origin,
    Part,
    Picked,
    Restored,
    Taken,
    View,
    parts_of,
    sliced,
)
from hybridflow.cluster.splitting import Piece, Splitting
from hybridflow.cluster.store import Manifest, Reader, write
from hybridflow.columns import Column, names_of
from hybridflow.errors import BatchError, MissingColumnError, WorkerError, nearest
from hybridflow.rows import even_bounds

if TYPE_CHECKING:
    from hybridflow.cluster.future import Future
    from hybridflow.cluster.session import Session


@dataclass(frozen=True, repr=False)
class BatchRef:
    """`rows` rows of named columns that lie wherever they were written.

    Combining, selecting, splitting and repeating rearrange references and return at once; `get` is the only way to
    bring data home. Columns are those of `Batch`.
    """

    rows: int
    column_refs: Mapping[str, ColumnRef]
    session: Session | None = field(default=None, compare=False)
    splitting: Splitting = field(default_factory=Splitting)
    piece: Piece | None = None

    @classmethod
    def from_batch(cls, batch: Batch, session: Session | None = None, number: bool = True) -> BatchRef:
        """Store a batch that this process made. With `number`, rows without `row_id` get 0, 1, 2, ..."""
        if number and "row_id" not in batch:
            batch = batch.with_columns(row_id=torch.arange(batch.rows))
        part = Part(write(batch, True, session.put if session else None), batch.rows, Origin("driver", 0, "from_batch"))
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

    def __getitem__(self, key: str | int | slice | list[str]) -> Any:
        """`ref["rewards"]` is one column as a reference with `.get()`; `ref[2:8]` and `ref[3]` are rows."""
        if isinstance(key, str):
            return OneColumn(self.select(key))
        if isinstance(key, int):
            at = range(self.rows)[key]
            return self._rows(at, at + 1)
        if isinstance(key, list | tuple) and all(isinstance(name, str) for name in key):
            return self.select(*key)
        if not isinstance(key, slice):
            raise BatchError(f"a batch is indexed by a column, columns, a row or a slice of rows, got {key!r}.")
        start, stop, step = key.indices(self.rows)
        if step != 1:
            raise BatchError(f"rows can only be sliced with step 1, got {step}. Use .get() and Batch.reorder.")
        return self._rows(start, max(start, stop))

    def __or__(self, other: BatchRef | Batch | Mapping[str, Any]) -> BatchRef:
        return self.union(other)

    def __ror__(self, other: Batch | Mapping[str, Any]) -> BatchRef:
        return BatchRef.from_batch(_as_batch(other), self.session, number=False).union(self)

    def union(self, other: BatchRef | Batch | Mapping[str, Any]) -> BatchRef:
        """Columns of both, row by row; those of `other` win. Errors: BatchError when row counts differ."""
        if not isinstance(other, BatchRef):
            other = BatchRef.from_batch(_as_batch(other), self.session, number=False)
        if other.rows != self.rows:
            raise BatchError(
                f"cannot unite a batch of {self.rows} rows with one of {other.rows} rows: rows must correspond."
            )
        return replace(self, column_refs={**self.column_refs, **other.column_refs}, piece=None)

    def select(self, *names: str | Sequence[str]) -> BatchRef:
        """Some columns: `select("a", "b")` or `select(["a", "b"])`. Errors: MissingColumnError, with the nearest."""
        wanted = names_of(names)
        for name in wanted:
            if name not in self.column_refs:
                raise MissingColumnError(f"the batch has no column {name!r}.{nearest(name, self.columns)}")
        return replace(self, column_refs={name: self.column_refs[name] for name in wanted})

    def without(self, *names: str | Sequence[str]) -> BatchRef:
        dropped = self.select(*names).columns
        return replace(self, column_refs={n: ref for n, ref in self.column_refs.items() if n not in dropped})

    def rename(self, names: Mapping[str, str] | None = None, **old_to_new: str) -> BatchRef:
        """`rename(old="new")` or `rename({"old": "new"})`. Errors: MissingColumnError, BatchError for a taken name."""
        changes = {**(names or {}), **old_to_new}
        self.select(*changes)
        renamed = [changes.get(name, name) for name in self.columns]
        if len(set(renamed)) < len(renamed):
            twice = next(name for name in renamed if renamed.count(name) > 1)
            raise BatchError(f"rename({changes}): there would be two columns {twice!r}. Drop one with without().")
        return replace(self, column_refs=dict(zip(renamed, self.column_refs.values(), strict=True)))

    def split(
        self, parts: int, *, balance: str | None = None, groups: bool = False, chunks: int | None = None
    ) -> list[BatchRef]:
        """`parts` batches that cover every row once; without options contiguous and even (sizes differ by one).

        `balance` spreads the sum of that column (or the lengths of a ragged one) evenly, `groups=True` never cuts rows
        of one `group_id`, `chunks` splits each of so many row ranges on its own. Inside a call, the operation decides.
        """
        if type(parts) is not int or parts < 1:
            raise BatchError(f"split({parts!r}): must be a whole number of at least 1.")
        splitting = self.splitting
        if balance is not None or groups or chunks is not None:
            refs = self.select(*([balance] if balance else []), *(["group_id"] if groups else [])).column_refs
            splitting = Splitting(
                refs[balance] if balance else None, refs.get("group_id") if groups else None, chunks or 1
            )
        planned = splitting.plan(self.rows, parts, self._timeout)
        if planned is None:
            bounds = even_bounds(self.rows, parts)
            return [replace(self._rows(a, b), piece=Piece(start=a)) for a, b in itertools.pairwise(bounds)]
        order, counts = planned
        return [
            replace(
                self,
                rows=sum(counts[i]),
                column_refs=_mapped(self.column_refs, lambda node, i=i: Picked(node, order, i)),
                piece=Piece(order, i, chunk_rows=tuple(counts[i])),
                splitting=Splitting(),
            )
            for i in range(parts)
        ]

    def balance(self, parts: int, by: str = "num_tokens") -> list[BatchRef]:
        """`split` with the sum of column `by` (or the lengths of a ragged one) spread evenly."""
        return self.split(parts, balance=by)

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
        return replace(self, rows=rows, column_refs=repeated, splitting=Splitting(), piece=None)

    def take(self, rows: Sequence[int]) -> BatchRef:
        """The rows at these positions, in that order, each at most once. Errors: BatchError for others."""
        wanted = np.array(rows, dtype=np.int64) if len(rows) else np.empty(0, np.int64)
        if wanted.ndim != 1 or (len(wanted) and not 0 <= wanted.min() <= wanted.max() < self.rows):
            raise BatchError(f"take: positions must be whole numbers from 0 to {self.rows - 1}, got {list(rows)[:20]}.")
        if len(np.unique(wanted)) < len(wanted):
            raise BatchError("take: a row is named twice. Use repeat(n) to have each row several times.")
        taken = _mapped(self.column_refs, lambda node: Taken(node, wanted))
        return replace(self, rows=len(wanted), column_refs=taken, splitting=Splitting(), piece=None)

    def _rows(self, start: int, stop: int) -> BatchRef:
        refs = _mapped(self.column_refs, lambda node: sliced(node, start, stop, self.rows))
        return replace(self, rows=stop - start, column_refs=refs, splitting=Splitting(), piece=None)

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
        piece = first.piece
        order = piece.order if piece else None
        together = order is not None and [(p.piece.order, p.piece.part) if p.piece else None for p in parts] == [
            (order, i) for i in range(order.plan.parts)
        ]
        if len(parts) == 1 and not together:
            return first
        rows = tuple(part.rows for part in parts)
        joined: dict[tuple[int, ...], Node] = {}
        refs = {}
        for name in names:
            columns = [part.column_refs[name] for part in parts]
            if len({column.stored for column in columns}) > 1:
                raise BatchError(f"column {name!r} had different names in the parts: rename after joining them.")
            nodes = tuple(column.node for column in columns)
            key = tuple(map(id, nodes))
            if key not in joined:
                joined[key] = (
                    Restored(nodes, order, piece.repeat) if together and order and piece else Concat(nodes, rows)
                )
            refs[name] = ColumnRef(columns[0].stored, joined[key], any(column.unique for column in columns))
        return replace(first, rows=sum(rows), column_refs=refs, piece=None)

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
        return BatchRef, (
            self.rows,
            self.column_refs,
            None,
            Splitting(),
            self.piece and Piece(chunk_rows=self.chunk_rows),
        )

    @property
    def span(self) -> tuple[int, int] | None:
        """Where these rows lie in the batch that they were split from, if they are adjacent there."""
        start = self.piece.start if self.piece else None
        return None if start is None else (start, start + self.rows)

    @property
    def chunk_rows(self) -> tuple[int, ...] | None:
        """Rows in each mini-batch, for a part that was split in chunks."""
        return self.piece.chunk_rows if self.piece else None


@dataclass(frozen=True)
class OneColumn:
    """One column of a batch, by reference."""

    batch: BatchRef

    def __len__(self) -> int:
        return len(self.batch)

    def get(self, timeout: float | None = None) -> Column:
        """The column as a Tensor, Ragged or list."""
        return self.batch.get(timeout=timeout)[self.batch.columns[0]]


def _as_batch(value: Any) -> Batch:
    if isinstance(value, Batch):
        return value
    if isinstance(value, Mapping):
        return Batch(value)
    raise BatchError(f"only a batch or a mapping of columns can be united with a batch, got {type(value).__name__}.")


def _mapped(refs: Mapping[str, ColumnRef], change: Any) -> dict[str, ColumnRef]:
    """Apply `change` to every node, keeping nodes that columns share shared."""
    done: dict[int, Node] = {}
    for ref in refs.values():
        if id(ref.node) not in done:
            done[id(ref.node)] = change(ref.node)
    return {name: ColumnRef(ref.stored, done[id(ref.node)], ref.unique) for name, ref in refs.items()}
