"""Boxes of canonical tensors, and layouts: which rank holds which boxes. Pure.

A *canonical* tensor has its Hugging Face name and shape. A `Box` is an index range of one; a `Region` says where a
box lives in a rank's own storage; a `Layout` lists the regions of every rank. Megatron, FSDP, vLLM and a directory of
safetensors each have one adapter that yields a layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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

    def subtract(self, other: Box) -> list[Box]:
        """Disjoint boxes that cover `self` minus `other`."""
        common = self.intersect(other)
        if common is None:
            return [self]
        rest, start, stop = [], list(self.start), list(self.stop)
        for i in range(len(start)):
            if start[i] < common.start[i]:
                rest.append(Box(self.tensor, tuple(start), (*stop[:i], common.start[i], *stop[i + 1 :])))
            if common.stop[i] < stop[i]:
                rest.append(Box(self.tensor, (*start[:i], common.stop[i], *start[i + 1 :]), tuple(stop)))
            start[i], stop[i] = common.start[i], common.stop[i]
        return rest

    def split(self, max_numel: int) -> list[Box]:
        """Disjoint boxes of at most `max_numel` (at least one) elements that cover this one, in index order."""
        if self.numel <= max_numel or self.numel <= 1:
            return [self]
        axis = next(i for i, size in enumerate(self.shape) if size > 1)
        length, inner = self.shape[axis], self.numel // self.shape[axis]
        step = max(1, max_numel // inner)
        parts = []
        for at in range(self.start[axis], self.start[axis] + length, step):
            end = min(at + step, self.stop[axis])
            start = (*self.start[:axis], at, *self.start[axis + 1 :])
            stop = (*self.stop[:axis], end, *self.stop[axis + 1 :])
            parts += Box(self.tensor, start, stop).split(max_numel)
        return parts

    def __str__(self) -> str:
        return f"{self.tensor}[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


def partition(items: Iterable[tuple[Box, Label]]) -> list[tuple[Box, list[Label]]]:
    """Cut labelled boxes of one tensor into disjoint boxes, each with the labels of all boxes that contain it.

    Sorted by start. Boxes that are equal or disjoint, the usual case, stay whole, and n disjoint row ranges cost
    n log n: only boxes whose rows overlap are compared with each other. Empty boxes vanish.
    """
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
    `offset[0] + sum(i * strides)`: part of a flattened parameter, as distributed optimizers keep it.
    """

    box: Box
    storage: str
    offset: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    def index(self, part: Box | None = None) -> tuple[slice, ...]:
        """Slices into the storage for `part` of this region's box (the whole box when omitted); not of a flat one.

        Errors: ValueError unless the offset has one number per dimension, which planning checks.
        """
        part = part or self.box
        starts = [o + p - b for o, p, b in zip(self.offset, part.start, self.box.start, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(starts, part.shape, strict=True))

    def view(self, tensor: Tensor, part: Box | None = None) -> Tensor:
        """The elements of `part` [part.shape] in the storage's tensor, sharing its memory.

        Errors: LayoutError when the tensor is too small for them.
        """
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
    regions, so planners query one of them (None: every rank differs).
    """

    tensors: Mapping[str, tuple[int, ...]]
    ranks: int
    regions: Callable[[int], Sequence[Region]]
    part: Callable[[int], Hashable] | None = None

    def storages(self, rank: int) -> dict[str, list[Region]]:
        """The regions of each storage of `rank`, in the layout's order."""
        out: dict[str, list[Region]] = {}
        for region in self.regions(rank):
            out.setdefault(region.storage, []).append(region)
        return out

    def placed(self, members: Sequence[int], ranks: int) -> Layout:
        """This layout in a larger group of `ranks` ranks: its rank i is `members[i]`, the others hold nothing.

        Errors: LayoutError unless `members` are distinct ranks of the group, one per rank of the layout.
        """
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

    Where shapes and dtypes agree too, one memory can serve both. A storage is paired once.
    """
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
