"""The report of one run, or of two side by side: one HTML file that needs no network. It has curves and samples
within its size: few points that still show every extreme, whole iterations."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.settings import is_number
from hybridflow.tracking.kept_files import replace_file
from hybridflow.tracking.report.event_summary import EventSummary
from hybridflow.tracking.report.limits import find_limits
from hybridflow.tracking.report.run_files import RunFiles, rounded

_SCRIPTS = ("page_elements.js", "page_curves.js", "page_timeline.js", "page_samples.js", "page.js")
_CURVE_POINTS, _MOST_MARKS = 40_000, 2_000
Point = tuple[float, float]
_BUDGET, _CHARACTERS, _TOKENS = 6_000_000, 20_000, 4_096
_STEP = re.compile(rb'\{"step": (\d{1,15}),')


def write_report(
    run: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the page of `run`, compared with `other`, to `output` (default: `report.html` in the run's directory).

    Shows what the directory has: config.yaml, metrics.jsonl, samples.jsonl, events.jsonl, notes.json.
    Errors: ConfigError for a directory without a run, and for a file that cannot be written.
    """
    path = Path(output) if output is not None else Path(run) / "report.html"
    content = report_html([Path(one) for one in (run, other) if one is not None])
    try:
        replace_file(path, content.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Give another file with --output.") from error
    return path


def report_html(directories: Sequence[Path]) -> str:
    """The page of one or two run directories. Errors: ConfigError for a directory without a run."""
    runs = [_run_data(RunFiles.of(directory)) for directory in directories]
    short = [directory.resolve().name or str(directory) for directory in directories]
    equal = len(set(short)) < len(short)
    for run, name, directory in zip(runs, short, directories, strict=True):
        run["name"] = str(directory) if equal else name
    made = time.strftime("%Y-%m-%d %H:%M")
    configs = [run.pop("config") for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    settings = [[key, *(config.get(key) for config in configs)] for key in keys]
    if len(runs) > 1:  # those that differ come first
        settings.sort(key=lambda row: len(set(row[1:])) == 1)
    data = {"made": made, "runs": runs, "config": settings}
    script = "".join(map(_part, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = html.escape(" and ".join(run["name"] for run in runs))
    parts = {"TITLE": title, "DIGEST": digest, "STYLE": _part("page.css"), "DATA": as_script(data), "SCRIPT": script}
    return re.sub(r"\{(TITLE|DIGEST|STYLE|DATA|SCRIPT)\}", lambda found: parts[found[1]], _part("page.html"))


def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _run_data(files: RunFiles) -> dict[str, Any]:
    """The page's data of one run."""
    lines = list(files.lines("metrics.jsonl"))
    names = {name for line in lines for name in line}
    events = EventSummary(files)
    run = events.runs[-1] if events.runs else {}
    seconds = run["plan"].get("seconds") if isinstance(run.get("plan"), dict) else None
    limits = find_limits(list(events.sampled_events())) if run or events.views() else []
    data = {
        "directory": str(files.directory),
        "iterations": max((line["step"] for line in lines if type(line.get("step")) is int), default=0),
        "metrics": curves(lines, buckets=min(400, max(_CURVE_POINTS // max(len(names), 1) // 2, 20))),
        "config": files.values("config.yaml"),
        "notes": files.values("notes.json"),
        "roles": run.get("roles"),
        "plan": seconds if is_number(seconds) else None,
        "devices": events.devices(),
        "memory": events.memory,
        "held": events.held,
        "calls": events.calls(),
        "marks": events.marks[:_MOST_MARKS],
        "marks_of": len(events.marks),
        "views": events.views(),
        "limits": [asdict(limit) for limit in limits],
        "samples": shown_samples(files),
    }
    return data | {"damaged": dict(files.damaged), "unusable": events.unusable}


def as_script(data: Any) -> str:
    """JSON for a script element: no '<' and no '&', only ASCII; numbers that JSON lacks become None."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
        text = json.dumps(finite, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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
