"""Row selections: the rows that `batch[key]`, `reorder` and `filter` name, of a Batch or a BatchRef. Pure."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import BatchError


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
