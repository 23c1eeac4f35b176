"""Timelines as Chrome traces, which ui.perfetto.dev and chrome://tracing show: a track for each device."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.tracking.report.record import read_events
from hybridflow.tracking.report.run_files import CALLS

Record = Mapping[str, Any]
_DRIVER = 0  # its process id in the trace


def write_timeline(run: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write the trace of a run directory to `output` (default: its `timeline.json`) and return the file.

    Errors: ConfigError for a directory without events; OSError for a file that cannot be written.
    """
    events = read_events(run)
    directory = Path(run) if Path(run).is_dir() else Path(run).parent
    path = directory / "timeline.json" if output is None else Path(output)
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: give the file that the trace goes to.")
    path.write_text(json.dumps(trace(events), separators=(",", ":")))
    return path


def trace(events: Sequence[Record]) -> dict[str, Any]:
    """The trace: every call, transfer, part of a call and driver's span is one complete event ("X") of its category,
    inputs that a call waited for another, memory a counter. Times are microseconds from the first start."""
    spans = [e for e in events if e["kind"] != "run"]
    first = min((e["start"] for e in spans), default=0.0)
    nodes = {(d["pool"], d["rank"]): d["node"] for e in events if e["kind"] == "run" for d in e.get("devices", ())}
    devices = sorted({(e["pool"], e["rank"]) for e in spans if e["kind"] in CALLS})
    numbers = {device: number for number, device in enumerate(devices, 1)}
    names = {_DRIVER: "driver", **{n: f"{pool} rank {rank}" for (pool, rank), n in numbers.items()}}
    out: list[dict[str, Any]] = []
    for number, name in names.items():
        node = nodes.get(devices[number - 1], "") if number else ""
        label = f"{name} ({node})" if node else name
        out.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": label}})
        out.append({"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}})
    lanes = _lanes([event for event in spans if event["kind"] in CALLS])
    for event in spans:
        if event["kind"] in CALLS:
            lane = lanes.get((event["pool"], event["rank"], event.get("seq")), 0)
            own = _of_device(event, numbers[event["pool"], event["rank"]], first)
            out += [one | {"tid": lane} if one["ph"] == "X" else one for one in own]
        else:
            name, seconds = f"{event['kind']}: {event.get('what', '')}", event["end"] - event["start"]
            args = {"step": event.get("step")}
            out.append(_span(name, event["kind"], _DRIVER, event["start"] - first, seconds, args))
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _lanes(events: Sequence[Record]) -> dict[tuple[Any, Any, Any], int]:
    """The thread of the trace for each call of a device: calls that overlap (`hf.together`) have different ones."""
    out: dict[tuple[Any, Any, Any], int] = {}
    ends: dict[tuple[Any, Any], list[float]] = defaultdict(list)
    for event in sorted((e for e in events if e["kind"] in ("call", "transfer")), key=lambda e: e["start"]):
        until = ends[event["pool"], event["rank"]]
        lane = next((i for i, end in enumerate(until) if end <= event["start"]), len(until))
        until[lane : lane + 1] = [event["end"]]
        out[event["pool"], event["rank"], event["seq"]] = lane
    return out


def _of_device(event: Record, at: int, first: float) -> list[dict[str, Any]]:
    kind = event["kind"]
    args = {name: value for name, value in event.items() if name not in ("kind", "pool", "rank", "start", "end")}
    seconds = event["end"] - event["ready"]
    out = [_span(f"{event['role']}.{event['method']}", kind, at, event["ready"] - first, seconds, args)]
    if kind not in ("call", "transfer"):
        return out
    if (waited := event["ready"] - event["start"]) > 0:
        out.append(_span("inputs", "inputs", at, event["start"] - first, waited, {"step": event.get("step")}))
    for time, name in (("ready", "memory_before"), ("end", "memory_after")):
        if name in event:
            counted = {"bytes": event[name]}
            out.append({"ph": "C", "name": "memory", "pid": at, "ts": _micro(event[time] - first), "args": counted})
    return out


def _span(name: str, kind: str, pid: int, start: float, seconds: float, args: Mapping[str, Any]) -> dict[str, Any]:
    times = {"ts": _micro(start), "dur": _micro(seconds)}
    return {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": 0, **times, "args": dict(args)}


def _micro(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1e6, 1)
