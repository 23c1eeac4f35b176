"""Adapters of Megatron's linear layers: the boxes of A and B on each rank, and their units. Pure.

A rank holds the columns of A [rank, in] and the rows of B [out, rank] that its part of the weight has. So of a column
parallel layer A is whole on all tensor parallel ranks, of a row parallel one B. Adapters of tensors that share a
storage, such as query, key and value, stay apart, as in peft's format; rows of one tensor that lie apart on a rank lie
in its B one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import add

from hybridflow.config import LoRA
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.lora.targets import adapter_tensors, modules, parts, trained_tensors
from hybridflow.engines.units import Unit
from hybridflow.models.hf_spec import Decoder
from hybridflow.topology import RankGrid

CHILD = "adapters"  # the module of a linear layer that has its adapters
Extent = tuple[tuple[int, int], list[tuple[int, int]]]
"""Columns of a tensor, and rows that do not touch each other, that a storage holds."""


def adapter_layout(weights: Layout, spec: Decoder, lora: LoRA, grid: RankGrid) -> Layout:
    """Layout of what is trained beside `weights`, those of `spec` on `grid`: adapters, and a value head.

    Errors: ConfigError for a target of LoRA that matches nothing.
    """
    targets = {f"{module}.weight": module for module in modules(spec, lora)}
    tensors, shapes = trained_tensors(spec, lora), spec.tensors()
    heads = tensors.keys() - adapter_tensors(spec, lora).keys()

    @cache
    def extents(rank: int) -> dict[tuple[str, str], Extent]:
        return _extents(region for region in weights.regions(rank) if region.box.tensor in targets)

    def regions(rank: int) -> list[Region]:
        here, found = extents(rank), list[Region]()
        for storage, tensor in dict.fromkeys(key for peer in grid.group(rank, "t") for key in extents(peer)):
            # of a layer of which it holds no rows a rank has A alone: all compute the columns that they exchange
            (left, right), rows = here.get((storage, tensor), ((0, shapes[tensor][1]), []))
            (a, b), at = parts(targets[tensor]), 0
            found.append(_region(Box(a, (0, left), (lora.rank, right)), storage))
            for first, last in rows:
                found.append(_region(Box(b, (first, 0), (last, lora.rank)), storage, at))
                at += last - first
        return found + [region for region in weights.regions(rank) if region.box.tensor in heads]

    return Layout(tensors, weights.ranks, regions, weights.part)


def _extents(regions: Iterable[Region]) -> dict[tuple[str, str], Extent]:
    """Of each (storage, tensor), in the order of the model."""
    found: dict[tuple[str, str], list[Box]] = {}
    for region in regions:
        found.setdefault((region.storage, region.box.tensor), []).append(region.box)
    return {
        key: ((own[0].start[1], own[0].stop[1]), _joined(sorted(box.rows for box in own))) for key, own in found.items()
    }


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, last in ranges:
        found.append((found.pop()[0], last) if found and found[-1][1] == first else (first, last))
    return found


def _region(box: Box, weight: str, row: int = 0) -> Region:
    layer, _, name = box.tensor.rpartition(".lora_")
    storage = f"{weight.removesuffix('.weight')}.{CHILD}.{layer.rpartition('.')[2]}.lora_{name}"
    return Region(box, storage, (row, 0))


def shape_of(regions: Iterable[Region]) -> tuple[int, ...]:
    """The shape of a storage of which these are all regions."""
    ends = [map(add, region.offset, region.box.shape) for region in regions]
    return tuple(map(max, zip(*ends, strict=True)))


def adapter_units(layout: Layout, rank: int, of_stage: Sequence[Unit]) -> list[Unit]:
    """The adapters of each decoder layer, which are stepped with its weights; `of_stage` are the units of these."""
    part_of = {name: unit.part for unit in of_stage for name in unit.parameters}
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for storage, regions in layout.storages(rank).items():
        if storage not in part_of:
            weight = f"{storage.partition(f'.{CHILD}.')[0]}.weight"
            found.setdefault(part_of[weight], {})[storage] = shape_of(regions)
    return [Unit(shapes, part=part) for part, shapes in found.items()]
