"""Batches from and to records: a list of dicts, one per row, or a pandas DataFrame. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.columns import Column
from hybridflow.errors import BatchError, nearest
from hybridflow.ragged import Ragged

if TYPE_CHECKING:
    from pandas import DataFrame

_INT64 = range(-(2**63), 2**63)


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
    return {name: column_from_values([record[name] for record in records]) for name in names}


def column_from_values(values: list[Any]) -> Column:
    """Numbers become dense (bool, int64, else float32), lists of numbers ragged, everything else stays objects.

    A list of numbers is ragged also when all have the same length: the kind of a column must not depend on chance.
    Tensors of two and more dimensions and equal shape are stacked. A None anywhere keeps the column as objects.
    """
    plain = [value.detach().cpu().numpy() if isinstance(value, Tensor) else value for value in values]
    if not plain:
        return []
    if all(isinstance(value, np.ndarray) and value.ndim > 1 for value in plain):
        return (
            torch.stack([torch.as_tensor(value) for value in values]) if len({v.shape for v in plain}) == 1 else values
        )
    if all(isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1) for value in plain):
        rows = [value.tolist() if isinstance(value, np.ndarray) else list(value) for value in plain]
        numbers = [number for row in rows for number in row]
        dtype = _number_dtype(numbers) if numbers else _empty_dtype(values)
        if dtype is None:
            return values
        return Ragged.from_lengths(torch.tensor(numbers, dtype=dtype), [len(row) for row in rows])
    scalars = [
        value.item() if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 else value for value in plain
    ]
    dtype = _number_dtype(scalars)
    return values if dtype is None else torch.tensor(scalars, dtype=dtype)


def dicts_from_columns(columns: Mapping[str, Column], rows: int) -> list[dict[str, Any]]:
    """One dict of plain Python values (numbers, lists, objects) per row."""
    lists = {name: column if isinstance(column, list) else column.tolist() for name, column in columns.items()}
    return [{name: values[row] for name, values in lists.items()} for row in range(rows)]


def columns_from_pandas(frame: DataFrame) -> dict[str, Column]:
    """One column per column of the frame: numbers dense (bool, int64, else float32), others as in a list of dicts."""
    out: dict[str, Column] = {}
    for name in frame.columns:
        series = frame[name]
        if isinstance(series.dtype, np.dtype) and series.dtype.kind in "biuf":
            dtype = {"b": torch.bool, "f": torch.float32}.get(series.dtype.kind, torch.int64)
            out[str(name)] = torch.tensor(series.to_numpy(), dtype=dtype)
        else:
            out[str(name)] = column_from_values(series.tolist())
    return out


def pandas_from_columns(columns: Mapping[str, Column]) -> DataFrame:
    """Dense columns [rows] as they are, every other row as a Python value."""
    import pandas as pd

    series: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Tensor) and column.ndim == 1 and column.dtype != torch.bfloat16:
            series[name] = column.detach().cpu().numpy().copy()
        else:
            values = column if isinstance(column, list) else column.tolist()
            series[name] = pd.Series(values, dtype=object)
    return pd.DataFrame(series)


def _number_dtype(values: Sequence[Any]) -> torch.dtype | None:
    """bool, int64 or float32 when all values are such numbers, else None."""
    types = {type(value) for value in values}
    if types == {bool}:
        return torch.bool
    if types == {int}:
        return torch.int64 if all(value in _INT64 for value in values) else None
    return torch.float32 if types and types <= {int, float} else None


def _empty_dtype(values: Sequence[Any]) -> torch.dtype:
    """The dtype of rows that are all empty: that of their tensor, int64 for lists."""
    first = values[0]
    return torch.as_tensor(first).dtype if isinstance(first, Tensor | np.ndarray) else torch.int64
