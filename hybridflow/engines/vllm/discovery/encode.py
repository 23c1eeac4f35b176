"""What vLLM's loader is given instead of weights, so that one can see where it puts each element. Pure.

Digits of an element's place to the base 128, plus one: whole numbers up to 128 that every 16-bit dtype holds exactly;
zero is an element that was not written. One pass over the model shows one digit: of the number of the tensor, or of
an index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Box

BASE = 128
_PRIME = 127
_FACTORS = (37, 101, 59, 83, 11, 71)  # of dimensions, in the value that checks what was found


@dataclass(frozen=True)
class Digit:
    """Digit `power` of the index of dimension `dim`, or of the tensor's number (None)."""

    dim: int | None
    power: int


def digits(tensors: Mapping[str, tuple[int, ...]]) -> list[Digit]:
    """All that is needed to name an element of `tensors`."""
    dims = max((len(shape) for shape in tensors.values()), default=0)
    out = [Digit(None, power) for power in range(_length(len(tensors)))]
    for dim in range(dims):
        longest = max(shape[dim] for shape in tensors.values() if dim < len(shape))
        out += [Digit(dim, power) for power in range(_length(longest))]
    return out


def written(
    tensors: Mapping[str, tuple[int, ...]], digit: Digit, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor full of this digit, one at a time."""
    for number, (name, shape) in enumerate(tensors.items()):
        index = torch.zeros((), dtype=torch.int64, device=device)
        if digit.dim is None:
            index = index + number
        elif digit.dim < len(shape):
            index = _upright(torch.arange(shape[digit.dim], device=device), digit.dim, len(shape))
        yield name, (index // BASE**digit.power % BASE + 1).to(dtype).expand(shape).contiguous()


def checked(
    tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with values that mix all of an element's place, one tensor at a time: see `check_values`."""
    for number, (name, shape) in enumerate(tensors.items()):
        yield name, check_values(number, Box.whole(name, shape), dtype, device)


def check_values(number: int, box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[box.shape]: what `checked` gives the elements of `box`, whose tensor has this number."""
    total = torch.full((), number * 31 % _PRIME, dtype=torch.int16, device=device)
    for dim, (a, b) in enumerate(zip(box.start, box.stop, strict=True)):
        index = torch.arange(a, b, device=device) * _FACTORS[dim] % _PRIME
        total = total + _upright(index.to(torch.int16), dim, len(box.start))
    return (total.remainder_(_PRIME) + 1).to(dtype).expand(box.shape)


def _upright(index: Tensor, dim: int, dims: int) -> Tensor:
    return index.view([-1 if d == dim else 1 for d in range(dims)])


def _length(count: int) -> int:
    """Digits of the numbers below `count`."""
    power = 1
    while BASE**power < count:
        power += 1
    return power


_CHUNK = 1 << 24  # elements compared at once
_MOST = 1 << 22  # values kept of one parameter: more than this are no boxes


@dataclass(frozen=True)
class Field:
    """Element (i, j, ...) is `values[a, b, ...]` where `kept[0][a]` is the last kept index up to i, and so on.

    `kept`: one int64 vector per dimension, ascending from 0; `values`: int64 of as many dimensions, on the host.
    """

    kept: tuple[Tensor, ...]
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Field:
        """The numbers of `tensor`, of any shape without empty dimensions and any dtype; nothing is lost.

        Errors: ValueError for values that are not whole, and for a tensor that changes too often to be worth it.
        """
        kept = [_kept(tensor, axis) for axis in range(tensor.dim())]
        if math.prod(map(len, kept)) > _MOST:
            raise ValueError("too many different values to be copies of boxes")
        grid = tensor
        for axis in sorted(range(tensor.dim()), key=lambda axis: len(kept[axis]) / tensor.shape[axis]):
            grid = grid.index_select(axis, kept[axis])  # where it shrinks most comes first
        numbers = grid.double().cpu()
        values = numbers.nan_to_num(-1.0, -1.0, -1.0).long()
        if not torch.equal(values.double(), numbers):
            raise ValueError("values that were not written as they are")
        return cls(tuple(index.cpu() for index in kept), values)

    def block(self, start: Sequence[int], stop: Sequence[int]) -> Field:
        """Elements `start[i]:stop[i]` of each dimension, none of them empty."""
        kept, values = [], self.values
        for axis, (index, a, b) in enumerate(zip(self.kept, start, stop, strict=True)):
            first = int(torch.searchsorted(index, a, right=True)) - 1
            last = int(torch.searchsorted(index, b))
            kept.append((index[first:last] - a).clamp(min=0))
            values = values.narrow(axis, first, last - first)
        return Field(tuple(kept), values)

    def plus(self, other: Field, factor: int) -> Field:
        """`self + factor * other`, element by element."""
        kept = tuple(torch.cat(pair).unique() for pair in zip(self.kept, other.kept, strict=True))
        return Field(kept, self._on(kept) + factor * other._on(kept))

    def minus(self, number: int) -> Field:
        return Field(self.kept, self.values - number)

    def at(self, index: Sequence[int]) -> int:
        places = (int(torch.searchsorted(kept, i, right=True)) - 1 for kept, i in zip(self.kept, index, strict=True))
        return int(self.values[tuple(places)])

    def steps(self, axis: int, length: int) -> tuple[Tensor, Tensor]:
        """How the numbers change along `axis`, `length` elements long: [length - 1] int64 differences between
        neighbours, and [length - 1] bool, whether they are the same wherever one looks along the other axes."""
        difference = self.values.movedim(axis, 0).reshape(self.values.shape[axis], -1).diff(dim=0)
        step, same = torch.zeros(length - 1, dtype=torch.int64), torch.ones(length - 1, dtype=torch.bool)
        if len(difference):
            at = self.kept[axis][1:] - 1
            step[at] = difference[:, 0]
            same[at] = (difference == difference[:, :1]).all(1)
        return step, same

    def _on(self, kept: Sequence[Tensor]) -> Tensor:
        """The values on a finer grid."""
        values = self.values
        for axis, (own, finer) in enumerate(zip(self.kept, kept, strict=True)):
            values = values.index_select(axis, torch.searchsorted(own, finer, right=True) - 1)
        return values


def _kept(tensor: Tensor, axis: int) -> Tensor:
    """[kept] int64: 0 and every index along `axis` whose slice differs from the one before it."""
    changed = torch.zeros(tensor.shape[axis], dtype=torch.bool, device=tensor.device)
    changed[0] = True
    length, inner = tensor.shape[0], max(1, tensor.numel() // tensor.shape[0])
    step = max(2, _CHUNK // inner)
    overlap = 1 if axis == 0 else 0  # the first slice of a chunk is compared with the last of the one before
    for first in range(0, max(1, length - overlap), step):
        part = tensor.narrow(0, first, min(step + overlap, length - first))
        n = part.shape[axis]
        if n > 1:
            differs = part.narrow(axis, 1, n - 1) != part.narrow(axis, 0, n - 1)
            differs = differs.movedim(axis, 0).reshape(n - 1, -1).any(1)
            at = first if axis == 0 else 0
            changed[at + 1 : at + n] |= differs
    return changed.nonzero()[:, 0]
