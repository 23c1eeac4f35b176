"""ONE_TO_ALL, ONE_TO_ONE and ALL_TO_ALL: protocols that do not split rows (paper, table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.errors import ProtocolError
from hybridflow.protocols.protocol import SKIP, Protocol
from hybridflow.topology import RankGrid


def _same_to_every_rank(grid: RankGrid, rows: Any) -> list[Any]:
    return [rows] * grid.size


def _to_rank_zero(grid: RankGrid, rows: Any) -> list[Any]:
    return [rows] + [SKIP] * (grid.size - 1)


def _one_item_per_rank(grid: RankGrid, items: Any) -> list[Any]:
    if not isinstance(items, Sequence) or isinstance(items, str) or len(items) != grid.size:
        found = f"{len(items)} items" if isinstance(items, Sequence) else type(items).__name__
        raise ProtocolError(f"ALL_TO_ALL takes a list with one item per rank ({grid.size}), got {found}.")
    return list(items)


def _from_every_rank(grid: RankGrid, outputs: Sequence[Any]) -> list[Any]:
    return list(outputs)


def _from_rank_zero(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return outputs[0]


ONE_TO_ALL = Protocol("ONE_TO_ALL", _same_to_every_rank, _from_every_rank)
ONE_TO_ONE = Protocol("ONE_TO_ONE", _to_rank_zero, _from_rank_zero)
ALL_TO_ALL = Protocol("ALL_TO_ALL", _one_item_per_rank, _from_every_rank, prepared=True)
