"""Batches from and to records: a list of dicts, one per row, or a pandas DataFrame. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.columns import Column, from_values
from hybridflow.errors import BatchError, nearest

if TYPE_CHECKING:
    from pandas import DataFrame


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
            out[str(name)] = from_values(series.tolist())
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
