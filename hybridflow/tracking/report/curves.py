"""Curves of metrics with few points that still show every extreme."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

Point = tuple[float, float]


def downsample(points: Sequence[Point], buckets: int) -> list[Point]:
    """At most 2 * `buckets` + 2 of the points, in order: the first, the last, and the lowest and highest of each
    bucket of neighbours, so that no peak is lost."""
    if len(points) <= 2 * buckets + 2:
        return list(points)
    kept = {0, len(points) - 1}
    for bucket in range(buckets):
        start, stop = len(points) * bucket // buckets, len(points) * (bucket + 1) // buckets
        kept.add(min(range(start, stop), key=lambda i: points[i][1]))
        kept.add(max(range(start, stop), key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def curves(lines: Iterable[Mapping[str, Any]], buckets: int = 400) -> dict[str, list[list[float | None]]]:
    """Each metric as [steps, values], downsampled; figures that are not finite leave a gap (None)."""
    found: dict[str, list[Point]] = {}
    gaps: dict[str, list[float]] = {}
    for line in lines:
        step = line.get("step")
        if not is_number(step):
            continue
        for name, value in line.items():
            if name == "step":
                continue
            if is_number(value):
                found.setdefault(name, []).append((step, value))
            elif value is None:
                gaps.setdefault(name, []).append(step)
    out: dict[str, list[list[float | None]]] = {}
    for name, points in found.items():
        kept: list[tuple[float, float | None]] = [*downsample(points, buckets)]
        kept += [(step, None) for step in gaps.get(name, ())[: 2 * buckets]]
        kept.sort(key=lambda point: point[0])
        out[name] = [[step for step, _ in kept], [None if value is None else rounded(value) for _, value in kept]]
    return out


def is_number(value: Any) -> TypeGuard[float]:
    """A finite number; not a bool."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def rounded(value: float, digits: int = 6) -> float:
    """With this number of significant digits, which a page can show."""
    return value if type(value) is int else float(f"{value:.{digits}g}")
