"""Batch: rows x named columns. Pure.

A column is dense (`Tensor` [B, *F]), ragged (`Ragged`, B rows of different length) or a list of B Python objects.
Nothing is padded. A batch is a value: operations return a new batch, whose tensors are views wherever no row has to
be copied.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.batch import columns as kinds
from hybridflow.batch.columns import Column
from hybridflow.batch.pinned import to_device
from hybridflow.batch.ragged import Ragged
from hybridflow.batch.row_split import RowPlan
from hybridflow.errors import BatchError

if TYPE_CHECKING:
    from tensordict import TensorDict

_SOURCE_BITS = 32
"""Numbers of the rows of one loader."""


Chunks = Sequence[int] | None
"""Row counts of mini-batches, in order."""


class Batch:
    """B rows of named columns: tensors or numpy arrays [B, ...], `Ragged`, or lists with one entry per row.

    Of a list, numbers become a dense column, lists of numbers a ragged one, anything else stays a list of objects
    (`columns.from_values`); `columns.Objects` keeps numbers as they are.

    `chunk_rows` are the row counts of the mini-batches that the rows form, in order (set by `split`).

    A column may lie in memory that other processes read too (see `from_shared`): `batch["x"]` then makes a private
    copy the first time, so writing into a tensor never changes what another reader sees. `peek` does not copy.

    Errors: BatchError when columns differ in rows or are no columns, MissingColumnError for an unknown name.
    """

    __slots__ = ("_columns", "_rows", "_shared", "chunk_rows")

    def __init__(self, columns: Mapping[str, Any], *, chunk_rows: Sequence[int] | None = None) -> None:
        made, shared = kinds.checked(columns)
        self._set(made, len(next(iter(made.values()), ())), shared, chunk_rows)

    def _set(self, made: Mapping[str, Column], rows: int, shared: Iterable[str], chunk_rows: Chunks) -> None:
        self._columns = {name: kinds.Objects(one) if type(one) is list else one for name, one in made.items()}
        self._rows, self._shared, self.chunk_rows = rows, set(shared), None
        if chunk_rows is not None:
            self.chunk_rows = tuple(int(count) for count in chunk_rows)
            if sum(self.chunk_rows) != rows or min(self.chunk_rows, default=0) < 0:
                raise BatchError(f"chunk_rows={self.chunk_rows} has {sum(self.chunk_rows)} rows, the batch has {rows}.")

    @classmethod
    def _of(cls, made: Mapping[str, Column], rows: int, shared: Iterable[str] = (), chunk_rows: Chunks = None) -> Batch:
        """A batch of checked columns; it has rows also when it has no columns."""
        batch = cls.__new__(cls)
        batch._set(made, rows, shared, chunk_rows)
        return batch

    @classmethod
    def from_shared(cls, columns: Mapping[str, Column], *, chunk_rows: Sequence[int] | None = None) -> Batch:
        """A batch over columns that others read too: each tensor is copied on its first `batch[name]`."""
        if len({len(column) for column in columns.values()}) > 1:
            kinds.checked(columns)  # names them
        shared = [name for name, column in columns.items() if not isinstance(column, list)]
        return cls._of(columns, len(next(iter(columns.values()), ())), shared, chunk_rows)

    # Columns

    @property
    def tensordict(self) -> TensorDict:
        """The same memory as a TensorDict: tensors, {values, offsets} of ragged columns, objects as non-tensor data."""
        from tensordict import TensorDict

        out = TensorDict({}, batch_size=[])
        for name, column in self._columns.items():
            if isinstance(column, list):
                out.set_non_tensor(name, column)
            elif isinstance(column, Ragged):
                out.set(name, TensorDict({"values": column.values, "offsets": column.offsets}, batch_size=[]))
            else:
                out.set(name, column)
        return out

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    @property
    def shared(self) -> bool:
        """True while a column still lies in memory that is not this batch's own."""
        return bool(self._shared)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; Python objects count as 0."""
        return sum(column.nbytes for column in self._columns.values() if not isinstance(column, list))

    def peek(self, name: str) -> Column:
        """The column without the private copy: for reading only, the memory may be shared."""
        if name not in self._columns:
            kinds.check_known([name], self._columns)
        return self._columns[name]

    def select(self, *names: str | Iterable[str]) -> Batch:
        """Only these columns, in this order: `select("a", "b")` or `select(["a", "b"])`."""
        return self._with({name: self.peek(name) for name in kinds.names_of(names)})

    def without(self, *names: str | Iterable[str]) -> Batch:
        """All other columns."""
        dropped = {name: self.peek(name) for name in kinds.names_of(names)}
        return self._with({name: column for name, column in self._columns.items() if name not in dropped})

    def rename(self, names: Mapping[str, str] | None = None, /, **more: str) -> Batch:
        """Other names for some columns: `rename(old="new")` or `rename({"old": "new"})`."""
        new = kinds.renamed(self._columns, dict(names or {}, **more))
        made = {new[old]: column for old, column in self._columns.items()}
        return Batch._of(made, self._rows, {new[old] for old in self._shared}, self.chunk_rows)

    def with_columns(self, **new: Any) -> Batch:
        """With these columns, which replace columns of the same name."""
        if not self.columns and not self._rows:
            return Batch(new)
        made, shared = kinds.checked(new, self._rows)
        return Batch._of(self._columns | made, self._rows, (self._shared - made.keys()) | shared, self.chunk_rows)

    def union(self, other: Batch | Mapping[str, Any]) -> Batch:
        """The columns of both batches of the same rows; of two with one name, `other`'s. Also `batch | other`.

        `other` may be a mapping of columns. Errors: BatchError when the row counts or the `row_id`s differ.
        """
        other = other if isinstance(other, Batch) else Batch(other)
        if self._rows != other._rows:
            found = f"a batch of {self._rows} rows with one of {other._rows}"
            raise BatchError(f"cannot unite {found}: give the same rows.")
        if "row_id" in self and "row_id" in other and not kinds.same(self.peek("row_id"), other.peek("row_id")):
            raise BatchError(
                "cannot unite two batches whose row_id differ: their rows are different or in another order. "
                "Bring one into the other's order with reorder(index), or drop row_id to unite by position."
            )
        shared = (self._shared - set(other.columns)) | other._shared
        chunk_rows = self.chunk_rows if self.chunk_rows is not None else other.chunk_rows
        return Batch._of(self._columns | other._columns, self._rows, shared, chunk_rows)

    # Rows

    def split(
        self, parts: int, *, balance: str | Tensor | None = None, groups: bool = False, chunks: int = 1
    ) -> list[Batch]:
        """The rows over `parts` batches in `chunks` mini-batches (`RowPlan`), contiguously or balanced.

        `balance` is the weight of each row, [B], or a column: its values, or the lengths of a ragged one.
        `groups=True` keeps the rows of one `group_id` together. `chunk_rows` of each part says its mini-batches.
        """
        weights: Any = self.peek(balance) if isinstance(balance, str) else balance
        if isinstance(weights, list):
            asked = f"split(balance={balance!r})"
            raise BatchError(f"{asked}: a column of Python objects has no weights. Name a ragged one.")
        weights = weights.offsets.diff() if isinstance(weights, Ragged) else weights
        ids = self.peek("group_id") if groups else None
        assignment = RowPlan(self._rows, parts, chunks).assign(weights, ids)  # type: ignore[arg-type]
        return [self._take(torch.cat(part), [len(rows) for rows in part]) for part in assignment]

    def balance(self, parts: int, by: str = "num_tokens") -> list[Batch]:
        """`parts` batches with about equal sums of column `by` (of a ragged one, its lengths): `split` for tokens."""
        return self.split(parts, balance=by)

    def chunks(self) -> list[Batch]:
        """The mini-batches by `chunk_rows`; the batch itself when it has none."""
        if self.chunk_rows is None:
            return [self]
        ends = torch.tensor(self.chunk_rows).cumsum(0).tolist()
        return [self[end - count : end] for count, end in zip(self.chunk_rows, ends, strict=True)]

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """The rows of all parts. Of parts that have equal `row_id`s, such as those of two loaders, the later ones get
        others, and other `group_id`s: rows of different prompts are no group (unless they are rows of trajectories).

        Errors: BatchError when there is no part or columns or their types differ."""
        if not parts:
            raise BatchError("Batch.concat needs at least one batch.")
        first = parts[0]
        if len(parts) == 1:
            return first._with(first._columns, keep_chunks=False)
        for i, part in enumerate(parts):
            if differing := set(first.columns) ^ set(part.columns):
                raise BatchError(f"batches 0 and {i} cannot be joined: only one of them has {sorted(differing)}.")
        if "row_id" in first and "trajectory_id" not in first:
            offsets = id_offsets([torch.as_tensor(part.peek("row_id")) for part in parts])
            parts = [
                part.with_columns(**part.renumbered(by)) if by else part
                for part, by in zip(parts, offsets, strict=True)
            ]
        made = {name: kinds.join(name, [part.peek(name) for part in parts]) for name in first.columns}
        return Batch._of(made, sum(part.rows for part in parts))

    def renumbered(self, by: int) -> dict[str, Column]:
        """`row_id` and `group_id`, where they are, plus `by`."""
        return {name: torch.as_tensor(self.peek(name)) + by for name in ("row_id", "group_id") if name in self}

    def repeat(self, n: int | Sequence[int]) -> Batch:
        """Each row n times (or each its own number of times), the copies adjacent, as n responses per prompt need it.

        `group_id` says which row the copies come from (its `row_id`, or its position), unless there are groups
        already; `row_id` becomes row_id * n (the largest) + copy, so it stays unique.
        """
        index, copy, most = repeats(n, self._rows)
        row_id = torch.as_tensor(self.peek("row_id") if "row_id" in self else torch.arange(self._rows))[index]
        ids = {"row_id": row_id * most + copy}
        return self._take(index).with_columns(**({} if "group_id" in self else {"group_id": row_id}), **ids)

    def reorder(self, index: Tensor | Sequence[int]) -> Batch:
        """The rows at `index` [K], copied, in that order. Errors: BatchError for an index out of range."""
        return self._take(row_numbers(index, self._rows))

    def filter(self, mask: Tensor | Sequence[bool]) -> Batch:
        """The rows where `mask` [B] bool is True."""
        return self._take(masked_rows(mask, self._rows))

    # Memory

    def to(self, device: torch.device | str) -> Batch:
        """All tensors on `device` (offsets of ragged columns stay on the CPU). The host does not wait for CUDA."""
        named = {name: column for name, column in self._columns.items() if not isinstance(column, list)}
        flat = [column.values if isinstance(column, Ragged) else column for column in named.values()]
        moved = dict(zip(named, to_device(flat, torch.device(device)), strict=True))
        made: dict[str, Column] = dict(self._columns)
        for name, column in named.items():
            made[name] = column.with_values(moved[name]) if isinstance(column, Ragged) else moved[name]
        shared = {name for name in self._shared if _memory(made[name]) == _memory(self.peek(name))}
        return Batch._of(made, self._rows, shared, self.chunk_rows)

    def clone(self) -> Batch:
        """A copy with memory of its own."""
        made = {name: kinds.copy(column) for name, column in self._columns.items()}
        return Batch._of(made, self._rows, (), self.chunk_rows)

    def equal(self, other: Batch) -> bool:
        """Same rows and columns (in any order), with equal types and values."""
        if self._rows != other._rows or set(self.columns) != set(other.columns):
            return False
        return all(kinds.same(self.peek(name), other.peek(name)) for name in self.columns)

    # Records

    @classmethod
    def from_dicts(cls, records: Sequence[Mapping[str, Any]]) -> Batch:
        """One row per dict: numbers dense (bool, int64, else float32), lists of numbers ragged, the rest objects."""
        return cls._of(kinds.columns_from_dicts(records), len(records))

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict of plain Python values (numbers, lists, objects) per row."""
        lists = {name: c if isinstance(c, list) else c.tolist() for name, c in self._columns.items()}
        return [{name: values[row] for name, values in lists.items()} for row in range(self._rows)]

    # Python

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._columns

    def __getitem__(self, key: Any) -> Any:
        """A column by name (copied out of shared memory the first time), columns by a list of names, or rows.

        Rows come by number or slice as a batch of views, by a list or tensor of row numbers or of bools as a copy.
        """
        if isinstance(key, str):
            if key in self._shared:
                self._columns[key] = kinds.copy(self._columns[key])
                self._shared.discard(key)
            return self.peek(key)
        if isinstance(key, list | tuple) and any(isinstance(name, str) for name in key):
            return self.select(*key)
        picked = selected_rows(key, self._rows)
        return self._slice(picked.start, picked.stop) if isinstance(picked, range) else self._take(picked)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Each row as a dict: a tensor of the row for dense and ragged columns, the object for others."""
        own = {name: self[name] for name in self.columns}
        for row in range(self._rows):
            yield {name: c.row(row) if isinstance(c, Ragged) else c[row] for name, c in own.items()}

    def __or__(self, other: Batch | Mapping[str, Any]) -> Batch:
        return self.union(other) if isinstance(other, Batch | Mapping) else NotImplemented

    def __ror__(self, other: Mapping[str, Any]) -> Batch:
        return Batch(other).union(self) if isinstance(other, Mapping) else NotImplemented

    def __reduce__(self):
        encoded = {name: kinds.encode(column) for name, column in self._columns.items()}
        return _unpickle, (encoded, self._rows, self.chunk_rows)

    def __repr__(self) -> str:
        return kinds.summary(self._columns, self._rows, self.chunk_rows)

    def _repr_html_(self) -> str:
        return kinds.table(f"Batch: {self._rows} rows", self._columns, self._rows)

    def _with(self, made: Mapping[str, Column], keep_chunks: bool = True) -> Batch:
        """The same rows with a part of the columns."""
        return Batch._of(made, self._rows, self._shared & made.keys(), self.chunk_rows if keep_chunks else None)

    def _slice(self, start: int, stop: int, chunk_rows: Sequence[int] | None = None) -> Batch:
        stop = max(start, stop)
        made = {name: kinds.row_slice(column, start, stop) for name, column in self._columns.items()}
        return Batch._of(made, stop - start, self._shared, chunk_rows)

    def _take(self, index: Tensor, chunk_rows: Sequence[int] | None = None) -> Batch:
        """The rows at `index` [K] int64, as views where they are one range."""
        start = int(index[0]) if len(index) else 0
        if torch.equal(index, torch.arange(start, start + len(index))):
            return self._slice(start, start + len(index), chunk_rows)
        made = {name: kinds.take(column, index) for name, column in self._columns.items()}
        return Batch._of(made, len(index), (), chunk_rows)


def _memory(column: Column) -> int:
    if isinstance(column, list):
        return id(column)
    return (column.values if isinstance(column, Ragged) else column).data_ptr()


def _unpickle(encoded: Mapping[str, Any], rows: int, chunk_rows: tuple[int, ...] | None) -> Batch:
    made = {name: kinds.decode(value) for name, value in encoded.items()}
    shared = {name for name, value in encoded.items() if kinds.is_read_only(value)}
    return Batch._of(made, rows, shared, chunk_rows)


def repeats(n: int | Sequence[int], rows: int) -> tuple[Tensor, Tensor, int]:
    """For each copy its row and its number among the copies of that row, and the most copies of a row.

    Errors: BatchError for anything but one whole number of at least 1, or one for each of the `rows`."""
    counts: list[Any] = [n] * rows if type(n) is int else list(n) if isinstance(n, Sequence | Tensor) else [0]
    counts = [one.item() if isinstance(one, Tensor) else one for one in counts]
    if len(counts) != rows or not all(type(one) is int and one >= 1 for one in counts):
        raise BatchError(
            f"repeat({n!r}): give a whole number of at least 1, or one for each of the {rows} rows as a list."
        )
    many = torch.tensor(counts, dtype=torch.int64)
    index = torch.arange(rows).repeat_interleave(many)
    return index, torch.arange(len(index)) - (many.cumsum(0) - many)[index], max(counts, default=1)


def id_offsets(ids: Sequence[Tensor]) -> list[int]:
    """What to add to the numbers [B] of each part, so that no two parts have equal ones."""
    seen, out = set[int](), list[int]()
    for own in ids:
        by, mine = 0, own.tolist()
        while not seen.isdisjoint(one + by for one in mine):
            by += 1 << _SOURCE_BITS
        seen.update(one + by for one in mine)
        out.append(by)
    return out


# The rows that `batch[key]`, `reorder` and `filter` name, of a Batch or a BatchRef


def selected_rows(key: Any, rows: int) -> range | Tensor:
    """Adjacent rows as a range, others as [K] int64: `key` is a number, a slice, row numbers, or a bool for each row.

    Errors: IndexError for a number out of range, BatchError for everything else that selects no rows.
    """
    if isinstance(key, list | tuple | range) or getattr(key, "ndim", 0):
        index = torch.as_tensor(key)
        return masked_rows(index, rows) if index.dtype == torch.bool else row_numbers(index, rows)
    if isinstance(key, slice):
        picked = range(rows)[key]
        if picked.step != 1:
            return torch.tensor(list(picked), dtype=torch.int64)
        return range(picked.start, max(picked.start, picked.stop))
    try:
        row = operator.index(key)
    except TypeError:
        raise BatchError(f"a batch is indexed by columns or rows, got {key!r}. Give names, numbers or bools.") from None
    if not -rows <= row < rows:
        raise IndexError(f"row {key} of a batch of {rows} rows")
    return range(row % rows, row % rows + 1)


def row_numbers(index: Tensor | Sequence[int], rows: int) -> Tensor:
    """[K] int64 from 0: `index`, whose negative numbers count from the end. Errors: BatchError."""
    index = torch.as_tensor(index)
    if index.ndim != 1 or (len(index) and index.dtype.is_floating_point) or index.dtype == torch.bool:
        raise BatchError(f"reorder needs row indices [K], got {index.dtype} {list(index.shape)}.")
    index = index.to("cpu", torch.int64)
    if len(index) and not -rows <= int(index.min()) <= int(index.max()) < rows:
        raise BatchError(f"reorder was given rows {int(index.min())}..{int(index.max())}, the batch has {rows} rows.")
    return index % max(1, rows)


def masked_rows(mask: Tensor | Sequence[bool], rows: int) -> Tensor:
    """[K] int64: the rows where `mask` [rows] bool is True. Errors: BatchError."""
    mask = torch.as_tensor(mask, dtype=None if len(mask) else torch.bool)
    if mask.shape != (rows,) or mask.dtype != torch.bool:
        raise BatchError(f"filter needs a bool mask [{rows}], got {mask.dtype} {list(mask.shape)}.")
    return mask.cpu().nonzero()[:, 0]
