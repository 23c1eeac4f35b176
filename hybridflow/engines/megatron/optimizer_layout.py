"""The boxes of canonical tensors that each rank's optimizer state holds. Pure.

Adam runs on Megatron's distributed optimizer: of every unit's buffer each data parallel rank owns one contiguous range,
which cuts parameters anywhere. State is stored flat, one tensor per parameter that the range touches. SGD's state has
the parameters' own boxes, on every data parallel rank. Padding of the vocabulary has state too, which is zero and in no
box.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow import config
from hybridflow.engine3d.layout import Layout, Region
from hybridflow.engines.flat_regions import flat_regions
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
