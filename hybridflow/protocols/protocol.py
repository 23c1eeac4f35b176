"""Protocol: a pure value that splits the inputs of a group call over ranks and joins their outputs; the eight of the
paper's table 3, and that of one generation replica. Letters: p, t, d are the pipeline, tensor and data parallel index
of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self
from typing import Protocol as Structural

from hybridflow.errors import ProtocolError
from hybridflow.topology import RankGrid


class _Skip(Enum):
    """Stands for a rank that takes no part in a call."""

    SKIP = "SKIP"


SKIP = _Skip.SKIP


class Rows(Structural):
    """A `Batch` or references to one, which protocols split without reading data."""

    def split(self, parts: int) -> Sequence[Self]: ...


@dataclass(frozen=True)
class Protocol:
    """Two pure functions of a rank grid and references, without processes or tensors.

    `distribute(grid, rows)` returns one input per rank of the grid (`SKIP` for a rank that is not called);
    `collect(grid, outputs)` joins the outputs, one per rank in rank order. `prepared=True` says that every argument is
    already a list with one item per rank.
    """

    name: str
    distribute: Callable[[RankGrid, Any], Sequence[Any]] = field(repr=False)
    collect: Callable[[RankGrid, Sequence[Any]], Any] = field(repr=False)
    prepared: bool = False

    def split(self, grid: RankGrid, rows: Any) -> list[Any]:
        """`distribute`, checked: one input for each rank. Errors: ProtocolError."""
        inputs = list(self.distribute(grid, rows))
        if len(inputs) != grid.size:
            raise ProtocolError(f"{self.name}.distribute returned {len(inputs)} inputs for {grid.size} ranks.")
        return inputs


def join(outputs: Sequence[Any]) -> Any:
    """Rows of all outputs concatenated; outputs other than batches become a list."""
    if not outputs:
        raise ProtocolError("a protocol collected no outputs.")
    concat = getattr(type(outputs[0]), "concat", None)
    return concat(list(outputs)) if concat else list(outputs)


def _same_to_every_rank(grid: RankGrid, rows: Any) -> list[Any]:
    return [rows] * grid.size


def _to_rank_zero(grid: RankGrid, rows: Any) -> list[Any]:
    return [rows] + [SKIP] * (grid.size - 1)


def _one_item_per_rank(grid: RankGrid, items: Any) -> list[Any]:
    if not isinstance(items, Sequence) or isinstance(items, str) or len(items) != grid.size:
        found = f"{len(items)} items" if isinstance(items, Sequence) else type(items).__name__
        raise ProtocolError(f"ALL_TO_ALL takes a list with one item per rank ({grid.size}), got {found}.")
    return list(items)


def _split_over_all_ranks(grid: RankGrid, rows: Rows) -> Sequence[Rows]:
    return rows.split(grid.size)


def _split_over_d(grid: RankGrid, rows: Rows) -> list[Rows]:
    parts = rows.split(grid.d)
    return [parts[grid.coords(rank).d] for rank in range(grid.size)]


def _split_over_generation_replicas(grid: RankGrid, rows: Rows) -> list[Rows]:
    generation = grid.generation()
    parts = rows.split(generation.replicas)
    return [parts[generation.replica(rank)] for rank in range(grid.size)]


def _split_over_p_and_d(grid: RankGrid, rows: Rows) -> list[Rows]:
    parts = rows.split(grid.p * grid.d)
    return [parts[at.d * grid.p + at.p] for at in map(grid.coords, range(grid.size))]


def _from_every_rank(grid: RankGrid, outputs: Sequence[Any]) -> list[Any]:
    return list(outputs)


def _from_rank_zero(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return outputs[0]


def _from_every_stage(grid: RankGrid, outputs: Sequence[Any]) -> list[Any]:
    return [outputs[grid.rank(p=p, t=0, d=0)] for p in range(grid.p)]


def _join_all_ranks(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return join(outputs)


def _join_last_stages(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return join([outputs[grid.rank(p=-1, t=0, d=d)] for d in range(grid.d)])


def _join_generation_replicas(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    generation = grid.generation()
    return join([outputs[generation.rank(micro=m, d=d)] for d in range(generation.d) for m in range(generation.micro)])


def _join_stages_as_replicas(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return join([outputs[grid.rank(p=p, t=0, d=d)] for d in range(grid.d) for p in range(grid.p)])


ONE_TO_ALL = Protocol("ONE_TO_ALL", _same_to_every_rank, _from_every_rank)
"""The same arguments to every rank; a list of all outputs."""
ONE_TO_ONE = Protocol("ONE_TO_ONE", _to_rank_zero, _from_rank_zero)
"""Rank 0 only, and its output."""
ALL_TO_ALL = Protocol("ALL_TO_ALL", _one_item_per_rank, _from_every_rank, prepared=True)
"""Item i of a list to rank i; a list of all outputs."""
DP_PROTO = Protocol("DP_PROTO", _split_over_all_ranks, _join_all_ranks)
"""Rows split over all ranks, outputs joined."""
THREE_D_PROTO = Protocol("THREE_D_PROTO", _split_over_d, _join_last_stages)
"""Rows split over the data parallel replicas; outputs of their last pipeline stages, joined."""
THREE_D_ALL_MICRO_DP = Protocol("THREE_D_ALL_MICRO_DP", _split_over_generation_replicas, _join_generation_replicas)
"""Rows split over the generation replicas; outputs of their first ranks, joined."""
THREE_D_PP_ONLY = Protocol("THREE_D_PP_ONLY", _same_to_every_rank, _from_every_stage)
"""The same arguments to every rank; a list with one output per pipeline stage."""
THREE_D_PP_AS_DP = Protocol("THREE_D_PP_AS_DP", _split_over_p_and_d, _join_stages_as_replicas)
"""Rows split over pipeline stages and replicas, as if both were data parallel; outputs joined."""


def on_replica(number: int) -> Protocol:
    """Everything to the ranks of generation replica `number`, and the output of its first rank.

    Errors: ProtocolError for a replica that the grid does not have.
    """

    def distribute(grid: RankGrid, rows: Any) -> list[Any]:
        generation = grid.generation()
        if type(number) is not int or not 0 <= number < generation.replicas:
            raise ProtocolError(
                f"replica={number!r}: this group has the generation replicas 0..{generation.replicas - 1}."
            )
        return [rows if generation.replica(rank) == number else SKIP for rank in range(grid.size)]

    def collect(grid: RankGrid, outputs: Sequence[Any]) -> Any:
        return next(output for output in outputs if output is not SKIP)

    return Protocol("ON_REPLICA", distribute, collect)
