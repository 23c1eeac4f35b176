"""Ragged: rows of different length as flat values and offsets. Pure.

Torch's jagged nested tensors cannot be added when built apart, sliced, stacked, empty or pickled out of band; a pair of
plain tensors can. Shapes: B rows, N values in all, `*F` trailing feature dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import markup
from hybridflow.batch.pinned import to_device
from hybridflow.errors import BatchError


class Ragged:
    """B rows of lengths `lengths`: `values` [N, *F] any dtype, `offsets` [B+1] int64 on the CPU, offsets[0] == 0.

    Arithmetic goes through `values` and `with_values`; a `Ragged` itself is immutable and rows are views. What is
    combined with values (`lengths`, `row_index`) is on their device; the offsets tell the host how long rows are.
    Errors: BatchError when offsets do not fit the values.
    """

    __slots__ = ("_moved_offsets", "offsets", "values")

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        if offsets.ndim != 1 or len(offsets) < 1 or offsets.dtype != torch.int64:
            raise BatchError(f"offsets must be int64 of shape [rows + 1], got {offsets.dtype} {tuple(offsets.shape)}.")
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(values):
            raise BatchError(
                f"offsets run from {int(offsets[0])} to {int(offsets[-1])}, there are {len(values)} values."
            )
        if bool((offsets[1:] < offsets[:-1]).any()):
            raise BatchError(f"offsets must not decrease, got {offsets.tolist()[:20]}.")
        self.values, self.offsets = values, offsets
        self._moved_offsets: Tensor | None = None

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor | Sequence[int]) -> Ragged:
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
        if len(lengths) and int(lengths.min()) < 0:
            raise BatchError("row lengths must not be negative.")
        return cls(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    @classmethod
    def from_rows(cls, rows: Iterable[Tensor | Sequence], dtype: torch.dtype | None = None) -> Ragged:
        """Empty lists take the dtype of the other rows, int64 when there are none."""
        given = list(rows)
        tensors = [torch.as_tensor(row, dtype=dtype) for row in given]
        # an empty list would become float32 and turn token ids into floats when joined
        typed = [t for row, t in zip(given, tensors, strict=True) if len(t) or isinstance(row, Tensor)]
        empty = torch.empty(0, dtype=dtype or torch.int64)
        values = torch.cat(typed) if typed else empty
        return cls.from_lengths(values, [len(row) for row in tensors])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """[B] int64, on the device of the values."""
        return self._own_offsets.diff()

    @property
    def _own_offsets(self) -> Tensor:
        """`offsets` on the device of the values."""
        if self._moved_offsets is None:
            (self._moved_offsets,) = to_device([self.offsets], self.values.device)
        return self._moved_offsets

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.offsets.nbytes

    def row(self, i: int) -> Tensor:
        """Row i as a view [length, *F]."""
        i = range(len(self))[i]
        return self.values[int(self.offsets[i]) : int(self.offsets[i + 1])]

    def rows(self) -> list[Tensor]:
        return list(self.values.split(self.offsets.diff().tolist()))

    def tolist(self) -> list[list]:
        return [row.tolist() for row in self.rows()]

    def with_values(self, values: Tensor) -> Ragged:
        """The same rows with other values [N, *G]."""
        made = Ragged(values, self.offsets)
        if values.device == self.values.device:
            made._moved_offsets = self._moved_offsets
        return made

    def map(self, function: Callable[[Tensor], Tensor]) -> Ragged:
        return self.with_values(function(self.values))

    def slice(self, start: int, stop: int) -> Ragged:
        """Rows start:stop as views of the values."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Ragged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def index(self, rows: Tensor | Sequence[int]) -> Ragged:
        """The rows at indices `rows` [K] int64, copied, in that order."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        lengths = self.offsets.diff()[rows]
        (taken,) = to_device([spans(self.offsets[:-1][rows], lengths)], self.values.device)
        return Ragged.from_lengths(self.values[taken], lengths)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """Rows of all parts, one after the other. Errors: BatchError without a part, or when their dtypes differ."""
        if not parts:
            raise BatchError("Ragged.concat needs at least one part.")
        if len(parts) == 1:
            return parts[0]
        if len(dtypes := {str(part.dtype).removeprefix("torch.") for part in parts}) > 1:
            raise BatchError(f"ragged parts of different types cannot be joined: {' and '.join(sorted(dtypes))}.")
        return Ragged.from_lengths(torch.cat([p.values for p in parts]), torch.cat([p.offsets.diff() for p in parts]))

    def row_index(self) -> Tensor:
        """[N] int64, on the device of the values: the row that each value belongs to."""
        lengths, total = self.lengths, len(self.values)
        return torch.repeat_interleave(torch.arange(len(self), device=lengths.device), lengths, output_size=total)

    def row_sum(self) -> Tensor:
        """[B, *F]: the sum of each row (0 for an empty one), in the values' dtype, differentiable."""
        out = self.values.new_zeros(len(self), *self.values.shape[1:])
        return out.index_add(0, self.row_index(), self.values)

    def expand(self, per_row: Tensor) -> Tensor:
        """[N, *F]: a per-row tensor [B, *F] repeated for every value of the row."""
        return per_row[self.row_index().to(per_row.device)]

    def pad(self, value: float | int | bool = 0, length: int | None = None) -> Tensor:
        """[B, L, *F] right-padded to the longest row (or `length`). For display and inside engines only."""
        width = int(self.offsets.diff().max()) if len(self) else 0
        width = width if length is None else length
        out = self.values.new_full((len(self), width, *self.values.shape[1:]), value)
        if len(self.values):
            rows = self.row_index()
            out[rows, torch.arange(len(rows), device=rows.device) - self._own_offsets[rows]] = self.values
        return out

    def to(self, *args, **kwargs) -> Ragged:
        """`Tensor.to` on the values; offsets stay on the CPU."""
        return self.with_values(self.values.to(*args, **kwargs))

    def clone(self) -> Ragged:
        return Ragged(self.values.clone(), self.offsets.clone())

    def equal(self, other: Ragged) -> bool:
        """Same rows, dtype and values."""
        alike = self.dtype == other.dtype and torch.equal(self.offsets, other.offsets)
        return alike and torch.equal(self.values, other.values)

    def __repr__(self) -> str:
        lengths = self.offsets.diff()
        span = f"{int(lengths.min())}..{int(lengths.max())}" if len(self) else "-"
        return f"Ragged({len(self)} rows, lengths {span}, {str(self.dtype).removeprefix('torch.')})"

    def _repr_html_(self) -> str:
        def cells(i: int) -> tuple[str, ...]:
            return str(i), str(len(self.row(i))), markup.numbers(self.row(i))

        return markup.first_rows(repr(self), ("row", "length", "values"), len(self), cells)


class SharedRows(Ragged):
    """Rows `index` [B] int64 of `stored`, of which several may be the same one. Rows are views; `values` is a copy."""

    __slots__ = ("_index", "_stored")

    def __init__(self, stored: Ragged, index: Tensor) -> None:
        self._stored, self._index, self._moved_offsets = stored, index, None
        self.offsets = torch.cat([stored.offsets[:1], stored.offsets.diff()[index].cumsum(0)])

    def __reduce__(self) -> tuple[Any, ...]:
        return Ragged, (self.values, self.offsets)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self._stored.index(self._index).values

    @property
    def _own_offsets(self) -> Tensor:
        return self.offsets.to(self._stored.values.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._stored.dtype

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes

    def row(self, i: int) -> Tensor:
        return self._stored.row(int(self._index[i]))

    def rows(self) -> list[Tensor]:
        return [self.row(i) for i in range(len(self))]

    def slice(self, start: int, stop: int) -> Ragged:
        return SharedRows(self._stored, self._index[start:stop])

    def index(self, rows: Tensor | Sequence[int]) -> Ragged:
        return SharedRows(self._stored, self._index[torch.as_tensor(rows, dtype=torch.int64)])


def spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """[sum(lengths)] int64: the integers starts[i] .. starts[i]+lengths[i]-1 of every span, one after the other."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    return torch.arange(total) + torch.repeat_interleave(starts - (ends - lengths), lengths)
