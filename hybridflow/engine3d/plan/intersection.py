"""Pieces: the largest boxes that no rank of two layouts holds or needs partially. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hybridflow.engine3d.layout import Box, Layout, Region, partition
from hybridflow.errors import LayoutError

Owners = Mapping[int, tuple[Region, ...]]  # part of a layout -> its regions that contain a box


@dataclass(frozen=True, slots=True)
class Intersection:
    """`box` with the parts of the source that hold it and the parts of the destination that need it."""

    box: Box
    have: Owners
    need: Owners


@dataclass(frozen=True)
class LayoutParts:
    """The distinct parts of a layout, with the ranks and boxes of each.

    `members[part]` are ranks, ascending; `part[rank]` is -1 for a rank that holds nothing. `atoms` are disjoint
    boxes of each tensor, sorted by start, with the parts that hold them.
    """

    members: tuple[tuple[int, ...], ...]
    part: tuple[int, ...]
    atoms: Mapping[str, list[tuple[Box, Owners]]]

    @classmethod
    def of(cls, layout: Layout, ranks: int) -> LayoutParts:
        """Parts of `layout` in a group of `ranks` ranks. Errors: LayoutError for a box outside its tensor."""
        alike: dict[Hashable, tuple[Sequence[Region], list[int]]] = {}
        for rank in range(layout.ranks):
            regions = None if layout.part else tuple(layout.regions(rank))
            label = layout.part(rank) if layout.part else regions
            if label not in alike:
                alike[label] = (layout.regions(rank) if regions is None else regions, [])
            alike[label][1].append(rank)
        kept: list[tuple[int, ...]] = []
        boxes: dict[str, list[tuple[Box, tuple[int, Region]]]] = {}
        for found, members in alike.values():
            for region in found:
                _check(region, members[0], layout)
                boxes.setdefault(region.box.tensor, []).append((region.box, (len(kept), region)))
            if found:
                kept.append(tuple(members))
        part = [-1] * ranks
        for i, members in enumerate(kept):
            for rank in members:
                part[rank] = i
        return cls(tuple(kept), tuple(part), {tensor: _atoms(labelled) for tensor, labelled in boxes.items()})

    def ranks(self, owners: Owners) -> Iterator[int]:
        for part in owners:
            yield from self.members[part]


def pieces(tensor: str, source: LayoutParts, destination: LayoutParts) -> Iterator[Intersection]:
    """All pieces of `tensor` that the destination needs, in order of start.

    Errors: LayoutError when no rank holds some of the elements.
    """
    atoms = source.atoms.get(tensor, [])
    starts = [box.rows[0] for box, _ in atoms]
    reach = list(accumulate((box.rows[1] for box, _ in atoms), max))  # non-decreasing, so it can be bisected
    for box, need in destination.atoms.get(tensor, ()):
        first, last = bisect_right(reach, box.rows[0]), bisect_left(starts, box.rows[1])
        if last - first == 1 and atoms[first][0] == box:
            yield Intersection(box, atoms[first][1], need)
            continue
        near = ((box.intersect(atom), have) for atom, have in atoms[first:last])
        found = [Intersection(common, have, need) for common, have in near if common is not None]
        if sum(piece.box.numel for piece in found) != box.numel:
            held = f"only {', '.join(str(piece.box) for piece in found)}" if found else "nothing"
            raise LayoutError(
                f"rank {min(destination.ranks(need))} of the destination needs {box}, but the source ranks hold {held} "
                "of it. Every element needs a source."
            )
        yield from found


def _atoms(boxes: Sequence[tuple[Box, tuple[int, Region]]]) -> list[tuple[Box, Owners]]:
    out: list[tuple[Box, Owners]] = []
    for box, labels in partition(boxes):
        owners: dict[int, tuple[Region, ...]] = {}
        for part, region in sorted(labels, key=lambda label: label[0]):
            owners[part] = (*owners.get(part, ()), region)
        out.append((box, owners))
    return out


def _check(region: Region, rank: int, layout: Layout) -> None:
    box, shape = region.box, layout.tensors.get(region.box.tensor)
    if (
        shape is None
        or not len(shape) == len(box.start) == len(box.stop)
        or any(a < 0 or b > n for a, b, n in zip(box.start, box.stop, shape, strict=True))
    ):
        raise LayoutError(
            f"rank {rank} stores {box} in {region.storage!r}, but the layout's tensor is {shape}. "
            "The adapter that made this layout is wrong."
        )
    if region.strides is None:
        fits, wanted = len(region.offset) == len(shape), "one number per dimension"
    else:
        fits = len(region.offset) == 1 and len(region.strides) == len(shape)
        wanted = "one number, and a stride for each dimension"
    if not fits:
        raise LayoutError(
            f"rank {rank} stores {box} in {region.storage!r} at offset {region.offset} with strides {region.strides}. "
            f"The offset has to be {wanted}: the adapter that made this layout is wrong."
        )
