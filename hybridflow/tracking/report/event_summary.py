"""EventSummary: the events of a run in a few tables, and all events of some chosen iterations; seconds in which devices
work, wait for inputs or are idle, and in which roles overlap."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hybridflow.settings import is_number
from hybridflow.tracking.report.run_files import RunFiles, is_event, rounded

Interval = tuple[float, float]
KINDS = ("call", "transfer", "wait", "switch", "stage")  # the last two are parts of a call
DRIVER = "driver"
_SIZES = ("bytes_in", "bytes_out", "rows", "tokens", "memory_before", "memory_after", "peak")
_MARKS = ("restart", "skipped", "note")
_MOST_VIEWS, _MOST_EVENTS = 12, 30_000
_LIMITS_STEPS = 24


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
        kind, step = event.get("kind"), event.get("step")
        if kind not in KINDS or type(step) is not int or not is_event(event) or event["start"] > event["end"]:
            return None
        start, end = event["start"], event["end"]
        ready = min(max(event.get("ready", end), start), end)
        sizes = [size if is_number(size := event.get(name)) else None for name in _SIZES]
        what, failed = str(event.get("what", kind)), event.get("failed") is True
        if kind == "wait":
            return cls(kind, step, 0, DRIVER, what, DRIVER, start, end, end, sizes, failed)
        device = f"{event['pool']}/{event['rank']}"
        return cls(kind, step, event["seq"], event["role"], event["method"], device, start, ready, end, sizes, failed)

    @property
    def memory(self) -> float:
        """The largest in bytes; 0 if the event has none."""
        return max(size or 0 for size in self.sizes[4:])


class EventSummary:
    """Reads `events.jsonl` once; its memory grows with iterations and calls, not with devices times calls."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.runs: list[dict[str, Any]] = []
        self.marks: list[dict[str, Any]] = []
        self.unusable = 0
        self._extents: dict[int, Interval] = {}
        self._offsets: dict[int, list[int]] = {}
        self._run_offsets: list[int] = []
        self.memory: dict[str, dict[str, float]] = {}
        """Largest bytes of each device in each phase (`role.method`)."""
        self.held: dict[str, dict[str, dict[str, float]]] = {}
        """Of each device in each phase the account (bytes by owner) of the call with most."""
        self._calls: dict[tuple[int, int, str], list[float]] = {}  # the slowest rank's work, wait and ranks
        self._waits: dict[int, float] = {}  # first start of the driver's waits
        for offset, event in files.placed_lines("events.jsonl"):
            self._read(offset, event)
        ends = {step: end for step, (_, end) in self._extents.items()}
        for step in self._waits.keys() & ends:  # data that was loaded ahead does not begin an iteration
            start = max(self._waits[step], ends.get(step - 1, self._waits[step]))
            self._extents[step] = min(start, self._extents[step][0]), ends[step]

    def _read(self, offset: int, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "run":
            self.runs.append(dict(event))
            self._run_offsets.append(offset)
        elif event.get("kind") in _MARKS:
            start, end, step = event.get("start"), event.get("end"), event.get("step")
            length = rounded(end - start) if is_number(start) and is_number(end) else None
            mark = {"kind": event["kind"], "step": step if type(step) is int else None, "seconds": length}
            what = str(event.get("what", ""))[:2000]
            self.marks.append(mark | {"start": start if is_number(start) else None, "what": what})
        elif (one := Activity.of(event)) is None:
            self.unusable += 1
        else:
            if one.kind == "wait":
                self._waits[one.step] = min(self._waits.get(one.step, one.start), one.start)
            else:
                start, end = self._extents.get(one.step, (one.start, one.end))
                self._extents[one.step] = min(start, one.start), max(end, one.end)
            self._offsets.setdefault(one.step, []).append(offset)
            name = f"{one.role}.{one.method}"
            if one.memory:
                phases = self.memory.setdefault(one.device, {})
                phases[name] = max(phases.get(name, 0), one.memory)
            account = event.get("held")
            if isinstance(account, dict) and (sizes := {k: v for k, v in account.items() if is_number(v)}):
                of_device = self.held.setdefault(one.device, {})
                of_device[name] = max(of_device.get(name, {}), sizes, key=lambda found: sum(found.values()))
            call = self._calls.setdefault((one.step, one.seq, name), [0.0, 0.0, 0])
            call[0] = max(call[0], one.end - one.ready)
            call[1] = max(call[1], one.ready - one.start)
            call[2] += 1

    def devices(self) -> list[dict[str, Any]]:
        """All devices that a run record or an event names, in order: key, node, name, memory and planned memory."""
        known: dict[str, dict[str, Any]] = {}
        for run in self.runs:
            plan = run.get("plan")
            planned = plan.get("memory") if isinstance(plan, dict) else None
            for one in filter(lambda one: isinstance(one, dict), run.get("devices") or ()):
                key = f"{one.get('pool', '?')}/{one.get('rank', '?')}"
                about = {name: one.get(name) for name in ("node", "device", "name", "memory")}
                known[key] = {"key": key, **about, "plan": planned.get(key) if isinstance(planned, dict) else None}
        for device in self.memory:
            known.setdefault(device, {"key": device})
        parts = {key: key.rpartition("/") for key in known}
        order = {key: (pool, int(rank) if rank.isdigit() else -1, rank) for key, (pool, _, rank) in parts.items()}
        return sorted(known.values(), key=lambda device: order[device["key"]])

    def calls(self) -> list[dict[str, Any]]:
        """Per `role.method`: calls, ranks, and medians over iterations of the seconds that its calls work and wait
        (of each call, its slowest rank)."""
        per_step: dict[str, dict[int, list[float]]] = {}
        for (step, _, name), (work, wait, ranks) in self._calls.items():
            row = per_step.setdefault(name, {}).setdefault(step, [0.0, 0.0, 0, 0])
            row[:] = row[0] + work, row[1] + wait, row[2] + 1, max(row[3], ranks)
        return [
            {
                "name": name,
                "calls": int(sum(row[2] for row in steps.values())),
                "ranks": int(max(row[3] for row in steps.values())),
                "work": rounded(statistics.median(row[0] for row in steps.values())),
                "wait": rounded(statistics.median(row[1] for row in steps.values())),
            }
            for name, steps in per_step.items()
        ]

    def chosen(self) -> dict[int, str]:
        """Iterations to show, and why: first, median, slowest, last, and around restarts."""
        steps = [step for step in self._extents if step > 0] or list(self._extents)
        if not steps:
            return {}
        slow = sorted(steps, key=lambda step: self._extents[step][1] - self._extents[step][0])
        why: dict[int, list[str]] = {}
        median = slow[(len(slow) - 1) // 2]
        for step, reason in ((min(steps), "first"), (median, "median"), (slow[-1], "slowest"), (max(steps), "last")):
            why.setdefault(step, []).append(reason)
        for at in [mark["step"] for mark in self.marks if mark["kind"] == "restart" and mark["step"] is not None]:
            for step, reason in ((at - 1, "before a restart"), (at, "restart"), (at + 1, "after a restart")):
                if step in steps and (step in why or len(why) < _MOST_VIEWS):
                    why.setdefault(step, []).append(reason)
        return {step: ", ".join(dict.fromkeys(why[step])) for step in sorted(why)}

    def activities(self, step: int) -> list[Activity]:
        found = self.files.lines_at("events.jsonl", self._offsets.get(step, []))
        return [one for one in map(Activity.of, found) if one is not None]

    def views(self) -> list[dict[str, Any]]:
        """The chosen iterations with their events, and events of other iterations at the same time."""
        chosen, out, room = self.chosen(), [], _MOST_EVENTS
        order = sorted(chosen, key=lambda step: "restart" in chosen[step])  # these have to leave first
        for place, step in enumerate(order):
            window = self._extents[step]
            near = sorted(self._extents, key=lambda other: abs(other - step))[:9]
            around = [other for other in near if other != step and _meet(self._extents[other], window)]
            own = self.activities(step)
            others = [one for other in around for one in self.activities(other) if _meet((one.start, one.end), window)]
            share = max(room // (len(order) - place), 1)
            view = _view(step, chosen[step], window, own, others, share)
            room -= len(view["events"])
            out.append(view)
        return sorted(out, key=lambda view: view["step"])

    def sampled_events(self) -> Iterator[dict[str, Any]]:
        """The run records, restarts, and all events of up to `_LIMITS_STEPS` iterations in the middle, one after the
        other."""
        steps = sorted(step for step in self._extents if step > 0)
        first = max(len(steps) - _LIMITS_STEPS, 0) // 2
        yield from self.files.lines_at("events.jsonl", self._run_offsets)
        restarts = [mark for mark in self.marks if mark["kind"] == "restart" and mark["seconds"] is not None]
        yield from (mark | {"end": mark["start"] + mark["seconds"]} for mark in restarts)
        for step in steps[first : first + _LIMITS_STEPS]:
            found = self.files.lines_at("events.jsonl", self._offsets[step])
            yield from (event for event in found if Activity.of(event) is not None)


def _view(
    step: int, why: str, window: Interval, own: list[Activity], others: list[Activity], most: int
) -> dict[str, Any]:
    """Plain data of one iteration. Of more than `most` events, the longest are kept."""
    every = [*own, *others]
    kept = every if len(every) <= most else sorted(every, key=lambda one: one.start - one.end)[:most]
    names: dict[str, int] = {}
    rows = [
        [
            KINDS.index(one.kind),
            *(names.setdefault(text, len(names)) for text in (one.device, one.role, one.method)),
            *(one.seq, one.step, *(round(at - window[0], 6) for at in (one.start, one.ready, one.end))),
            *one.sizes,
            int(one.failed),
        ]
        for one in sorted(kept, key=lambda one: one.start)
    ]
    working = [one for one in every if one.device != DRIVER]
    return {
        "step": step,
        "why": why,
        "start": window[0],
        "seconds": window[1] - window[0],
        "counts": {kind: sum(one.kind == kind for one in own) for kind in KINDS},
        "others": len(others),
        "left_out": len(every) - len(kept),
        "names": list(names),
        "events": rows,
        "shares": {name: [rounded(part) for part in parts] for name, parts in shares(working, window).items()},
        "overlap": rounded(role_overlap(working, window)),
    }


def _meet(one: Interval, other: Interval) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in order."""
    out: list[Interval] = []
    for start, end in sorted(one for one in intervals if one[1] > one[0]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def covered(intervals: Iterable[Interval], window: Interval) -> float:
    """Seconds of `window` in which at least one interval lies."""
    return sum(end - start for start, end in merged(clipped(one, window) for one in intervals))


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
        busy = covered(((one.ready, one.end) for one in own), window)
        out[device] = busy, max(covered(((one.start, one.end) for one in own), window) - busy, 0.0)
    return out


def role_overlap(activities: Iterable[Activity], window: Interval) -> float:
    """Seconds inside `window` in which at least two roles work, on any device."""
    by_role: dict[str, list[Interval]] = {}
    for one in activities:
        by_role.setdefault(one.role, []).append(clipped((one.ready, one.end), window))
    return overlapping(by_role.values())


def clipped(interval: Interval, window: Interval) -> Interval:
    return max(interval[0], window[0]), min(interval[1], window[1])
