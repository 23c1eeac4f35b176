"""Where the keys and values of unfinished rows wait while other models have the devices: the cheapest place of each.
Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from hybridflow.config import KV
from hybridflow.settings import NonNegative, settings

CachePlace = Literal["keep", "offload", "recompute"]
"""In device memory, in host memory, or nowhere: they are computed again."""


class CachedRow(NamedTuple):
    """A row's bytes of keys and values on one rank, and the seconds in which they are computed again."""

    nbytes: float
    seconds: float


@settings
class CachePrices:
    """Seconds in which a byte moves to host memory and back (`offload`), or to another place of the device's memory and
    back (`keep`), and those of reading the weights once, if any row is computed again (`start`)."""

    offload: NonNegative
    keep: NonNegative = 0.0
    start: NonNegative = 0.0

    @classmethod
    def of(cls, memory: float, host: float, weights: float = 0.0) -> CachePrices:
        """Of a rank with `weights` bytes of parameters; bytes/s of its memory, and of copies to and from the host."""
        return cls(offload=2 / host, keep=4 / memory, start=weights / memory)  # a copy reads and writes


def cache_places(kv: KV, rows: Sequence[CachedRow], prices: CachePrices, room: float = math.inf) -> list[CachePlace]:
    """The place of each row, in order: those of "auto" take the fewest seconds. `room` bytes of device memory are free;
    with "keep" the rows that come after them are computed again."""
    if kv == "keep":
        return _places(rows, range(len(rows)), room, ("recompute",) * len(rows))
    if kv != "auto":
        return [kv] * len(rows)
    moved: list[CachePlace] = ["offload"] * len(rows)
    apart: list[CachePlace] = ["recompute" if row.seconds < prices.offload * row.nbytes else "offload" for row in rows]
    gains = [min(row.seconds / row.nbytes, prices.offload) for row in rows]
    orders = range(len(rows)), sorted(range(len(rows)), key=lambda at: -gains[at])
    room = room if prices.keep <= prices.offload else 0.0
    found = [_places(rows, order, room, rest) for order in orders for rest in (moved, apart)]
    return min(found, key=lambda places: place_seconds(rows, places, prices))


def _places(
    rows: Sequence[CachedRow], order: Iterable[int], room: float, rest: Sequence[CachePlace]
) -> list[CachePlace]:
    """In this order rows are kept as far as there is `room`."""
    out = list(rest)
    for at in order:
        if rows[at].nbytes <= room:
            out[at], room = "keep", room - rows[at].nbytes
    return out


def place_seconds(rows: Sequence[CachedRow], places: Sequence[CachePlace], prices: CachePrices) -> float:
    """Seconds in which the rows leave their places and are back."""
    out = prices.start if "recompute" in places else 0.0
    for row, place in zip(rows, places, strict=True):
        out += row.seconds if place == "recompute" else row.nbytes * getattr(prices, place)
    return out
