"""events.jsonl: events of hosts and of the driver, one JSON object per line; `EventRecorder` and `read_events`.

- `run`: the devices of every pool, the groups on them, and the plan, if any; again after every change
- `call`, `transfer`, `switch`, `stage`: one call of one group on one device, see `engines.call_events.Event`
- `wait`, `restart`, `skipped`, `note`: a time span of the driver, with `what` it was

Times are seconds since the epoch, sizes bytes. `step` is the iteration; 0: before or beside the loop. Lines are in the
order of `end`, except that calls which overlap the next iteration may come late.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridflow.cluster.iterations import Incident
from hybridflow.cluster.session import CONTROLLER, Session
from hybridflow.engines.call_events import Event
from hybridflow.errors import ConfigError
from hybridflow.planner.describe.cluster_spec import peak_flops
from hybridflow.tracking.report.run_files import RunFiles, as_object, is_event

logger = logging.getLogger(__name__)
EVENTS = "events.jsonl"


def as_record(event: Event | Incident, step: int) -> dict[str, Any]:
    """The JSON object of an event; of its work and of what it held only the numbers that are not zero."""
    if isinstance(event, Incident):
        return asdict(event) | {"step": step}
    found = event._asdict() | {"step": step} | {name: value for name, value in event.work._asdict().items() if value}
    del found["work"]
    return found | {"held": {owner: size for owner, size in event.held if size}}


def read_events(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a run directory (or of such a file), by `end`; the last line may be half written.

    Errors: ConfigError without such a file, and for a line that is not an event.
    """
    path = Path(run) / EVENTS if Path(run).is_dir() else Path(run)
    if not path.is_file():
        raise ConfigError(f"there is no {path}: give the directory of a run that hf.Tracker has written.")
    events = list[dict[str, Any]]()
    for number, (_, text) in enumerate(RunFiles(path.parent).raw_lines(path.name), 1):
        if (event := as_object(text)) is not None and is_event(event):
            events.append(event)
        elif text.strip() and text.endswith(b"\n"):
            line = text[:-1][:80]
            raise ConfigError(f"{path}, line {number} is not an event: {line!r}. Is this a run's events.jsonl?")
    return sorted(events, key=lambda event: event.get("end", event.get("time", 0.0)))


class EventRecorder:
    """Of one session: `take` returns the new records. Events wait in the session's `Iterations`, a bounded number."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._waiting = session.iterations.listen()
        self._described: tuple[dict[str, list[str]], list[dict[str, Any]]] | None = None
        self._devices: list[dict[str, Any]] = []
        self._began = time.time()  # a run that continues has no calls between its last ones and this
        self._ahead: int | None = None  # of the run's step before the session's iteration
        if session.groups.keys() - {CONTROLLER}:
            self._describe_devices()  # hosts answer between two calls

    def take(
        self, step: int, iteration: int | None = None, seconds: float = 0.0
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """The records since the last `take`, and the metrics of the `iteration` of the session, which is `step` of the
        run and took `seconds`. Without an iteration the run has ended, and this was its last step."""
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if taken and (dropped := self.session.iterations.dropped):
            self.session.iterations.dropped, at = 0, time.time()
            what = f"{dropped:,} older events were dropped: log at least every {len(taken):,} events"
            logger.warning("%s.", what)
            taken.append((taken[-1][0], Incident("note", taken[-1][1].step, what, at, at)))
        if iteration is not None:
            self._ahead = step - iteration
        found = [(event, self._step(event, number)) for number, event in taken]
        found.sort(key=lambda pair: pair[0].end)
        own = [event for event, at in found if at == step and isinstance(event, Event)]
        run = [] if iteration is None else self._run(step)
        controller = self.session.controller_pool
        devices = [one for one in self._devices if controller is None or one["pool"] != controller.name]
        peaks = {(one["pool"], one["rank"]): peak_flops(one["name"]) for one in devices}
        known = {key: peak for key, peak in peaks.items() if peak is not None}
        metrics = mfu(own, seconds, known) if known and len(known) == len(peaks) else {}
        return [*run, *(as_record(event, at) for event, at in found)], metrics

    def close(self) -> None:
        """Collect no further events."""
        if self.session.iterations.events is self._waiting:
            self.session.iterations.events = None

    def forget(self, step: int) -> None:
        """Drop the events of iterations after `step`, which are done again."""
        waiting = [*self._waiting]
        kept = [(n, event) for n, event in waiting if isinstance(event, Incident) or self._step(event, n) <= step]
        self._waiting.clear()
        self._waiting.extend(kept)

    def _step(self, event: Event | Incident, number: int) -> int:
        """The run's step of an event in this iteration of the session, which may have run several loops; 0: outside of
        a loader's loop."""
        if event.step is None and self.session.iterations.looped:
            return 0
        if isinstance(event, Incident) and event.step == 0:
            return 0
        return max(number + self._ahead, 0) if self._ahead is not None else event.step or 0

    def _run(self, step: int) -> list[dict[str, Any]]:
        """The record of devices, groups and the plan, if they have changed."""
        session = self.session
        groups = {name: [ranks.key for ranks in group.all_ranks] for name, group in session.groups.items()}
        known = self._described is not None and groups == self._described[0]
        if not known or not all(device["name"] for device in self._devices):
            self._describe_devices()
        now = (groups, self._devices)
        if now == self._described:
            return []
        began = self._began if self._described is None else time.time()
        self._described = now
        roles = {
            name: {
                "pool": group.ranks.pool_name,
                "ranks": list(group.ranks.members),
                "class": group.ranks.worker_class.__name__,
                "layout": "" if name == CONTROLLER else str(group.ranks),
            }
            for name, group in session.groups.items()
        }
        record = {"kind": "run", "step": step - 1, "time": began, "devices": self._devices, "roles": roles}
        return [record | {"plan": self._plan()}]

    def _describe_devices(self) -> None:
        pools = [pool for pool in (*self.session.pools, self.session.controller_pool) if pool is not None]
        self._devices = [device for pool in pools for device in pool.devices()]

    def _plan(self) -> dict[str, Any] | None:
        placement = self.session.assignment
        if placement is None or not placement.calls:
            return None
        memory: dict[str, float] = {}
        for call in placement.calls.values():
            for device in call.devices:
                memory[str(device)] = max(memory.get(str(device), 0.0), call.memory)
        pools = [pool.name for pool in self.session.pools if pool.devices_of_nodes == tuple(placement.nodes)]
        named = {f"{pools[0]}/{device}": bytes_ for device, bytes_ in memory.items()} if pools else {}
        return {"seconds": placement.seconds, "memory": named}

    @property
    def devices(self) -> int:
        """The number of devices of all pools."""
        return sum(len(pool.hosts) for pool in self.session.pools)


def mfu(events: Iterable[Event], seconds: float, peaks: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """Model FLOP/s utilization (MFU) of one iteration of `seconds`: `perf/mfu` of all devices, and of each call's own
    time `perf/mfu/<role>.<method>`.

    `peaks` [FLOP/s] by pool and rank are those of all devices. The arithmetic is that of the models' matrices and
    attention, three times that of the forward pass in an update; recomputed activations do not count.
    """
    total, done, possible = 0.0, defaultdict[str, float](float), defaultdict[str, float](float)
    for event in events:
        if event.work.flops and (peak := peaks.get((event.pool, event.rank))) is not None:
            total += event.work.flops
            done[f"{event.role}.{event.method}"] += event.work.flops
            possible[f"{event.role}.{event.method}"] += peak * event.seconds
    if not total or not seconds:
        return {}
    found = {f"perf/mfu/{name}": flops / possible[name] for name, flops in done.items() if possible[name]}
    return {"perf/mfu": total / (seconds * sum(peaks.values())), **found}
