"""Column: the three kinds of columns in a batch, the operations on each, and their texts. Pure.

A column of B rows is dense (`Tensor` [B, *F]), ragged (`Ragged`: rows of different length) or a list of B Python
objects (texts, ground truths). Everything that depends on the kind is here, so `Batch` never has to ask.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from hybridflow.batch import markup
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, MissingColumnError, nearest

Column = Tensor | Ragged | list[Any]

_INT64 = range(-(2**63), 2**63)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer types by bytes, for the types that numpy lacks (bfloat16, the 8-bit floats)."""


class Objects(list):
    """A list whose entries stay Python objects even if all of them are numbers."""

    def _repr_html_(self) -> str:
        title, heading = f"{len(self)} objects", ("row", "value")
        return markup.first_rows(title, heading, len(self), lambda row: (str(row), markup.shown(self[row])))


def as_column(name: str, value: Any) -> tuple[Column, bool]:
    """`value` as a column, and whether its memory is read-only (a numpy array over shared memory).

    Tensors and arrays are not copied; an array of strings or objects becomes a list, and `from_values` converts lists.
    Errors: BatchError when the value does not have one entry per row.
    """
    if isinstance(value, np.ndarray) and value.ndim > 0:
        if value.dtype.kind in "OUSMm":
            return value.tolist(), False
        try:
            return from_array(value), not value.flags.writeable
        except (TypeError, ValueError) as error:
            raise BatchError(f"column {name!r}: torch has no type for an array of {value.dtype} ({error}).") from None
    if isinstance(value, Ragged | Objects) or (isinstance(value, Tensor) and value.ndim > 0):
        return value, False
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return from_values(list(value)), False
    shape = " without a row dimension" if isinstance(value, Tensor | np.ndarray) else ""
    raise BatchError(
        f"column {name!r} is a {type(value).__name__}{shape}. A column has one entry per row: give a tensor or array "
        f"[rows, ...], a Ragged, or a list."
    )


def from_values(values: list[Any]) -> Column:
    """One value per row: numbers become dense, lists of numbers ragged, everything else stays a list of objects.

    Python and numpy numbers become bool, int64 or, where one is a float, float32; tensors of one type keep it. Lists
    are ragged also when all have the same length: the kind of a column must not depend on chance. Tensors and arrays
    of two and more dimensions and equal shape are stacked. A text, a None or bools among numbers: objects.
    """
    if not values or any(value is None or isinstance(value, str) for value in values):
        return values
    if all(isinstance(value, Tensor) for value in values):
        return _from_tensors(values)
    plain = [value.tolist() if isinstance(value, np.generic) or _vector(value) else value for value in values]
    if all(isinstance(value, list | tuple) for value in plain):
        numbers = [number for row in plain for number in row]
        empty = values[0].dtype if isinstance(values[0], np.ndarray) else np.dtype(np.int64)
        dtype = _number_dtype(numbers) if numbers else torch.from_numpy(np.empty(0, empty)).dtype
        lengths = [len(row) for row in plain]
        return values if dtype is None else Ragged.from_lengths(torch.tensor(numbers, dtype=dtype), lengths)
    if all(isinstance(value, np.ndarray) for value in plain):
        return _from_tensors([torch.as_tensor(value) for value in plain])
    dtype = _number_dtype(plain)
    return values if dtype is None else torch.tensor(plain, dtype=dtype)


def _vector(value: Any) -> bool:
    """A tensor or array that is a number or a list of numbers."""
    return isinstance(value, Tensor | np.ndarray) and value.ndim < 2


def _from_tensors(rows: list[Tensor]) -> Column:
    first = rows[0]
    if any(row.dtype != first.dtype or row.ndim != first.ndim for row in rows):
        return from_values([row.tolist() for row in rows]) if all(map(_vector, rows)) else rows
    if first.ndim == 1:
        return Ragged.from_rows(rows)
    return torch.stack(rows) if all(row.shape == first.shape for row in rows) else rows


def _number_dtype(values: Sequence[Any]) -> torch.dtype | None:
    """bool, int64 or float32 when all values are such numbers, else None."""
    types = {type(value) for value in values}
    if types == {bool}:
        return torch.bool
    if types == {int}:
        return torch.int64 if all(value in _INT64 for value in values) else None
    return torch.float32 if types and types <= {int, float} else None


def names_of(given: Sequence[Any]) -> list[str]:
    """The names in `("a", "b")` and in `(["a", "b"],)`. Errors: BatchError for values other than names."""
    several = [one if isinstance(one, Iterable) and not isinstance(one, str) else [one] for one in given]
    names = [name for some in several for name in some]
    if odd := [name for name in names if not isinstance(name, str)]:
        raise BatchError(f"columns are chosen by name, got {odd[0]!r}.")
    return names


def check_known(names: Iterable[str], known: Collection[str]) -> None:
    """Errors: MissingColumnError for a name that is not `known`, with the nearest one."""
    for name in names:
        if name not in known:
            raise MissingColumnError(f"the batch has no column {name!r}.{nearest(str(name), known)}")


def renamed(known: Collection[str], changes: Mapping[str, str]) -> dict[str, str]:
    """The new name of every `known` column. Errors: MissingColumnError, BatchError for two columns of one name."""
    check_known(changes, known)
    new = {old: changes.get(old, old) for old in known}
    if len(set(new.values())) < len(new):
        raise BatchError(f"rename({dict(changes)}) gives two columns one name; the columns are {list(new)}.")
    return new


def checked(given: Mapping[str, Any], rows: int | None = None) -> tuple[dict[str, Column], set[str]]:
    """The columns, all of `rows` rows (of equal rows when None), and the names of those in read-only memory.

    Errors: BatchError for a bad name, a value that is no column, and row counts that differ.
    """
    made: dict[str, Column] = {}
    shared: set[str] = set()
    for name, value in given.items():
        if not isinstance(name, str) or not name:
            raise BatchError(f"a column name must be a text that is not empty, got {name!r}.")
        made[name], read_only = as_column(name, value)
        if read_only:
            shared.add(name)
    counts = {name: len(column) for name, column in made.items()}
    if len({*counts.values(), *([] if rows is None else [rows])}) > 1:
        each = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        wanted = f"; the batch has {rows}" if rows is not None else ""
        raise BatchError(f"all columns need the same number of rows, got {each}{wanted}.")
    return made, shared


def from_array(array: np.ndarray) -> Tensor:
    """A tensor over the memory of `array`, also of a read-only array, whose tensor must not be written.

    An empty array is copied, and one that runs backwards, which torch cannot describe.
    Errors: TypeError or ValueError for a type that torch does not have.
    """
    if array.size == 0 or min(array.strides, default=0) < 0:
        array = array.copy()
    if not array.flags.writeable:
        _warned()
    return torch.from_numpy(array)


@cache
def _warned() -> None:
    """torch warns once of a process's read-only arrays; `Batch` guards their memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(bytes(1), np.uint8))


def row_slice(column: Column, start: int, stop: int) -> Column:
    """Rows start:stop; tensors stay views."""
    return column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]


def take(column: Column, index: Tensor) -> Column:
    """The rows at `index` [K] int64, copied, in that order."""
    if isinstance(column, Ragged):
        return column.index(index)
    return column[index.to(column.device)] if isinstance(column, Tensor) else [column[i] for i in index.tolist()]


def join(name: str, parts: Sequence[Column]) -> Column:
    """Rows of all parts, one after the other. Errors: BatchError when kinds, dtypes or feature sizes differ."""
    kinds = list(dict.fromkeys(kind(part) for part in parts))
    if len(kinds) > 1:
        raise BatchError(f"column {name!r} cannot be joined: it is {' in one batch and '.join(kinds)} in another.")
    first = parts[0]
    if isinstance(first, list):
        return [value for part in parts for value in part]  # type: ignore[union-attr]
    if len(parts) == 1:
        return first
    return Ragged.concat(parts) if isinstance(first, Ragged) else torch.cat(parts)  # type: ignore[arg-type]


def kind(column: Column) -> str:
    """`ragged int64`, `float32 [rows, 4]`, `objects`: the type without the number of rows."""
    if isinstance(column, list):
        return "objects"
    values = column.values if isinstance(column, Ragged) else column
    inner = ", ".join(map(str, values.shape[1:]))
    dtype = str(values.dtype).removeprefix("torch.")
    if isinstance(column, Ragged):
        return f"ragged {dtype}" + (f" [*, {inner}]" if inner else "")
    return f"{dtype} [rows{', ' if inner else ''}{inner}]"


def same(left: Column, right: Column) -> bool:
    """Equal kind, dtype, shape and values."""
    if isinstance(left, list) or isinstance(right, list):
        return isinstance(left, list) and isinstance(right, list) and left == right
    if type(left) is not type(right) or left.dtype != right.dtype:
        return False
    return left.equal(right)  # type: ignore[arg-type]


def copy(column: Column) -> Column:
    """A copy with memory of its own (of a list: the list, not the objects)."""
    return list(column) if isinstance(column, list) else column.clone()


def encode(column: Column) -> tuple[Any, ...]:
    """Plain numpy arrays that travel out of band and hold no more than the column's own rows.

    (A view of a torch tensor would pickle its whole storage.) Python objects are pickled here, so only their readers
    unpickle them. Tensors come back on the CPU, without gradients.
    """
    if isinstance(column, list):
        return ("objects", np.frombuffer(cloudpickle.dumps(list(column)), np.uint8))
    if isinstance(column, Ragged):
        return ("ragged", *_to_numpy(column.values), column.offsets.numpy())
    return ("dense", *_to_numpy(column))


def decode(encoded: tuple[Any, ...]) -> Column:
    """The inverse of `encode`, over the same memory: where that `is_read_only`, the column must not be written."""
    kind, *rest = encoded
    if kind == "objects":
        return pickle.loads(rest[0])
    values = _from_numpy(*rest[:2])
    return Ragged(values, from_array(rest[2])) if kind == "ragged" else values


def decode_rows(name: str, columns: Sequence[tuple[Any, ...]], runs: Sequence[tuple[int, int, int]]) -> Column:
    """Rows start:stop of column i for each (i, start, stop), one after the other: a view of a single run. Errors: as
    `join`."""
    types = {(one[1], one[2].shape[1:]) if one[0] == "dense" else None for one in columns}
    if len(types) > 1 or None in types or not runs:
        decoded = [decode(column) for column in columns]
        return join(name, [row_slice(decoded[i], a, b) for i, a, b in runs or [(0, 0, 0)]])
    arrays = [columns[i][2][start:stop] for i, start, stop in runs]
    return _from_numpy(columns[0][1], arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


def is_read_only(encoded: tuple[Any, ...]) -> bool:
    """Whether `decode` gives tensors over memory that is not this process's own."""
    return encoded[0] != "objects" and not encoded[2].flags.writeable


def _from_numpy(name: str, array: np.ndarray) -> Tensor:
    """The inverse of `_to_numpy`."""
    values, dtype = from_array(array), getattr(torch, name)
    return values if values.dtype == dtype else values.view(dtype)


def _to_numpy(tensor: Tensor) -> tuple[str, np.ndarray]:
    """The name of the type, and the numbers; as integers of equal size where numpy lacks the type."""
    own = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    name = str(own.dtype).removeprefix("torch.")
    return name, (own if hasattr(np, name) else own.view(_BITS[own.itemsize])).numpy()


def columns_from_dicts(records: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """One column per key. Errors: BatchError when a record lacks a key or has one more than the first."""
    names = list(records[0]) if records else []
    for row, record in enumerate(records):
        for name in names:
            if name not in record:
                raise BatchError(f"record {row} has no {name!r}, record 0 has.{nearest(name, record)}")
        if len(record) > len(names):
            extra = next(key for key in record if key not in names)
            raise BatchError(f"record {row} has {extra!r}, which record 0 lacks. Every record needs the same keys.")
    return {name: from_values([record[name] for record in records]) for name in names}


def summary(columns: Mapping[str, Column], rows: int, chunk_rows: tuple[int, ...] | None) -> str:
    """One line per column: name, type, lengths or range of the numbers, and the first row."""
    chunks = f", chunks: {len(chunk_rows)}" if chunk_rows is not None else ""
    title = f"Batch({rows} rows, {len(columns)} columns{chunks})"
    cells = [(name, kind(column), extent(column), cell(column, 0) if rows else "") for name, column in columns.items()]
    widths = [max((len(line[i]) for line in cells), default=0) for i in range(3)]
    lines = ["  ".join([*(text.ljust(w) for text, w in zip(line, widths)), line[3]]).rstrip() for line in cells]
    return "\n  ".join([title, *lines])


def table(title: str, columns: Mapping[str, Column], rows: int) -> str:
    """HTML of the first rows."""
    heading = [f"{name}\n{kind(column)}" for name, column in columns.items()]
    return markup.first_rows(title, heading, rows, lambda row: [cell(column, row) for column in columns.values()])


def extent(column: Column) -> str:
    """Lengths of ragged rows, or smallest and largest number of a dense column."""
    if isinstance(column, Ragged):
        lengths = column.lengths
        return f"lengths {int(lengths.min())}..{int(lengths.max())}" if len(lengths) else "no rows"
    if isinstance(column, Tensor) and column.numel() and column.dtype != torch.bool and not column.is_complex():
        low, high = (column.float() if column.itemsize == 1 else column).detach().aminmax()
        return f"{markup.shown(low.item())}..{markup.shown(high.item())}"
    return ""


def cell(column: Column, row: int) -> str:
    """One row, shortened."""
    if isinstance(column, list):
        return markup.shown(column[row])
    value = column.row(row) if isinstance(column, Ragged) else column[row]
    return markup.shown(value.item()) if value.ndim == 0 else markup.numbers(value)
