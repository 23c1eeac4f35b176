"""BatchRef: a batch as the controller sees it: names, row counts, references, never a tensor (architecture, idea 1)."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
import torch

from hybridflow.batch import markup
from hybridflow.batch.batch import Batch, id_offsets, repeats, selected_rows
from hybridflow.batch.columns import Column, check_known, names_of, renamed
from hybridflow.batch.row_split import even_bounds
from hybridflow.cluster.future import Future, calls_of, fetch, look_at
from hybridflow.cluster.row_refs import (
    CallOrigin,
    ColumnRef,
    Concat,
    Gather,
    Node,
    RankOutput,
    RankRows,
    SplitPart,
    SplitSpec,
    Unpermute,
    outputs_of,
    sliced,
)
from hybridflow.cluster.session import Session
from hybridflow.cluster.store import Manifest, Reader, write
from hybridflow.errors import BatchError, WorkerError


@dataclass(frozen=True, repr=False)
class BatchRef:
    """`rows` rows of named columns that stay in the processes that wrote them.

    Combining, selecting, splitting and repeating rearrange references and return at once; only `get` brings data to the
    driver. Columns are those of `Batch`. `split_spec` is the default of `split`, `part` the part of a split that these
    rows are.
    """

    rows: int
    column_refs: Mapping[str, ColumnRef]
    split_spec: SplitSpec = field(default_factory=SplitSpec, compare=False)
    part: SplitPart | None = None

    @classmethod
    def from_batch(cls, batch: Batch, *, number: bool = True) -> BatchRef:
        """Store a batch that this process made. With `number`, rows without `row_id` get 0, 1, 2, ..."""
        if number and "row_id" not in batch:
            batch = batch.with_columns(row_id=torch.arange(batch.rows))
        output = RankOutput(write(batch, on_driver=True), batch.rows, CallOrigin("driver", 0, "from_batch"))
        return cls.of_output(output, batch.columns)

    @classmethod
    def of_output(cls, output: RankOutput, columns: Sequence[str], part: SplitPart | None = None) -> BatchRef:
        """The columns of one rank's output for the rows of `part`."""
        return cls(output.rows or 0, {name: ColumnRef(name, output) for name in columns}, part=part)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.column_refs)

    @property
    def may_fail(self) -> bool:
        """Whether any column comes from a call rather than from the driver."""
        nodes = {id(ref.node): ref.node for ref in self.column_refs.values()}
        return any(not isinstance(output.ref, Manifest) for output in outputs_of(nodes.values()))

    def to_rank(self) -> RankRows:
        """The rows in the form that is sent to a rank's host."""
        return RankRows(self.rows, self.column_refs, self.part and self.part.chunk_rows)

    @property
    def span(self) -> tuple[int, int] | None:
        """The rows' range in the batch that they were split from, if they are adjacent there."""
        if self.part is None or not (split := self.part.split).contiguous:
            return None
        start, stop = even_bounds(split.rows, split.parts)[self.part.index : self.part.index + 2]
        return start, stop

    def __repr__(self) -> str:
        return f"BatchRef({self.rows} rows by reference: {', '.join(self.columns)})"

    def _repr_html_(self) -> str:
        title = f"BatchRef: {self.rows} rows by reference; .get() brings them here"
        found: dict[int, tuple[str, str]] = {}  # columns share nodes
        for ref in self.column_refs.values():
            if id(ref.node) not in found:
                outputs = list(dict.fromkeys(outputs_of([ref.node])))
                found[id(ref.node)] = calls_of(outputs), look_at(outputs)[0]
        rows = [(name, *found[id(ref.node)]) for name, ref in self.column_refs.items()]
        return markup.table(title, ("column", "written by", "state"), rows)

    def __len__(self) -> int:
        return self.rows

    def __contains__(self, name: object) -> bool:
        return name in self.column_refs

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a BatchRef holds references: iterate over .get(), or over .columns for the names.")

    def __getitem__(self, key: Any) -> Any:
        """`ref["rewards"]` is one column as a reference with `.get()`; `ref[["prompt", "rewards"]]` are columns.

        `ref[3]`, `ref[2:8]`, `ref[[0, 2]]` and `ref[mask]` are rows by reference, as of a `Batch`; only a mask that is
        a column (`ref[ref["finished"]]`) is waited for.
        """
        if isinstance(key, str):
            return OneColumn(self.select(key))
        if isinstance(key, list | tuple) and any(isinstance(name, str) for name in key):
            return self.select(*key)
        picked = selected_rows(key.get() if isinstance(key, OneColumn) else key, self.rows)
        if isinstance(picked, range):
            return self._slice(picked.start, picked.stop)
        return self._gathered(len(picked), picked.numpy())

    def __or__(self, other: BatchRef | Batch | Mapping[str, Any]) -> BatchRef:
        return self.union(other)

    def __ror__(self, other: Batch | Mapping[str, Any]) -> BatchRef:
        return _as_ref(other).union(self)

    def union(self, other: BatchRef | Batch | Mapping[str, Any]) -> BatchRef:
        """Columns of both, row by row; those of `other` win. Errors: BatchError when row counts differ."""
        other = _as_ref(other)
        if other.rows != self.rows:
            raise BatchError(
                f"cannot unite a batch of {self.rows} rows with one of {other.rows} rows: rows must correspond."
            )
        return replace(self, column_refs={**self.column_refs, **other.column_refs}, part=None)

    def select(self, *names: str | Sequence[str]) -> BatchRef:
        """Some columns: `select("a", "b")` or `select(["a", "b"])`. Errors: MissingColumnError, with the nearest."""
        wanted = names_of(names)
        check_known(wanted, self.column_refs)
        return replace(self, column_refs={name: self.column_refs[name] for name in wanted})

    def without(self, *names: str | Sequence[str]) -> BatchRef:
        dropped = self.select(*names).columns
        return replace(self, column_refs={n: ref for n, ref in self.column_refs.items() if n not in dropped})

    def rename(self, names: Mapping[str, str] | None = None, **old_to_new: str) -> BatchRef:
        """`rename(old="new")` or `rename({"old": "new"})`. Errors: MissingColumnError, BatchError for a taken name."""
        new = renamed(self.column_refs, {**(names or {}), **old_to_new})
        return replace(self, column_refs={new[old]: ref for old, ref in self.column_refs.items()})

    def split(
        self, parts: int, *, balance: str | None = None, groups: bool = False, chunks: int | None = None
    ) -> list[BatchRef]:
        """`parts` batches that cover every row once; without options contiguous and even (sizes differ by one).

        `balance` spreads the sum of that column (or the lengths of a ragged one) evenly, `groups=True` keeps rows of
        one `group_id` together, `chunks` splits each of n row ranges separately. In a call, the operation decides.
        """
        if type(parts) is not int or parts < 1:
            raise BatchError(f"split({parts!r}): must be a whole number of at least 1.")
        spec = self.split_spec
        if balance is not None or groups or chunks is not None:
            refs = self.select(*([balance] if balance else []), *(["group_id"] if groups else [])).column_refs
            spec = SplitSpec(refs[balance] if balance else None, refs.get("group_id") if groups else None, chunks or 1)
        split = spec.over(self.rows, parts)
        if split.contiguous:
            bounds = itertools.pairwise(even_bounds(self.rows, parts))
            return [replace(self._slice(a, b), part=SplitPart(split, i)) for i, (a, b) in enumerate(bounds)]
        counts = split.plan.counts()
        if split.groups is not None:  # group boundaries are data, so this waits
            counts = [[len(chunk) for chunk in part] for part in Reader().assignment(split)]
        cut = [SplitPart(split, i, tuple(chunk_rows)) for i, chunk_rows in enumerate(counts)]
        return [replace(self._gathered(sum(part.chunk_rows or ()), part), part=part) for part in cut]

    def balance(self, parts: int, by: str = "num_tokens") -> list[BatchRef]:
        """`split` with the sum of column `by` (or the lengths of a ragged one) spread evenly."""
        return self.split(parts, balance=by)

    def repeat(self, n: int | Sequence[int]) -> BatchRef:
        """Each row n times, adjacent. `group_id` becomes the old row_id (unless it is there), row_id row_id*n + k.

        With a list each row has its own number of copies, n is the largest, and the driver reads `row_id`."""
        if type(n) is not int or n < 1:
            index, copy, most = repeats(n, self.rows)
            copies = self._gathered(len(index), index.numpy())
            if "row_id" not in self:
                return copies
            row_id = torch.as_tensor(self.get("row_id").peek("row_id"))[index]
            groups = {} if "group_id" in self else {"group_id": row_id}
            return copies | Batch({"row_id": row_id * most + copy, **groups})
        repeated = self._gathered(self.rows * n, range(self.rows * n), n) if n > 1 else self._new_rows(self.rows)
        refs = dict(repeated.column_refs)
        if "row_id" in refs:
            refs.setdefault("group_id", replace(refs["row_id"], unique=False))
            refs["row_id"] = replace(refs["row_id"], unique=True)
        return replace(repeated, column_refs=refs)

    def apart(self) -> BatchRef:
        """Rows that have one `row_id` get different ones, where the driver knows them; they stay one group."""
        if not _on_driver(self, "row_id") or "trajectory_id" in self:
            return self
        row_id = torch.as_tensor(self.get("row_id").peek("row_id"))
        if len(row_id.unique()) == len(row_id):
            return self
        offsets = id_offsets(row_id[:, None].unbind())
        groups = {} if "group_id" in self else {"group_id": row_id}
        return self | Batch({"row_id": row_id + torch.tensor(offsets), **groups})

    def take(self, rows: Sequence[int]) -> BatchRef:
        """The rows at these positions, in this order, each at most once. Errors: BatchError for other positions."""
        wanted = np.array(rows, dtype=np.int64) if len(rows) else np.empty(0, np.int64)
        if wanted.ndim != 1 or (len(wanted) and not 0 <= wanted.min() <= wanted.max() < self.rows):
            raise BatchError(f"take: positions must be whole numbers from 0 to {self.rows - 1}, got {list(rows)[:20]}.")
        if len(np.unique(wanted)) < len(wanted):
            raise BatchError("take: a row is named twice. Use repeat(n) to have each row several times.")
        return self._gathered(len(wanted), wanted)

    def _slice(self, start: int, stop: int) -> BatchRef:
        return self._new_rows(stop - start, lambda node: sliced(node, start, stop, self.rows))

    def _gathered(self, rows: int, selection: Any, repeat: int = 1) -> BatchRef:
        return self._new_rows(rows, lambda node: Gather(node, selection, repeat))

    def _new_rows(self, rows: int, change: Callable[[Node], Node] = lambda node: node) -> BatchRef:
        """`change` applied once to every node; columns keep sharing nodes."""
        done: dict[int, Node] = {}
        for ref in self.column_refs.values():
            if id(ref.node) not in done:
                done[id(ref.node)] = change(ref.node)
        return BatchRef(rows, {name: replace(ref, node=done[id(ref.node)]) for name, ref in self.column_refs.items()})

    @staticmethod
    def concat(parts: Sequence[BatchRef]) -> BatchRef:
        """Rows of all parts concatenated; the parts of one balanced split return to their original order. As in
        `Batch.concat`, equal `row_id`s that the driver knows (those of loaders) become different ones."""
        if not parts:
            raise BatchError("BatchRef.concat needs at least one batch.")
        first, rows = parts[0], tuple(part.rows for part in parts)
        for part in parts:
            if set(part.columns) != set(first.columns):
                raise BatchError(
                    f"cannot join batches with columns {sorted(first.columns)} and {sorted(part.columns)}."
                )
        split = _permuted_split(parts)
        if len(parts) == 1 and split is None:
            return first
        parts = _with_own_ids(parts) if split is None else parts
        joined: dict[tuple[int, ...], Node] = {}
        refs = {}
        for name in first.columns:
            columns = [part.column_refs[name] for part in parts]
            if len({column.stored for column in columns}) > 1:
                raise BatchError(f"column {name!r} had different names in the parts: rename after joining them.")
            nodes = tuple(column.node for column in columns)
            key = tuple(map(id, nodes))
            if key not in joined:
                node = Concat(nodes, rows)
                joined[key] = node if split is None else Gather(node, Unpermute(split, sum(rows) // split.rows))
            refs[name] = ColumnRef(columns[0].stored, joined[key], any(column.unique for column in columns))
        return replace(first, rows=sum(rows), column_refs=refs, part=None)

    def get(self, columns: str | Sequence[str] | None = None, timeout: float | None = None) -> Batch:
        """Fetch the batch (or some columns); waits for the calls that write them.

        Errors: WorkerError of the call that failed, WaitTimeoutError after `timeout` seconds.
        """
        names = self.columns if columns is None else (columns,) if isinstance(columns, str) else tuple(columns)
        try:
            return Reader(timeout).read(self.select(*names).to_rank())
        except WorkerError as error:
            raise error.as_cause() from None

    def metrics(self) -> Future:
        """Rewards, lengths, KL, drift and advantages as metrics, computed on the controller worker; a future.

        Errors: BatchError when no session is open.
        """
        if (session := Session.existing()) is None:
            raise BatchError("no session is open, whose controller worker would compute the metrics.")
        return session.controller.batch_metrics(self)


@dataclass(frozen=True, repr=False)
class OneColumn:
    """One column of a batch, by reference."""

    batch: BatchRef

    def __repr__(self) -> str:
        (name, ref), rows = next(iter(self.batch.column_refs.items())), self.batch.rows
        outputs = list(dict.fromkeys(outputs_of([ref.node])))
        return f"{name}: {rows} rows by reference, {calls_of(outputs)}: {look_at(outputs)[0]}; .get() brings them here"

    def _repr_html_(self) -> str:
        return self.batch._repr_html_()

    def __len__(self) -> int:
        return len(self.batch)

    def get(self, timeout: float | None = None) -> Column:
        """The column as a Tensor, Ragged or list."""
        return self.batch.get(timeout=timeout)[self.batch.columns[0]]


@dataclass(frozen=True, repr=False)
class LaterBatch:
    """Columns of a running call on some ranks, which alone know how many rows there will be."""

    outputs: tuple[RankOutput, ...]
    columns: tuple[str, ...]

    @staticmethod
    def concat(parts: Sequence[LaterBatch]) -> LaterBatch:
        """The rows of all parts."""
        return LaterBatch(tuple(output for part in parts for output in part.outputs), parts[0].columns)

    def __repr__(self) -> str:
        return f"LaterBatch({calls_of(self.outputs)}: {look_at(self.outputs)[0]})"

    def done(self) -> bool:
        return Future(self.outputs).done()

    def get(self, timeout: float | None = None) -> BatchRef:
        """Wait for the call. Errors: WorkerError of the rank that failed, WaitTimeoutError."""
        rows = Reader(timeout).rows(self.outputs)
        known = [replace(output, rows=count) for output, count in zip(self.outputs, rows, strict=True)]
        return BatchRef.concat([BatchRef.of_output(output, self.columns) for output in known])

    def seconds(self) -> dict[str, float]:
        """Seconds of the call, once it has ended, and of its stages (`method/stage`): the slowest rank's."""
        statuses = [status for output in self.outputs if output.call for status in output.call.statuses]
        out: dict[str, float] = {}
        for status in fetch([one.ref for one in statuses], statuses, follow=False):
            own = defaultdict[str, float](float)
            for event in status.events:
                own[event.method] += event.seconds
            out |= {name: max(out.get(name, 0.0), seconds) for name, seconds in own.items()}
        return out


def wait_for_one(calls: Sequence[LaterBatch], seconds: float) -> None:
    """Returns when one of the calls has ended, or after `seconds`."""
    refs = [output.ref for call in calls for output in call.outputs]
    ends, unended = time.monotonic() + seconds, refs
    while unended and not any(call.done() for call in calls) and (left := ends - time.monotonic()) > 0:
        unended = ray.wait(unended, num_returns=1, timeout=left)[1]


def _as_ref(value: Any) -> BatchRef:
    if isinstance(value, BatchRef):
        return value
    if not isinstance(value, Batch | Mapping):
        raise BatchError(
            f"only a batch or a mapping of columns can be united with a batch, got {type(value).__name__}."
        )
    return BatchRef.from_batch(value if isinstance(value, Batch) else Batch(value), number=False)


def _on_driver(rows: BatchRef, name: str) -> bool:
    """Whether the driver has this column."""
    ref = rows.column_refs.get(name)
    return ref is not None and all(isinstance(one.ref, Manifest) for one in outputs_of([ref.node]))


def _with_own_ids(parts: Sequence[BatchRef]) -> Sequence[BatchRef]:
    """The parts, of which no two have equal `row_id`s, where the driver knows all of them."""
    if not all(_on_driver(part, "row_id") for part in parts) or "trajectory_id" in parts[0]:
        return parts
    offsets = id_offsets([torch.as_tensor(part.get("row_id").peek("row_id")) for part in parts])
    if not any(offsets):
        return parts
    own = [name for name in ("row_id", "group_id") if name in parts[0]]
    return [part | Batch(part.get(own).renumbered(by)) for part, by in zip(parts, offsets, strict=True)]


def _permuted_split(parts: Sequence[BatchRef]) -> SplitSpec | None:
    """The split that moved rows, if these are all of its parts in order."""
    split = parts[0].part.split if parts[0].part else None
    if split is None or split.contiguous or not split.rows:
        return None
    return split if [part.part for part in parts] == [SplitPart(split, i) for i in range(split.parts)] else None
