"""Layouts of ZeRO.

Pure. Stage 3 is FSDP that reduces the gradients of every micro-batch. In stages 1 and 2 every rank holds every
parameter, and owns the optimizer state of one share of each unit (the tensors before the decoder layers, each layer,
the tensors after them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from hybridflow.config import FSDP, ZeRO
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.fsdp import layout as fsdp
from hybridflow.engines.units import Tensors, Unit, ends_and_layers, owned_layout
from hybridflow.models.spec import Decoder, Part
from hybridflow.topology import RankGrid

check = fsdp.check


def as_fsdp(strategy: ZeRO) -> FSDP:
    """Stage 3 as settings of FSDP."""
    return FSDP(reduce_often=True, **{f.name: getattr(strategy, f.name) for f in fields(strategy) if f.name != "stage"})


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


def whole_units(tensors: Tensors, parts: Mapping[str, Part] | None = None) -> list[Unit]:
    """The units of a model whose parameters are `tensors` (canonical names, in model order), in forward order."""
    before, layers, behind = ends_and_layers(tensors)
    return [
        Unit(named, {name: part for name, part in (parts or {}).items() if part.tensors[0] in named})
        for named in (before, *layers, behind)
        if named
    ]


def parameter_layout(tensors: Tensors, ranks: int) -> Layout:
    """Every rank holds every tensor whole, in storage of its name."""
    regions = [Region(Box.whole(name, shape), name, (0,) * len(shape)) for name, shape in tensors.items()]
    return Layout(tensors, ranks, lambda rank: regions, lambda rank: 0)


def optimizer_layout(tensors: Tensors, ranks: int, parts: Mapping[str, Part] | None = None) -> Layout:
    """Layout of one kind of optimizer state; all kinds have the same."""
    cut = whole_units(tensors, parts)
    return owned_layout(parameter_layout(tensors, ranks), lambda rank: (cut, ranks, rank))
