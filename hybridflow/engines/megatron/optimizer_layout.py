"""The boxes of canonical tensors that each rank's optimizer state holds. Pure.

Adam runs on Megatron's distributed optimizer: of every unit's buffer each data parallel rank owns one contiguous range,
which cuts parameters anywhere. State is stored flat, one tensor per parameter that the range touches; a flat range of a
matrix is at most a partial row, whole rows, and another partial row. SGD's state has the parameters' own boxes, on
every data parallel rank. Padding of the vocabulary has state too, which is zero and in no box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hybridflow import config
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.megatron.units import units
from hybridflow.model_spec import ModelSpec
from hybridflow.topology import RankGrid


def is_distributed(optimizer: config.Optimizer) -> bool:
    """Whether the state is split over data parallel ranks. Megatron's distributed optimizer accepts Adam only."""
    return isinstance(optimizer, config.Adam)


def optimizer_layout(
    spec: ModelSpec, grid: RankGrid, optimizer: config.Optimizer, stage_layers: Sequence[int] | None = None
) -> Layout:
    """Layout of one kind of state (main parameters, or a moment); all kinds have the same.

    Errors: those of `megatron_layout`.
    """
    parameters = megatron_layout(spec, grid, stage_layers)
    if not is_distributed(optimizer):
        return parameters

    def regions(rank: int) -> list[Region]:
        at = grid.coords(rank)
        owned: dict[str, tuple[int, int]] = {}
        for unit in units(spec, grid, at, stage_layers):
            owned |= unit.owned(grid.d, at.d)
        held = (region for region in parameters.regions(rank) if region.storage in owned)
        return [part for region in held for part in flat_regions(region, *owned[region.storage])]

    return Layout(parameters.tensors, grid.size, regions)


def flat_regions(region: Region, start: int, stop: int) -> Iterator[Region]:
    """What elements `start:stop` of the flattened storage hold of `region`, stored flat from `start` on.

    The region's box spans whole rows of its storage, as all of Megatron's do.
    """
    box, shape = region.box, region.box.shape
    width = math.prod(shape[1:])
    first = region.offset[0] * width  # of the region in the flattened storage
    at, end = max(start, first), min(stop, first + box.numel)
    while at < end:
        row, column = divmod(at - first, width)
        if column or end - at < width:  # part of one row
            rows, columns = 1, min(width - column, end - at)
        else:
            rows, columns = (end - at) // width, width
        low, high = (box.start[0] + row, *box.start[1:]), (box.start[0] + row + rows, *box.stop[1:])
        if len(shape) == 2:
            low, high = (low[0], box.start[1] + column), (high[0], box.start[1] + column + columns)
        strides = (width, 1) if len(shape) == 2 else (1,)
        yield Region(Box(box.tensor, low, high), region.storage, (at - start,), strides)
        at += rows * columns
