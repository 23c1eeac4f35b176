"""Stand-ins: what a trace gives to driver code that asks for data which no process has computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hybridflow.batch import Batch
from hybridflow.columns import Column, Objects
from hybridflow.ragged import Ragged

_TEXTS = ("prompt", "response")
_PER_TOKEN = ("_ids", "_mask", "log_probs", "values", "advantages", "returns")
_OF_ANNOTATION: dict[str, Any] = {"float": 0.0, "int": 0, "bool": False, "list": [], "None": None}


class Figures(dict[str, float]):
    """Figures of a call that did not run: each is 0.0, and none can be listed."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def get(self, name: str, default: Any = 0.0) -> Any:
        return super().get(name, default)


def stand_in_columns(names: Sequence[str], rows: int) -> Batch:
    """`rows` rows of the named columns: one token or a zero each, texts empty, ids of rows counted through."""
    return Batch({name: _column(name, rows) for name in names})


def _column(name: str, rows: int) -> Column:
    if name in _TEXTS:
        return Objects([""] * rows)
    if name.endswith("_failure"):
        return Objects([None] * rows)
    if name in ("row_id", "group_id"):
        return torch.arange(rows)
    if name == "num_tokens":
        return torch.full((rows,), 2)
    if name == "finished":
        return torch.ones(rows, dtype=torch.bool)
    if name == "temperature":
        return torch.ones(rows)
    if name.endswith(_PER_TOKEN):
        ids, mask = name.endswith("_ids"), name.endswith("_mask")
        values = torch.zeros(rows, dtype=torch.int64) if ids else torch.ones(rows, dtype=torch.bool) if mask else None
        return Ragged.from_lengths(torch.zeros(rows) if values is None else values, [1] * rows)
    return torch.zeros(rows)


def stand_in_value(method: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """What a method that returns no columns might have returned, as its annotation says; figures where it is silent."""
    declared = str(inspect.signature(method).return_annotation)
    if declared == "str":
        return str(settings.get("path", ""))
    if "None" in declared.split(" | "):
        return None
    return _OF_ANNOTATION.get(declared.partition("[")[0], Figures())
