"""DP_PROTO: every rank is a data parallel replica (paper, table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.protocols.protocol import Protocol, Rows, join
from hybridflow.topology import RankGrid


def _split_over_all_ranks(grid: RankGrid, rows: Rows) -> Sequence[Rows]:
    return rows.split(grid.size)


def _join_all_ranks(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return join(outputs)


DP_PROTO = Protocol("DP_PROTO", _split_over_all_ranks, _join_all_ranks)
