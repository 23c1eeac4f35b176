"""Flat ranges of tensors as boxes: how a distributed optimizer keeps the part of a parameter that a rank owns. Pure.

Such a range cuts a tensor anywhere; of a matrix it is at most a partial row, whole rows, and another partial row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import add

from hybridflow.engine3d.layout import Box, Region


def flat_regions(region: Region, start: int, stop: int) -> Iterator[Region]:
    """What elements `start:stop` of the flattened storage hold of `region`, stored flat from `start` on.

    The region's box spans whole rows of its storage.
    """
    box, shape = region.box, region.box.shape
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    first = region.offset[0] * strides[0]  # of the region in the flattened storage
    at, end = max(start, first), min(stop, first + box.numel)
    while at < end:
        place, rest = [], at - first
        for stride in strides:
            place.append(rest // stride)
            rest %= stride
        # the outermost dimension along which whole blocks follow
        axis = next(i for i, stride in enumerate(strides) if not any(place[i + 1 :]) and end - at >= stride)
        count = min(shape[axis] - place[axis], (end - at) // strides[axis])
        extent = (*(1 for _ in range(axis)), count, *shape[axis + 1 :])
        low = tuple(map(add, box.start, place))
        yield Region(Box(box.tensor, low, tuple(map(add, low, extent))), region.storage, (at - start,), strides)
        at += count * strides[axis]
