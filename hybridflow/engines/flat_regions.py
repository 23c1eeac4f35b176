"""Flat ranges of tensors as boxes: how a distributed optimizer keeps the part of a parameter that a rank owns. Pure.

Such a range cuts a tensor anywhere; of a matrix it is at most a partial row, whole rows, and another partial row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybridflow.engine3d.layout import Box, Region


def flat_regions(region: Region, start: int, stop: int) -> Iterator[Region]:
    """What elements `start:stop` of the flattened storage hold of `region`, stored flat from `start` on.

    The region's box spans whole rows of its storage, and has one dimension or two.
    """
    box, shape = region.box, region.box.shape
    width = math.prod(shape[1:])
    first = region.offset[0] * width  # of the region in the flattened storage
    at, end = max(start, first), min(stop, first + box.numel)
    while at < end:
        row, column = divmod(at - first, width)
        if column or end - at < width:  # part of one row
            rows, columns = 1, min(width - column, end - at)
        else:
            rows, columns = (end - at) // width, width
        low, high = (box.start[0] + row, *box.start[1:]), (box.start[0] + row + rows, *box.stop[1:])
        if len(shape) == 2:
            low, high = (low[0], box.start[1] + column), (high[0], box.start[1] + column + columns)
        strides = (width, 1) if len(shape) == 2 else (1,)
        yield Region(Box(box.tensor, low, high), region.storage, (at - start,), strides)
        at += rows * columns
