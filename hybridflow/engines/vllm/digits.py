"""What vLLM's loader is given instead of weights, so that one can see where it puts each element. Pure.

Digits of an element's place to the base 128, plus one: whole numbers up to 128 that every 16-bit dtype holds exactly;
zero is what nobody wrote. One pass over the model shows one digit: of the number of the tensor, or of an index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
