"""The share of a run's time that is training, by published failure rate: expected, and simulated event by event.

Each run of `--days` on `--devices` saves at the interval that `hf.planner.checkpoint_interval` finds for two kinds of
saves: asynchronous (`async`, 2 s of standstill, complete after 60 s) and synchronous (`sync`, 30 s). Detection takes
5 s and a restart 300 s. `worst` is the worst of `--seeds` runs, `below_97` the number of them under 97 %. Prints one
JSON line.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import Any, Literal, TypeAlias

from hybridflow.planner import PUBLISHED, CheckpointCosts, FailureModel, checkpoint_interval, effective_share
from hybridflow.settings import is_number, require

COSTS = {"async": CheckpointCosts(blocking=2, complete=60), "sync": CheckpointCosts(blocking=30)}
_HOUR = 3600.0
_MOST_EVENTS = 20_000_000
_Phase: TypeAlias = Literal["training", "saving", "restarting", "waiting"]


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """`share` of the run's time went into training that was not `lost`; the other times are in seconds."""

    share: float
    failures: int
    checkpoints: int
    lost: float
    saving: float
    restarting: float
    waiting: float


def simulate_run(
    interval: float,
    failures: FailureModel,
    costs: CheckpointCosts,
    *,
    days: float = 7.0,
    spares: int | None = None,
    repair_hours: float = 24.0,
    seed: int = 0,
) -> SimulatedRun:
    """A run of `days` that saves after every `interval` seconds of training, event by event; equal for equal seeds.

    Devices fail while training, saving, restarting and waiting. A failed node is replaced at once; with `spares` by one
    of these nodes, a run without enough nodes waits, and the node comes back after `repair_hours`. Errors: ConfigError,
    also for too many events.
    """
    for name, value in (("interval", interval), ("repair_hours", repair_hours)):
        require(is_number(value) and value > 0, f"{name}={value!r}: must be a finite number above 0.")
    require(is_number(days) and days > 0, f"days={days!r}: must be a finite number above 0.")
    end = days * 24 * _HOUR
    events = 3 * end / (interval + costs.blocking) + 3 * end / failures.seconds
    require(events <= _MOST_EVENTS, f"{events:.0e} events in {days:g} days: simulate fewer days, or another interval.")
    return _Simulation(interval, failures, costs, spares, repair_hours, seed).run(end)


class _Simulation:
    """A clock, a queue of events, and the phase that the run is in. A failure voids the events of the attempt."""

    def __init__(
        self,
        interval: float,
        failures: FailureModel,
        costs: CheckpointCosts,
        spares: int | None,
        repair_hours: float,
        seed: int,
    ) -> None:
        self.interval, self.model, self.costs, self.random = interval, failures, costs, Random(seed)
        self.spares, self.repair_hours = spares, repair_hours
        self.now = 0.0
        self.phase: _Phase = "training"
        self.spent: dict[_Phase, float] = {"training": 0.0, "saving": 0.0, "restarting": 0.0, "waiting": 0.0}
        self.saved = self.lost = 0.0  # seconds of training: in the last complete checkpoint, done in vain
        self.failures = self.checkpoints = self.attempt = self.out = 0
        self.under_way = self.due = False  # a save, and the next one that waits for it
        self.queue: list[tuple[float, int, int | None, Callable[[], None]]] = []
        self.order = count()

    def run(self, end: float) -> SimulatedRun:
        self.draw_failure()
        self.train()
        while self.queue[0][0] < end:
            at, _, attempt, event = heapq.heappop(self.queue)
            self.pass_until(at)
            if attempt in (None, self.attempt):
                event()
        self.pass_until(end)
        return SimulatedRun(
            share=self.done / end,
            failures=self.failures,
            checkpoints=self.checkpoints,
            lost=self.lost,
            saving=self.spent["saving"],
            restarting=self.spent["restarting"],
            waiting=self.spent["waiting"],
        )

    def after(self, seconds: float, event: Callable[[], None], attempt: int | None = None) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self.order), attempt, event))

    def pass_until(self, time: float) -> None:
        self.spent[self.phase] += time - self.now
        self.now = time

    @property
    def done(self) -> float:
        return self.spent["training"] - self.lost

    def train(self) -> None:
        self.phase = "training"
        self.after(self.interval, self.save, self.attempt)

    def save(self) -> None:
        if self.under_way:
            self.due = True
            return
        self.phase, self.under_way = "saving", True
        self.after(max(self.costs.blocking, self.costs.complete), partial(self.complete, self.done), self.attempt)
        self.after(self.costs.blocking, self.train, self.attempt)

    def complete(self, done: float) -> None:
        self.saved, self.under_way = done, False
        self.checkpoints += 1
        if self.due:
            self.due = False
            self.save()

    def draw_failure(self) -> None:
        self.after(self.random.expovariate(1 / self.model.seconds), self.fail)

    def fail(self) -> None:
        self.draw_failure()
        self.failures += 1
        self.attempt += 1
        self.lost += self.done - self.saved
        self.under_way = self.due = False
        if self.spares is not None:
            self.out += 1
            self.after(self.repair_hours * _HOUR, self.repaired)
        self.restart()

    def repaired(self) -> None:
        self.out -= 1
        if self.phase == "waiting":
            self.restart()

    def restart(self) -> None:
        self.phase = "waiting" if self.out > (self.spares or 0) else "restarting"
        if self.phase == "restarting":
            self.after(self.costs.detection + self.costs.restart, self.train, self.attempt)


def simulate(failures: FailureModel, costs: CheckpointCosts, days: float, seeds: int) -> dict[str, Any]:
    interval = checkpoint_interval(failures, costs)
    runs = [simulate_run(interval, failures, costs, days=days, seed=seed) for seed in range(seeds)]
    shares = [run.share for run in runs]
    return {
        "interval_s": round(interval),
        "expected": round(effective_share(interval, failures, costs), 4),
        "mean": round(statistics.mean(shares), 4),
        "worst": round(min(shares), 4),
        "below_97": sum(share < 0.97 for share in shares),
        "failures": round(statistics.mean(run.failures for run in runs), 1),
        "lost_s_per_failure": round(sum(run.lost for run in runs) / max(1, sum(run.failures for run in runs))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seeds", type=int, default=200)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for source, hours in PUBLISHED.items():
        failures = FailureModel(devices=given.devices, device_hours=hours)
        runs = {name: simulate(failures, costs, given.days, given.seeds) for name, costs in COSTS.items()}
        found[source] = {"hours_between_failures": round(failures.seconds / 3600, 1), **runs}
    print(
        json.dumps(
            {
                "benchmark": "fault_simulation",
                "devices": given.devices,
                "days": given.days,
                "seeds": given.seeds,
                "rates": found,
            }
        )
    )


if __name__ == "__main__":
    main()
