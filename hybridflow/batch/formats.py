"""Other forms of a batch: a list of dicts, lines of text, an HTML table. Pure."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch.columns import Column, from_values, kind
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, nearest

_ROWS, _NUMBERS, _LETTERS = 6, 6, 48  # of a table; of a cell; of a text


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


def summary(columns: Mapping[str, Column], rows: int, chunk_rows: tuple[int, ...] | None) -> str:
    """One line per column: name, type, lengths or range of the numbers, and the first row."""
    chunks = f", chunks: {len(chunk_rows)}" if chunk_rows is not None else ""
    title = f"Batch({rows} rows, {len(columns)} columns{chunks})"
    cells = [(name, kind(column), extent(column), cell(column, 0) if rows else "") for name, column in columns.items()]
    widths = [max((len(line[i]) for line in cells), default=0) for i in range(3)]
    lines = ["  ".join([*(text.ljust(w) for text, w in zip(line, widths)), line[3]]).rstrip() for line in cells]
    return "\n  ".join([title, *lines])


def table(columns: Mapping[str, Column], rows: int) -> str:
    """HTML of the first rows; every text is escaped."""
    shown = min(rows, _ROWS)
    head = "".join(
        f"<th>{html.escape(name)}<br><small>{html.escape(kind(c))}</small></th>" for name, c in columns.items()
    )
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell(column, row))}</td>" for column in columns.values()) + "</tr>"
        for row in range(shown)
    )
    more = f"<p>{rows - shown} more rows</p>" if rows > shown else ""
    return f"<p>Batch: {rows} rows</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def extent(column: Column) -> str:
    """Lengths of ragged rows, or smallest and largest number of a dense column."""
    if isinstance(column, Ragged):
        lengths = column.lengths
        return f"lengths {int(lengths.min())}..{int(lengths.max())}" if len(lengths) else "no rows"
    if isinstance(column, Tensor) and column.numel() and column.dtype != torch.bool and not column.is_complex():
        low, high = column.detach().aminmax()
        return f"{_number(low.item())}..{_number(high.item())}"
    return ""


def cell(column: Column, row: int) -> str:
    """One row, shortened."""
    if isinstance(column, list):
        return _shorten(column[row] if isinstance(column[row], str) else repr(column[row]))
    value = column.row(row) if isinstance(column, Ragged) else column[row]
    if value.ndim == 0:
        return _number(value.item())
    numbers = [_number(number) for number in value.flatten()[:_NUMBERS].tolist()]
    return f"[{', '.join(numbers)}{', ...' if value.numel() > _NUMBERS else ''}]"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LETTERS else text[: _LETTERS - 3] + "..."
