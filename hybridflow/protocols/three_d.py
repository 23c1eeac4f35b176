"""The four protocols of models with 3D parallelism (paper, table 3 and section 5.3).

Letters: p, t, d are the pipeline, tensor and data parallel index of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.protocols.protocol import Protocol, Rows, join
from hybridflow.topology import RankGrid


def _split_over_d(grid: RankGrid, rows: Rows) -> list[Rows]:
    parts = rows.split(grid.d)
    return [parts[grid.coords(rank).d] for rank in range(grid.size)]


def _join_last_stages(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return join([outputs[grid.rank(p=-1, t=0, d=d)] for d in range(grid.d)])


def _split_over_generation_replicas(grid: RankGrid, rows: Rows) -> list[Rows]:
    generation = grid.generation()
    parts = rows.split(generation.replicas)
    return [parts[generation.replica(rank)] for rank in range(grid.size)]


def _join_generation_replicas(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    generation = grid.generation()
    first: dict[int, Any] = {}
    for rank in range(grid.size):
        if (at := generation.coords(rank)).p == 0 and at.t == 0:
            first[generation.replica(rank)] = outputs[rank]
    return join([first[replica] for replica in range(generation.replicas)])


def _same_to_every_rank(grid: RankGrid, rows: Rows) -> list[Rows]:
    return [rows] * grid.size


def _from_every_stage(grid: RankGrid, outputs: Sequence[Any]) -> list[Any]:
    return [outputs[grid.rank(p=p, t=0, d=0)] for p in range(grid.p)]


def _split_over_p_and_d(grid: RankGrid, rows: Rows) -> list[Rows]:
    parts = rows.split(grid.p * grid.d)
    return [parts[at.d * grid.p + at.p] for at in map(grid.coords, range(grid.size))]


def _join_stages_as_replicas(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return join([outputs[grid.rank(p=p, t=0, d=d)] for d in range(grid.d) for p in range(grid.p)])


THREE_D_PROTO = Protocol("THREE_D_PROTO", _split_over_d, _join_last_stages)
THREE_D_ALL_MICRO_DP = Protocol("THREE_D_ALL_MICRO_DP", _split_over_generation_replicas, _join_generation_replicas)
THREE_D_PP_ONLY = Protocol("THREE_D_PP_ONLY", _same_to_every_rank, _from_every_stage)
THREE_D_PP_AS_DP = Protocol("THREE_D_PP_AS_DP", _split_over_p_and_d, _join_stages_as_replicas)
