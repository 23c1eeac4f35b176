"""The format of `events.jsonl`: what a host or the driver has recorded as one JSON object per line, and reading it.

- `run`: the devices of every pool, the groups on them, and the plan, if any; again after every change
- `call`, `transfer`, `switch`, `stage`: one call of one group on one device, see `engines.call_events.Event`
- `wait`, `restart`, `skipped`, `note`: a time span of the driver, with `what` it was

Times are seconds since the epoch, sizes bytes. `step` is the iteration; 0: before or beside the loop. Lines are in the
order of `end`, except that calls which overlap the next iteration may come late.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hybridflow.cluster.iterations import Incident
from hybridflow.engines.call_events import CallWork, Event
from hybridflow.errors import ConfigError

EVENTS = "events.jsonl"
CALLS = ("call", "transfer", "switch", "stage")
_NAMES = {
    Event: tuple(name for name in Event._fields if name != "work"),
    Incident: tuple(one.name for one in fields(Incident)),
    CallWork: CallWork._fields,
}


def as_record(event: Event | Incident, step: int) -> dict[str, Any]:
    """The JSON object of an event; figures of its work only where there are some."""
    found = {name: getattr(event, name) for name in _NAMES[type(event)]} | {"step": step}
    if isinstance(event, Event):
        found |= {name: value for name in _NAMES[CallWork] if (value := getattr(event.work, name))}
    return found


def read_events(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a run directory (or of such a file), by `end`; the last line may be half written.

    Errors: ConfigError without such a file, and for a line that is not an event.
    """
    path = Path(run) / EVENTS if Path(run).is_dir() else Path(run)
    if not path.is_file():
        raise ConfigError(f"there is no {path}: give the directory of a run that hf.Tracker has written.")
    *lines, half = path.read_bytes().split(b"\n")
    found = [_event(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if half.strip():
        found += [event for event in [_parsed(half)] if event is not None]
    return sorted(found, key=lambda event: event.get("end", event.get("time", 0.0)))


def _event(path: Path, number: int, line: bytes) -> dict[str, Any]:
    if (event := _parsed(line)) is None:
        raise ConfigError(f"{path}, line {number} is not an event: {line[:80]!r}. Is this a run's events.jsonl?")
    return event


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if _is_event(found) else None


def _is_event(found: Any) -> bool:
    if not isinstance(found, Mapping) or not isinstance(found.get("kind"), str):
        return False
    times = ("time",) if found["kind"] == "run" else ("start", "end")
    names = ("role", "method", "pool") if found["kind"] in CALLS else ()
    numbers = (*times, "rank", "seq", "ready") if names else times
    return all(isinstance(found.get(name), str) for name in names) and all(
        _is_time(found.get(name)) for name in numbers
    )


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e12
