"""Boxes of canonical tensors, and layouts: which rank holds which boxes. Pure.

A *canonical* tensor has its Hugging Face name and shape. A `Box` is an index range of one; a `Region` says where a
box lives in a rank's own storage; a `Layout` lists the regions of every rank. Megatron, FSDP, vLLM and a directory of
safetensors each have one adapter that yields a layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


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
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when it is empty or the tensors differ."""
        if self.tensor != other.tensor:
            return None
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(self.tensor, start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def subtract(self, other: Box) -> list[Box]:
        """Disjoint boxes that cover what is in `self` and not in `other`."""
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


@dataclass(frozen=True, slots=True)
class Region:
    """`box` stored at `storage[offset : offset + box.shape]` of a rank's own parameter named `storage`."""

    box: Box
    storage: str
    offset: tuple[int, ...]

    def index(self, part: Box | None = None) -> tuple[slice, ...]:
        """Slices into the storage for `part` of this region's box (the whole box when omitted)."""
        part = part or self.box
        starts = [o + p - b for o, p, b in zip(self.offset, part.start, self.box.start, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(starts, part.shape, strict=True))


@dataclass(frozen=True)
class Layout:
    """Which rank holds which boxes. `regions(rank)` is computed on demand, so thousands of ranks cost nothing."""

    tensors: Mapping[str, tuple[int, ...]]
    ranks: int
    regions: Callable[[int], Sequence[Region]]
