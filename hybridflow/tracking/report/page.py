"""The report of one run, or of two side by side: one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.tracking.report.curves import curves, is_number
from hybridflow.tracking.report.event_summary import EventSummary
from hybridflow.tracking.report.limits import find_limits
from hybridflow.tracking.report.run_files import RunFiles
from hybridflow.tracking.report.shown_samples import shown_samples

_SCRIPTS = ("page_elements.js", "page_curves.js", "page_timeline.js", "page_samples.js", "page.js")
_CURVE_POINTS, _MOST_MARKS = 40_000, 2_000


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
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Give another file with --output.") from error
    return path


def report_html(directories: Sequence[Path]) -> str:
    """The page of one or two run directories. Errors: ConfigError for a directory without a run."""
    runs = [run_data(RunFiles.of(directory)) for directory in directories]
    for run, name in zip(runs, _names(directories), strict=True):
        run["name"] = name
    made = time.strftime("%Y-%m-%d %H:%M")
    data = {"made": made, "runs": runs, "config": _differences(*(run.pop("config") for run in runs))}
    script = "".join(map(_part, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = html.escape(" and ".join(run["name"] for run in runs))
    parts = {"TITLE": title, "DIGEST": digest, "STYLE": _part("page.css"), "DATA": as_script(data), "SCRIPT": script}
    return re.sub(r"\{(TITLE|DIGEST|STYLE|DATA|SCRIPT)\}", lambda found: parts[found[1]], _part("page.html"))


def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def run_data(files: RunFiles) -> dict[str, Any]:
    """What the page shows of one run, as plain data."""
    lines = list(files.lines("metrics.jsonl"))
    names = {name for line in lines for name in line}
    events = EventSummary(files)
    last = max((line["step"] for line in lines if type(line.get("step")) is int), default=0)
    data = {
        "directory": str(files.directory),
        "iterations": last,
        "metrics": curves(lines, buckets=min(400, max(_CURVE_POINTS // max(len(names), 1) // 2, 20))),
        "config": files.config(),
        "notes": files.notes(),
        "roles": events.runs[-1].get("roles") if events.runs else None,
        "plan": _plan_seconds(events.runs),
        "devices": events.devices(),
        "memory": events.memory(),
        "calls": events.calls(),
        "marks": events.marks[:_MOST_MARKS],
        "marks_of": len(events.marks),
        "views": events.views(),
        "limits": limits_of(list(events.sampled_events())) if events.runs or events.views() else [],
        "samples": shown_samples(files),
    }
    return data | {"damaged": dict(files.damaged), "unusable": events.unusable}


def limits_of(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What limits the iteration, largest share first."""
    return [asdict(limit) for limit in find_limits(events)]


def as_script(data: Any) -> str:
    """JSON that can stand in a script element, whatever texts it holds: no '<', no '&', only ASCII."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(data), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """The same data with None for figures that JSON lacks."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _names(directories: Sequence[Path]) -> list[str]:
    """The last part of each path; whole paths where these are equal."""
    short = [directory.resolve().name or str(directory) for directory in directories]
    return short if len(set(short)) == len(short) else [str(directory) for directory in directories]


def _plan_seconds(runs: Sequence[Mapping[str, Any]]) -> float | None:
    plan = runs[-1].get("plan") if runs else None
    found = plan.get("seconds") if isinstance(plan, dict) else None
    return found if is_number(found) else None


def _differences(first: Mapping[str, str], *others: Mapping[str, str]) -> list[list[str | None]]:
    """Settings as [name, value, other value]: with two runs those that differ, first."""
    names = dict.fromkeys([*first, *(name for other in others for name in other)])
    rows = [[name, first.get(name), *(other.get(name) for other in others)] for name in names]
    return sorted(rows, key=lambda row: len(set(row[1:])) == 1) if others else rows
