"""Which rank holds what under ZeRO. Pure. Stage 3 is FSDP that reduces the gradients of every micro-batch.

A *unit* (the embedding, a decoder layer, the final norm with the output layer) has one flat buffer, in which its
parameters follow each other; of every unit each of N ranks owns one N-th, a contiguous share, which cuts parameters
anywhere. So work and memory are even whatever the parameters' sizes, one collective serves a unit, and a unit's
gradients can leave for their owners while those of the units before it are still computed (Rajbhandari et al. 2020,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

from hybridflow.config import FSDP, ZeRO
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.flat_regions import flat_regions
from hybridflow.engines.fsdp import layout as fsdp
from hybridflow.engines.step_partition import Tensors, ends_and_layers
from hybridflow.models.spec import Decoder, Part
from hybridflow.topology import RankGrid

ALIGNMENT = 64
"""Elements: parameters and shares begin at multiples of it, as kernels and collectives on CUDA like it."""

Range = tuple[int, int]


def as_fsdp(strategy: ZeRO) -> FSDP:
    """Stage 3 as settings of FSDP."""
    return FSDP(reduce_often=True, **{f.name: getattr(strategy, f.name) for f in fields(strategy) if f.name != "stage"})


def check(strategy: ZeRO, spec: Decoder, grid: RankGrid, role: str = "the model") -> None:
    """Errors: PlacementError for a grid of other sizes than the strategy's."""
    fsdp.check(strategy, spec, grid, role)


def weights_layout(strategy: ZeRO, spec: Decoder, grid: RankGrid) -> Layout:
    """Which rank of `grid` holds which boxes of `spec`: all, or with stage 3 a part. Errors: those of `check`."""
    check(strategy, spec, grid)
    if strategy.stage == 3:
        return fsdp.weights_layout(as_fsdp(strategy), spec, grid)
    return parameter_layout(spec.tensors(), grid.d)


def state_layout(strategy: ZeRO, spec: Decoder, grid: RankGrid) -> Layout:
    """The same for one kind of optimizer state. Errors: those of `check`."""
    check(strategy, spec, grid)
    if strategy.stage == 3:
        return fsdp.state_layout(as_fsdp(strategy), spec, grid)
    return optimizer_layout(spec.tensors(), grid.d, spec.parts)


@dataclass(frozen=True)
class FlatUnit:
    """Canonical names and shapes of the tensors that share a buffer, in its order.

    `parts` are the model's parameters that consist of several of them, which therefore lie without a gap.
    """

    parameters: Tensors
    parts: Mapping[str, Part] = field(default_factory=dict)

    @cached_property
    def modules(self) -> dict[str, Range]:
        """Where each flattened parameter of the model begins and ends in the buffer."""
        inside = {name for part in self.parts.values() for name in part.tensors}
        found = {name: place for name, place in self.places.items() if name not in inside}
        for name, part in self.parts.items():
            found[name] = (self.places[part.tensors[0]][0], self.places[part.tensors[-1]][1])
        return found

    @cached_property
    def places(self) -> dict[str, Range]:
        """Where each flattened tensor begins and ends in the buffer."""
        placed, end = {}, 0
        joined = {name for part in self.parts.values() for name in part.tensors[1:]}
        for name, shape in self.parameters.items():
            start = end if name in joined else _aligned(end, ALIGNMENT)
            end = start + math.prod(shape)
            placed[name] = (start, end)
        return placed

    def share(self, ranks: int) -> int:
        """Elements that each of `ranks` ranks owns; with padding, `ranks` of them are the buffer."""
        end = max(stop for _, stop in self.places.values())
        return _aligned(end, ranks * ALIGNMENT) // ranks

    def owned(self, ranks: int, at: int) -> dict[str, Range]:
        """The range of each flattened parameter that rank `at` of `ranks` owns; no entry where it is empty."""
        share, found = self.share(ranks), {}
        for name, (start, stop) in self.places.items():
            first, last = max(start, at * share), min(stop, (at + 1) * share)
            if first < last:
                found[name] = (first - start, last - start)
        return found


def units(tensors: Tensors, parts: Mapping[str, Part] | None = None) -> list[FlatUnit]:
    """The units of a model whose parameters are `tensors` (canonical names, in model order), in forward order: what
    stands before its layers, each of them, and what stands behind."""
    before, layers, behind = ends_and_layers(tensors)
    found = []
    for named in (before, *layers, behind):
        own = {name: part for name, part in (parts or {}).items() if part.tensors[0] in named}
        if named:
            found.append(FlatUnit(named, own))
    return found


def parameter_layout(tensors: Tensors, ranks: int) -> Layout:
    """Every rank holds every tensor whole, in storage of its name."""
    regions = [Region(Box.whole(name, shape), name, (0,) * len(shape)) for name, shape in tensors.items()]
    return Layout(tensors, ranks, lambda rank: regions, lambda rank: 0)


def optimizer_layout(tensors: Tensors, ranks: int, parts: Mapping[str, Part] | None = None) -> Layout:
    """Layout of one kind of optimizer state (main parameters, or a moment); all kinds have the same.

    State is stored flat, one tensor per parameter that a rank's share touches. Parameters have one or two dimensions.
    """
    whole, cut = parameter_layout(tensors, ranks), units(tensors, parts)

    def regions(rank: int) -> list[Region]:
        owned: dict[str, Range] = {}
        for unit in cut:
            owned |= unit.owned(ranks, rank)
        held = (region for region in whole.regions(rank) if region.storage in owned)
        return [part for region in held for part in flat_regions(region, *owned[region.storage])]

    return Layout(tensors, ranks, regions)


def _aligned(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
