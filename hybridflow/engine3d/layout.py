"""Boxes of canonical tensors, layouts: which rank holds which boxes, and the pieces of two layouts. Pure.

A *canonical* tensor has its Hugging Face name and shape. A `Box` is an index range of one; a `Region` says where a
box lives in a rank's own storage; a `Layout` lists the regions of every rank. Megatron, FSDP, vLLM and a directory of
safetensors each have one adapter that yields a layout.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING, TypeVar

from hybridflow.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

Label = TypeVar("Label")


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open index range `start[i]:stop[i]` of each dimension of canonical tensor `tensor`."""

    tensor: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: str, shape: Sequence[int]) -> Box:
        return cls(tensor, (0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def index(self) -> tuple[slice, ...]:
        """Into the whole tensor."""
        return tuple(map(slice, self.start, self.stop))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> tuple[int, int]:
        """The range of the first dimension; a scalar counts as one row."""
        return (self.start[0], self.stop[0]) if self.start else (0, 1)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when it is empty or the tensors differ."""
        if self.tensor != other.tensor:
            return None
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(self.tensor, start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def slab(self, axis: int, start: int, stop: int) -> Box:
        """The box with `start:stop` as its range of dimension `axis`."""
        first, last = list(self.start), list(self.stop)
        first[axis], last[axis] = start, stop
        return Box(self.tensor, tuple(first), tuple(last))

    def subtract(self, other: Box) -> list[Box]:
        """Disjoint boxes that cover `self` minus `other`."""
        common = self.intersect(other)
        if common is None:
            return [self]
        rest, left = [], self
        for axis, (low, high) in enumerate(zip(common.start, common.stop, strict=True)):
            sides = ((left.start[axis], low), (high, left.stop[axis]))
            rest += [left.slab(axis, start, stop) for start, stop in sides if start < stop]
            left = left.slab(axis, low, high)
        return rest

    @property
    def first_axis(self) -> int:
        """The first dimension of more than one index. Errors: StopIteration for a box of one element."""
        return next(axis for axis, size in enumerate(self.shape) if size > 1)

    def split(self, max_numel: int) -> list[Box]:
        """Disjoint boxes of at most `max_numel` (at least one) elements that cover this one, in index order."""
        if self.numel <= max_numel or self.numel <= 1:
            return [self]
        axis = self.first_axis
        start, stop = self.start[axis], self.stop[axis]
        step = max(1, max_numel * (stop - start) // self.numel)
        slabs = [self.slab(axis, at, min(at + step, stop)) for at in range(start, stop, step)]
        return [part for slab in slabs for part in slab.split(max_numel)]

    def __str__(self) -> str:
        return f"{self.tensor}[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


def partition(items: Iterable[tuple[Box, Label]]) -> list[tuple[Box, list[Label]]]:
    """Cut labelled boxes of one tensor into disjoint boxes, each with the labels of all boxes that contain it.

    Sorted by start. Boxes that are equal or disjoint, the usual case, stay whole, and n disjoint row ranges cost
    n log n: only boxes whose rows overlap are compared with each other. Empty boxes vanish."""
    same: dict[Box, list[Label]] = {}
    for box, label in items:
        if box.numel:
            same.setdefault(box, []).append(label)
    done: list[tuple[Box, list[Label]]] = []
    cluster: list[tuple[Box, list[Label]]] = []
    cluster_stop = 0
    for box in sorted(same, key=lambda b: (b.start, b.stop)):
        if cluster and box.rows[0] >= cluster_stop:
            done += cluster
            cluster = []
        cluster_stop = max(cluster_stop, box.rows[1])
        cluster = _insert(cluster, box, same[box])
    return sorted(done + cluster, key=lambda atom: atom[0].start)


def _insert(atoms: list[tuple[Box, list[Label]]], box: Box, labels: list[Label]) -> list[tuple[Box, list[Label]]]:
    out: list[tuple[Box, list[Label]]] = []
    rest = [box]
    for atom, owners in atoms:
        common = atom.intersect(box)
        if common is None:
            out.append((atom, owners))
            continue
        out.append((common, owners + labels))
        out += [(part, owners) for part in atom.subtract(common)]
        rest = [part for piece in rest for part in piece.subtract(common)]
    return out + [(part, labels) for part in rest]


@dataclass(frozen=True, slots=True)
class Region:
    """`box` stored at `storage[offset : offset + box.shape]` of a rank's own tensor named `storage`.

    With `strides` the tensor is one-dimensional and element `box.start + i` lies at
    `offset[0] + sum(i * strides)`: part of a flattened parameter, as distributed optimizers keep it."""

    box: Box
    storage: str
    offset: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @classmethod
    def first(cls, box: Box, storage: str) -> Region:
        """Where `storage` begins with the box."""
        return cls(box, storage, (0,) * len(box.start))

    @classmethod
    def whole(cls, tensor: str, shape: Sequence[int], storage: str | None = None) -> Region:
        """A whole canonical tensor, in storage of its own name by default."""
        return cls.first(Box.whole(tensor, shape), storage or tensor)

    @classmethod
    def rows(cls, tensor: str, shape: Sequence[int], storage: str, start: int, stop: int, at: int) -> Region:
        """Rows `start:stop` of a canonical tensor of `shape`, from row `at` of the storage on."""
        zeros = (0,) * (len(shape) - 1)
        return cls(Box(tensor, (start, *zeros), (stop, *shape[1:])), storage, (at, *zeros))

    def index(self, part: Box | None = None) -> tuple[slice, ...]:
        """Slices into the storage for `part` of this region's box (the whole box when omitted); not of a flat one.
        Errors: ValueError unless the offset has one number per dimension, which planning checks."""
        part = part or self.box
        starts = [o + p - b for o, p, b in zip(self.offset, part.start, self.box.start, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(starts, part.shape, strict=True))

    def view(self, tensor: Tensor, part: Box | None = None) -> Tensor:
        """The elements of `part` [part.shape] in the storage's tensor, sharing its memory. Errors: LayoutError when the
        tensor is too small for them."""
        part = part or self.box
        if self.strides is None:
            index = self.index(part)
            if tensor.dim() == len(index) and all(s.stop <= n for s, n in zip(index, tensor.shape, strict=True)):
                return tensor[index]
            raise self._misfit(part, tensor)
        steps = [(p - b) * s for p, b, s in zip(part.start, self.box.start, self.strides, strict=True)]
        first = self.offset[0] + sum(steps)
        last = first + sum((n - 1) * s for n, s in zip(part.shape, self.strides, strict=True))
        if tensor.dim() != 1 or last >= len(tensor) or tensor.stride(0) != 1:
            raise self._misfit(part, tensor)
        return tensor.as_strided(part.shape, self.strides, tensor.storage_offset() + first)

    def _misfit(self, part: Box, tensor: Tensor) -> LayoutError:
        at = f"offset {self.offset}" if self.strides is None else f"offset {self.offset}, strides {self.strides}"
        return LayoutError(
            f"the layout puts {part} at {at} of {self.storage!r}, which has shape {tuple(tensor.shape)} and cannot "
            "hold it. The layout and the storage do not belong together."
        )


@dataclass(frozen=True)
class Layout:
    """The boxes of each rank.

    `regions(rank)` is computed on demand, so thousands of ranks cost nothing. Ranks with equal `part(rank)` hold equal
    regions, so planners query one of them (None: every rank differs). Not `complete`: only `tensors` are known."""

    tensors: Mapping[str, tuple[int, ...]]
    ranks: int
    regions: Callable[[int], Sequence[Region]]
    part: Callable[[int], Hashable] | None = None
    complete: bool = True

    def storages(self, rank: int) -> dict[str, list[Region]]:
        """The regions of each storage of `rank`, in the layout's order."""
        return self._grouped(rank, lambda region: region.storage)

    def by_tensor(self, rank: int) -> dict[str, list[Region]]:
        """The regions of each canonical tensor of `rank`, in the layout's order."""
        return self._grouped(rank, lambda region: region.box.tensor)

    def _grouped(self, rank: int, key: Callable[[Region], str]) -> dict[str, list[Region]]:
        out: dict[str, list[Region]] = {}
        for region in self.regions(rank):
            out.setdefault(key(region), []).append(region)
        return out

    def placed(self, members: Sequence[int], ranks: int) -> Layout:
        """This layout in a larger group of `ranks` ranks: its rank i is `members[i]`, the others hold nothing. Errors:
        LayoutError unless `members` are distinct ranks of the group, one per rank of the layout."""
        at = {member: i for i, member in enumerate(members)}
        if len(members) != self.ranks or len(at) != self.ranks or not all(0 <= member < ranks for member in at):
            raise LayoutError(
                f"a layout of {self.ranks} ranks cannot be placed on ranks {list(members)[:16]} of a group of {ranks}. "
                f"Give {self.ranks} different ranks from 0 to {ranks - 1}."
            )
        part = self.part or (lambda rank: rank)
        return Layout(
            self.tensors,
            ranks,
            lambda rank: self.regions(at[rank]) if rank in at else (),
            lambda rank: (part(at[rank]),) if rank in at else None,
        )


def equal_storages(source: Layout, destination: Layout, rank: int) -> list[tuple[str, str]]:
    """Names of a source and a destination storage of `rank` that hold the same elements in the same places.

    Where shapes and dtypes agree too, one memory can serve both. A storage is paired once."""
    places: dict[frozenset[object], str] = {}
    for name, regions in source.storages(rank).items():
        places.setdefault(_places(regions), name)
    pairs = []
    for name, regions in destination.storages(rank).items():
        if (found := places.pop(_places(regions), None)) is not None:
            pairs.append((found, name))
    return pairs


def _places(regions: Sequence[Region]) -> frozenset[object]:
    return frozenset((region.box, region.offset, region.strides) for region in regions)


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
    boxes of each tensor, sorted by start, with the parts that hold them."""

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
    """All pieces of `tensor` that the destination needs, in order of start: the largest boxes that no rank of the two
    layouts holds or needs partially. Errors: LayoutError when no rank holds some of the elements."""
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
