"""Canonical tensors that lie one behind the other in one parameter of transformers' model (experts), cut by FSDP. Pure.

A rank holds rows of such a parameter, so a contiguous range of its memory: of each tensor in it all, none, or rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from hybridflow.engine3d.layout import Box
from hybridflow.errors import ModelError
from hybridflow.models.spec import Part

Shapes = Mapping[str, tuple[int, ...]]


def parameter_shapes(tensors: Shapes, parts: Mapping[str, Part]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters that consist of the canonical `tensors`."""
    inside = {name for part in parts.values() for name in part.tensors}
    whole = {name: shape for name, shape in tensors.items() if name not in inside}
    return whole | {name: part.shape for name, part in parts.items() if part.tensors[0] in tensors}


def boxes_of(held: Box, tensors: Shapes, part: Part | None) -> list[Box]:
    """The boxes of canonical tensors in `held` rows of a parameter; of one that is canonical itself it alone.

    Errors: ModelError for a tensor of which a rank would hold a part of a row.
    """
    if part is None:
        return [held]
    first, last = (row * math.prod(part.shape[1:]) for row in held.rows)
    found, start = [], 0
    for name in part.tensors:
        shape = tensors[name]
        width = math.prod(shape[1:])
        low, high = max(first - start, 0), min(last - start, math.prod(shape))
        start += math.prod(shape)
        if low >= high:
            continue
        if low % width or high % width:
            raise ModelError(f"ranks cannot share {held.tensor}: one of them would hold half a row of {name}.")
        found.append(Box(name, (low // width, *(0 for _ in shape[1:])), (high // width, *shape[1:])))
    return found


def views(local: Tensor, boxes: Mapping[str, Box], tensors: Shapes, part: Part) -> dict[str, Tensor]:
    """What this rank holds of a parameter, as its canonical tensors; `boxes` are those of this rank by name."""
    flat, at = local.view(-1), 0
    found = {}
    for name in part.tensors:
        rows = boxes[name].shape[0] if name in boxes else 0
        size = rows * math.prod(tensors[name][1:])
        found[name] = flat[at : at + size].view(rows, *tensors[name][1:])
        at += size
    return found
