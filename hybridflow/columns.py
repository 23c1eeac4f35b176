"""Column: the three kinds of values that a batch holds, and what each operation means for them. Pure.

A column of B rows is dense (`Tensor` [B, *F]), ragged (`Ragged`: rows of different length) or a list of B Python
objects (texts, ground truths). Everything that depends on the kind is here, so `Batch` never has to ask.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.errors import BatchError
from hybridflow.ragged import Ragged

Column = Tensor | Ragged | list[Any]


def as_column(name: str, value: Any) -> tuple[Column, bool]:
    """`value` as a column, and whether its memory is read-only (a numpy array over shared memory).

    Tensors and arrays are not copied; an array of strings or objects becomes a list.
    Errors: BatchError when the value does not have one entry per row.
    """
    if isinstance(value, np.ndarray) and value.ndim > 0:
        return (
            (value.tolist(), False) if value.dtype.kind in "OUSMm" else (from_array(value), not value.flags.writeable)
        )
    if isinstance(value, Ragged) or (isinstance(value, Tensor) and value.ndim > 0):
        return value, False
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value), False
    shape = " without a row dimension" if isinstance(value, Tensor | np.ndarray) else ""
    raise BatchError(
        f"column {name!r} is a {type(value).__name__}{shape}. A column has one entry per row: give a tensor or array "
        f"[rows, ...], a Ragged, or a list."
    )


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
    """A tensor over the memory of `array`, also when that is read-only (then the caller must never write to it)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


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


def to_device(column: Column, device: torch.device, non_blocking: bool = False) -> Column:
    return column if isinstance(column, list) else column.to(device, non_blocking=non_blocking)


def size_of(column: Column) -> int:
    """Bytes of the tensors; Python objects count as 0."""
    return 0 if isinstance(column, list) else column.nbytes


def pack(column: Column) -> Any:
    """Plain picklable values whose arrays travel out of band and hold no more than the column's own rows.

    (A view of a torch tensor would pickle its whole storage.) Tensors come back on the CPU, without gradients.
    """
    if isinstance(column, Ragged):
        return pack(column.values), pack(column.offsets)
    if isinstance(column, list):
        return column
    flat = column.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy(), column.dtype, tuple(column.shape)


def unpack(packed: Any) -> tuple[Column, bool]:
    """The column, and whether its memory is read-only (it was unpickled from shared buffers)."""
    if isinstance(packed, list):
        return packed, False
    if len(packed) == 2:
        values, read_only = unpack(packed[0])
        return Ragged(values, unpack(packed[1])[0]), read_only  # type: ignore[arg-type]
    raw, dtype, shape = packed
    return from_array(raw).view(dtype).view(shape), not raw.flags.writeable
