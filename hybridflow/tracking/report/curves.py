"""Curves and samples of a run within the size of a page: few points that still show every extreme, whole iterations."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridflow.settings import is_number
from hybridflow.tracking.report.run_files import RunFiles, rounded

Point = tuple[float, float]
_BUDGET, _CHARACTERS, _TOKENS = 6_000_000, 20_000, 4_096
_STEP = re.compile(rb'\{"step": (\d{1,15}),')


def downsample(points: Sequence[Point], buckets: int) -> list[Point]:
    """At most 2 * `buckets` + 2 of the points, in order: the first, the last, and the lowest and highest of each
    bucket of neighbours, so that no peak is lost."""
    if len(points) <= 2 * buckets + 2:
        return list(points)
    kept = {0, len(points) - 1}
    for bucket in range(buckets):
        inside = range(len(points) * bucket // buckets, len(points) * (bucket + 1) // buckets)
        kept |= {min(inside, key=lambda i: points[i][1]), max(inside, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def curves(lines: Iterable[Mapping[str, Any]], buckets: int = 400) -> dict[str, list[list[float | None]]]:
    """Each metric as [steps, values], downsampled; a value that is not finite leaves a gap (None)."""
    found, gaps = defaultdict[str, list[Point]](list), defaultdict[str, list[tuple[float, None]]](list)
    for line in lines:
        if not is_number(step := line.get("step")):
            continue
        for name, value in line.items():
            if is_number(value) and name != "step":
                found[name].append((step, value))
            elif value is None:
                gaps[name].append((step, None))
    out: dict[str, list[list[float | None]]] = {}
    for name, points in found.items():
        kept = sorted([*downsample(points, buckets), *gaps[name][: 2 * buckets]], key=lambda point: point[0])
        out[name] = [[step for step, _ in kept], [None if value is None else rounded(value) for _, value in kept]]
    return out


def shown_samples(files: RunFiles, budget: int = _BUDGET) -> dict[str, Any]:
    """The rows, how many the file has, and the iterations shown and there. Every second, fourth, ... iteration before
    the last is shown where all would exceed the budget of bytes."""
    steps = defaultdict[int, list[tuple[int, int]]](list)
    for offset, text in files.raw_lines("samples.jsonl"):
        if (found := _STEP.match(text)) and text.endswith(b"}\n"):  # as the tracker writes: long lines are not parsed
            steps[int(found[1])].append((offset, len(text)))
        elif (row := files.parsed("samples.jsonl", text)) is not None:
            steps[step if type(step := row.get("step")) is int else 0].append((offset, len(text)))
    order, stride = sorted(steps), 1
    while stride < len(order) and sum(size for step in order[::-stride] for _, size in steps[step]) > budget:
        stride *= 2
    chosen, left, offsets = order[::-stride], budget, []
    for offset, size in (line for step in chosen for line in steps[step]):
        if left > 0:
            offsets.append(offset)
            left -= size
    return {
        "rows": [_shown(row) for row in files.lines_at("samples.jsonl", sorted(offsets))] if offsets else [],
        "of": sum(map(len, steps.values())),
        "steps": len(chosen),
        "steps_of": len(steps),
    }


def _shown(value: Any, depth: int = 0) -> Any:
    """The value with texts and lists of bounded length, numbers of few digits, and nothing that JSON lacks."""
    if isinstance(value, str):
        return value if len(value) <= _CHARACTERS else value[:_CHARACTERS] + "…"
    if isinstance(value, list) and depth < 6:
        return [_shown(one, depth + 1) for one in value[:_TOKENS]]
    if isinstance(value, dict) and depth < 6:
        return {name: _shown(one, depth + 1) for name, one in value.items()}
    if is_number(value):
        return rounded(value, 5)
    return value if value is None or isinstance(value, bool) else str(value)[:_CHARACTERS]
