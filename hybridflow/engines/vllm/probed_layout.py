"""The layout of a group from what each rank of a replica has found in its own engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hybridflow.engine3d.layout import Layout, Region, partition
from hybridflow.errors import ModelError
from hybridflow.topology import GenerationGrid

Found = tuple[tuple[Region, ...], str | None]
"""A rank's regions, or why it has none."""


@dataclass(frozen=True)
class _Regions:
    """Of every rank of the group; it travels to the driver, so it is no closure."""

    grid: GenerationGrid
    parts: Mapping[tuple[int, int], tuple[Region, ...]]

    def __call__(self, rank: int) -> Sequence[Region]:
        return self.parts[self.part(rank)]

    def part(self, rank: int) -> tuple[int, int]:
        at = self.grid.coords(rank)
        return at.p, at.t


def probed_layout(
    tensors: Mapping[str, tuple[int, ...]], family: str, grid: GenerationGrid, found: Sequence[Found]
) -> Layout:
    """`found` is what the ranks of one replica found, in (p, t) order; all replicas are alike.

    Errors: ModelError when a rank found no layout, or when vLLM holds some of the tensors nowhere.
    """
    for rank, (_, failure) in enumerate(found):
        if failure is not None:
            raise ModelError(failure if len(found) == 1 else f"{failure} (rank {rank} of the replica)")
    held: dict[str, int] = dict.fromkeys(tensors, 0)
    boxes: dict[str, list[Region]] = {}
    for regions, _ in found:
        for region in regions:
            boxes.setdefault(region.box.tensor, []).append(region)
    for name, regions in boxes.items():
        held[name] = sum(box.numel for box, _ in partition((region.box, region) for region in regions))
    for name, shape in tensors.items():
        missing = prod(shape) - held[name]
        if missing:
            raise ModelError(
                f"vLLM keeps {missing} elements of {name} {tuple(shape)} of this {family} model in no parameter: it "
                "would not follow the training. Generate with another model."
            )
    parts = {(i // grid.t, i % grid.t): regions for i, (regions, _) in enumerate(found)}
    regions = _Regions(grid, parts)
    return Layout(tensors, grid.size, regions, regions.part)


def unbuilt_layout(tensors: Mapping[str, tuple[int, ...]], grid: GenerationGrid) -> Layout:
    """What is known of such a layout before its engines are built: the tensors. Nothing can be planned with it."""
    return Layout(tensors, grid.size, _unknown)


def _unknown(rank: int) -> Sequence[Region]:
    raise ModelError(f"where vLLM keeps the weights of rank {rank} is known when its engine is built. Ask the rank.")
