"""The three designs of a transition from training to generation (paper, section 5.4 and table 2), as layouts. Pure.

    design      bytes received per device      peak parameters   training copy during generation
    hybridflow  (d_g - 1) / (t p) * M          M / (t_g p_g)     none: it is part of the generation shard
    vanilla     (t p - 1) / (t p) * M          M                 M / (t p)
    gather_all  (t p d - 1) / (t p d) * M      M                 M / (t p) here (the paper's system keeps M / (t p d))

`hybridflow` is what a transition should be; the other two are what other systems do, for measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.errors import ConfigError, nearest
from hybridflow.topology import GroupingRule, RankGrid

TransitionDesign = Literal["hybridflow", "vanilla", "gather_all"]


@dataclass(frozen=True)
class Design:
    """Weights go from `source` to `destination`, by way of `staging` on every rank where there is one."""

    name: TransitionDesign
    source: Layout
    staging: Layout | None
    destination: Layout

    @classmethod
    def of(cls, name: TransitionDesign, train: Layout, generate: Layout, grid: RankGrid) -> Design:
        """The layouts of design `name` for training on `grid`. Errors: ConfigError for an unknown name."""
        check_design(name)
        if name == "hybridflow":
            return cls(name, train, None, generate)
        source = zero_layout(train, grid) if name == "gather_all" else train
        return cls(name, source, whole_layout(train.tensors, train.ranks), generate)


def check_design(name: str) -> None:
    """Errors: ConfigError for an unknown design."""
    if name not in (known := get_args(TransitionDesign)):
        raise ConfigError(f"transition={name!r} is unknown.{nearest(str(name), known)}")


def grouping_rule(name: TransitionDesign) -> GroupingRule:
    """How generation groups are formed: the weaker designs take ranks in training order (paper, figure 8a)."""
    return "hybridflow" if name == "hybridflow" else "vanilla"


def zero_layout(layout: Layout, grid: RankGrid) -> Layout:
    """Each rank's own 1/(t*p*d) part: its training boxes cut over the d replicas along their first dimension.

    Rows that do not divide by d are spread as evenly as possible; what several tensor parallel ranks hold (norms)
    stays with all of them.
    """

    def regions(rank: int) -> list[Region]:
        replica = grid.coords(rank).d
        return [part for region in layout.regions(rank) if (part := _cut(region, replica, grid.d)) is not None]

    part = layout.part or (lambda rank: rank)
    return Layout(layout.tensors, layout.ranks, regions, lambda rank: (part(rank), grid.coords(rank).d))


def _cut(region: Region, index: int, parts: int) -> Region | None:
    box = region.box
    if not box.start:  # a scalar cannot be cut
        return region if index == 0 else None
    first, last = box.rows
    skip, end = ((last - first) * i // parts for i in (index, index + 1))
    if skip == end:
        return None
    own = Box(box.tensor, (first + skip, *box.start[1:]), (first + end, *box.stop[1:]))
    moved = skip if region.strides is None else skip * region.strides[0]
    return Region(own, region.storage, (region.offset[0] + moved, *region.offset[1:]), region.strides)


def whole_layout(tensors: Mapping[str, tuple[int, ...]], ranks: int) -> Layout:
    """Every rank holds every tensor, in a storage of its canonical name and shape."""
    regions = [Region(Box.whole(name, shape), name, (0,) * len(shape)) for name, shape in tensors.items()]
    return Layout(tensors, ranks, lambda rank: regions, lambda rank: 0)


def equal_storages(source: Layout, destination: Layout, rank: int) -> list[tuple[str, str]]:
    """Names of a source and a destination storage of `rank` that hold the same elements in the same places.

    Where shapes and dtypes agree too, one memory can serve both. A storage is paired once.
    """
    places = {}
    for name, regions in storage_regions(source, rank).items():
        places.setdefault(_places(regions), name)
    pairs = []
    for name, regions in storage_regions(destination, rank).items():
        if (found := places.pop(_places(regions), None)) is not None:
            pairs.append((found, name))
    return pairs


def storage_regions(layout: Layout, rank: int) -> dict[str, list[Region]]:
    """The regions of each storage of `rank`, in the layout's order."""
    out: dict[str, list[Region]] = {}
    for region in layout.regions(rank):
        out.setdefault(region.storage, []).append(region)
    return out


def _places(regions: list[Region]) -> frozenset[tuple[Box, tuple[int, ...], tuple[int, ...] | None]]:
    return frozenset((region.box, region.offset, region.strides) for region in regions)
