"""Seconds in which devices work, wait for inputs or are idle, and in which roles overlap: arithmetic on intervals."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from hybridflow.tracking.report.run_files import is_number

Interval = tuple[float, float]
KINDS = ("call", "transfer", "wait", "switch", "stage")  # the last two are parts of a call
DRIVER = "driver"
_SIZES = ("bytes_in", "bytes_out", "rows", "tokens", "memory_before", "memory_after", "peak")
_TIMES, _WAIT_TIMES = ("start", "ready", "end"), ("start", "end", "end")


class Activity(NamedTuple):
    """An event with a duration on one device (`pool/rank`, or the driver): inputs arrive at `ready`."""

    kind: str
    step: int
    seq: int
    role: str
    method: str
    device: str
    start: float
    ready: float
    end: float
    sizes: Sequence[float | None]  # `_SIZES`
    failed: bool

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Activity | None:
        """None for an event of another kind or without usable times."""
        kind, step, seq = event.get("kind"), event.get("step"), event.get("seq", 0)
        times = [event.get(name) for name in (_WAIT_TIMES if kind == "wait" else _TIMES)]
        if kind not in KINDS or type(step) is not int or not all(is_number(time) for time in times):
            return None
        start, ready, end = cast("list[float]", times)
        ready = min(max(ready, start), end)
        names = [event.get(name) for name in ("role", "method", "pool")]
        rank, device = event.get("rank"), DRIVER
        if kind == "wait":
            names = [DRIVER, str(event.get("what", kind)), ""]
        elif all(isinstance(name, str) for name in names) and type(rank) is int and type(seq) is int:
            device = f"{names[2]}/{rank}"
        else:
            return None
        sizes = [size if is_number(size := event.get(name)) else None for name in _SIZES]
        role, method, _ = cast("list[str]", names)
        failed = event.get("failed") is True
        return cls(kind, step, seq, role, method, device, start, ready, end, sizes, failed) if start <= end else None

    @property
    def memory(self) -> float:
        """The largest in bytes; 0 if the event has none."""
        return max(size or 0 for size in self.sizes[4:])


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in order."""
    out: list[Interval] = []
    for start, end in sorted(one for one in intervals if one[1] > one[0]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def seconds(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    return sum(end - start for start, end in merged(intervals))


def overlapping(sets: Iterable[Iterable[Interval]]) -> float:
    """Seconds that at least two of the sets cover."""
    disjoint = [merged(one) for one in sets]
    edges = sorted((at, change) for one in disjoint for start, end in one for at, change in ((start, 1), (end, -1)))
    total, depth = 0.0, 0
    for (at, change), (later, _) in itertools.pairwise(edges):
        depth += change
        total += (later - at) if depth >= 2 else 0.0
    return total


def shares(activities: Iterable[Activity], window: Interval) -> dict[str, tuple[float, float]]:
    """Per device the seconds inside `window` that it works, and waits for inputs without working; the rest is idle."""
    by_device: dict[str, list[Activity]] = {}
    for one in activities:
        by_device.setdefault(one.device, []).append(one)
    out = {}
    for device, own in by_device.items():
        busy = seconds(clipped((one.ready, one.end), window) for one in own)
        out[device] = busy, max(seconds(clipped((one.start, one.end), window) for one in own) - busy, 0.0)
    return out


def role_overlap(activities: Iterable[Activity], window: Interval) -> float:
    """Seconds inside `window` in which at least two roles work, on any device."""
    by_role: dict[str, list[Interval]] = {}
    for one in activities:
        by_role.setdefault(one.role, []).append(clipped((one.ready, one.end), window))
    return overlapping(by_role.values())


def clipped(interval: Interval, window: Interval) -> Interval:
    return max(interval[0], window[0]), min(interval[1], window[1])
