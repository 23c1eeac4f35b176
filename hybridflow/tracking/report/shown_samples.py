"""Samples that a page shows: whole iterations, evenly spread, within a budget of bytes."""

from __future__ import annotations

import re
from typing import Any

from hybridflow.tracking.report.curves import is_number, rounded
from hybridflow.tracking.report.run_files import RunFiles, as_object

_BUDGET, _CHARACTERS, _TOKENS = 6_000_000, 20_000, 4_096
_STEP = re.compile(rb'\{"step": (\d{1,15}),')


def shown_samples(files: RunFiles, budget: int = _BUDGET) -> dict[str, Any]:
    """The rows, how many the file has, and the iterations shown and there. Every second, fourth, ... iteration before
    the last is shown where all would exceed the budget."""
    steps: dict[int, list[tuple[int, int]]] = {}
    for offset, text in files.raw_lines("samples.jsonl"):
        if (step := _step_of(text)) is not None:
            steps.setdefault(step, []).append((offset, len(text)))
        elif text.strip():
            files.damaged["samples.jsonl"] = files.damaged.get("samples.jsonl", 0) + 1
    order, stride = sorted(steps), 1
    while stride < len(order) and _size(steps, order[::-stride]) > budget:
        stride *= 2
    chosen, left, offsets = order[::-stride], budget, []
    for step in chosen:
        for offset, size in steps[step]:
            if left > 0:
                offsets.append(offset)
                left -= size
    offsets.sort()
    return {
        "rows": [_shown(row) for row in files.lines_at("samples.jsonl", offsets)] if offsets else [],
        "of": sum(map(len, steps.values())),
        "steps": len(chosen),
        "steps_of": len(steps),
    }


def _step_of(text: bytes) -> int | None:
    """The iteration of a line, which the tracker writes first: long lines are not parsed. None: a damaged line."""
    if (found := _STEP.match(text)) and text.endswith(b"}\n"):
        return int(found[1])
    if (row := as_object(text)) is None:
        return None
    step = row.get("step")
    return step if type(step) is int else 0


def _size(steps: dict[int, list[tuple[int, int]]], chosen: list[int]) -> int:
    return sum(size for step in chosen for _, size in steps[step])


def _shown(value: Any, depth: int = 0) -> Any:
    """Texts and lists of bounded length, numbers of few digits, no figure that JSON lacks."""
    if isinstance(value, str):
        return value if len(value) <= _CHARACTERS else value[:_CHARACTERS] + "…"
    if isinstance(value, list):
        return [_shown(one, depth + 1) for one in value[:_TOKENS]] if depth < 6 else str(value)[:_CHARACTERS]
    if isinstance(value, dict):
        return {name: _shown(one, depth + 1) for name, one in value.items()} if depth < 6 else str(value)[:_CHARACTERS]
    if is_number(value):
        return rounded(value, 5)
    return value if value is None or isinstance(value, bool) else str(value)[:_CHARACTERS]
