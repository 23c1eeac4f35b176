"""Adapters of Megatron's linear layers: the boxes of A and B on each rank, and their units. Pure.

A rank holds the columns of A [rank, in] and the rows of B [out, rank] that its part of the weight has. So of a column
parallel layer A is whole on all tensor parallel ranks, of a row parallel one B. Adapters of tensors that share a
storage, such as query, key and value, stay apart, as in peft's format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from hybridflow.config import LoRA
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.lora.targets import adapter_tensors, modules, parts, trained_tensors
from hybridflow.engines.units import Unit
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid

CHILD = "adapters"  # the module of a linear layer that has its adapters


def adapter_layout(weights: Layout, spec: ModelSpec, lora: LoRA, grid: RankGrid) -> Layout:
    """Layout of what is trained beside `weights`, those of `spec` on `grid`: adapters, and a value head.

    Errors: ConfigError for a target of LoRA that matches nothing.
    """
    targets = {f"{module}.weight": module for module in modules(spec, lora)}
    tensors, shapes = trained_tensors(spec, lora), spec.tensors()
    heads = tensors.keys() - adapter_tensors(spec, lora).keys()

    @cache
    def extents(rank: int) -> dict[tuple[str, str], Box]:
        return _extents(region for region in weights.regions(rank) if region.box.tensor in targets)

    def regions(rank: int) -> list[Region]:
        here, found = extents(rank), list[Region]()
        for storage, tensor in dict.fromkeys(key for peer in grid.group(rank, "t") for key in extents(peer)):
            # of a layer of which it holds no rows a rank has A alone: all compute the columns that they exchange
            box = here.get((storage, tensor), Box(tensor, (0, 0), (0, shapes[tensor][1])))
            (first, left), (last, right) = box.start, box.stop
            a, b = parts(targets[tensor])
            found.append(_region(Box(a, (0, left), (lora.rank, right)), storage))
            if first < last:
                found.append(_region(Box(b, (first, 0), (last, lora.rank)), storage))
        return found + [region for region in weights.regions(rank) if region.box.tensor in heads]

    return Layout(tensors, weights.ranks, regions, weights.part)


def _extents(regions: Iterable[Region]) -> dict[tuple[str, str], Box]:
    """(storage, tensor) -> the box around the tensor's regions there, in the order of the model."""
    found: dict[tuple[str, str], Box] = {}
    for region in regions:
        box, known = region.box, found.get((region.storage, region.box.tensor), region.box)
        start, stop = map(min, known.start, box.start), map(max, known.stop, box.stop)
        found[region.storage, box.tensor] = Box(box.tensor, tuple(start), tuple(stop))
    return found


def _region(box: Box, weight: str) -> Region:
    layer, _, name = box.tensor.rpartition(".lora_")
    storage = f"{weight.removesuffix('.weight')}.{CHILD}.{layer.rpartition('.')[2]}.lora_{name}"
    return Region(box, storage, (0, 0))


def adapter_units(layout: Layout, rank: int, of_stage: Sequence[Unit]) -> list[Unit]:
    """The adapters of each decoder layer, which are stepped with its weights; `of_stage` are the units of these."""
    part_of = {name: unit.part for unit in of_stage for name in unit.parameters}
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for region in layout.regions(rank):
        if region.storage not in part_of:
            weight = f"{region.storage.partition(f'.{CHILD}.')[0]}.weight"
            found.setdefault(part_of[weight], {})[region.storage] = region.box.shape
    return [Unit(shapes, part=part) for part, shapes in found.items()]
