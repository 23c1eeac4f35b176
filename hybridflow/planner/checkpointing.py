"""How often to save a checkpoint, and what failures cost a run: in closed form, and by simulated events. Pure.

Failures come at random, at the same rate for every device and at any time; one stops the whole run. It loses the work
since the last checkpoint that was complete by then, and starts again from there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import Literal, TypeAlias

from hybridflow.settings import Count, NonNegative, Positive, Size, is_number, require, settings

PUBLISHED = {
    "llama3": 16_384 * 54 * 24 / 419,
    "opt": 992 * 60 * 24 / 105,
    "rsc": 1_024 * 7.9,
}
"""Hours of one device between failures.

llama3: 419 unexpected interruptions of 16,384 H100 in 54 days ("The Llama 3 Herd of Models", 2024, section 3.3.4, table
5); opt: 35 manual and about 70 automatic restarts of 992 A100 in two months ("OPT", Zhang et al. 2022, section 2.5);
rsc: 7.9 hours between failures of jobs on 1,024 A100 ("Revisiting Reliability in Large-Scale Machine Learning Research
Clusters", Kokolis et al. 2025)."""
_SECONDS = 3600.0
_MOST_EVENTS = 20_000_000
_Phase: TypeAlias = Literal["training", "saving", "restarting", "waiting"]


@settings
class FailureModel:
    """`devices` that fail independently, each on average once in `device_hours` (see `PUBLISHED`).

    In simulations a failed node is replaced at once. With `spares` it is replaced by one of these nodes, a run without
    enough nodes waits, and the node comes back after `repair_hours`.
    """

    devices: Size
    device_hours: Positive = PUBLISHED["llama3"]
    spares: Count | None = None
    repair_hours: Positive = 24.0

    @property
    def seconds(self) -> float:
        """Mean time between failures of the run."""
        return self.device_hours * _SECONDS / self.devices


@settings
class CheckpointCosts:
    """Seconds. `blocking`: training stands still during a save; `complete`: from its start until the checkpoint counts,
    at least `blocking`, more for asynchronous saves; `detection` of a failure; `restart`: rebuild the groups and load.
    """

    blocking: Positive
    complete: NonNegative = 0.0
    detection: NonNegative = 5.0
    restart: NonNegative = 300.0

    @property
    def behind(self) -> float:
        """Seconds of training under an asynchronous save."""
        return max(0.0, self.complete - self.blocking)


def checkpoint_interval(failures: FailureModel, costs: CheckpointCosts) -> float:
    """Seconds of training between saves that maximise `effective_share`.

    The exact optimum for exponential failures (Daly 2006, "A higher order estimate of the optimum checkpoint interval
    for restart dumps"); sqrt(2 blocking M) of Young 1974 to first order, with M seconds between failures. At most one
    save is under way, so the interval is at least `costs.behind`.
    """
    x = costs.blocking / failures.seconds
    return max(costs.behind, failures.seconds * _optimum(x))


def _optimum(x: float) -> float:
    """The u in (0, 1) with (1 - u) exp(u) = exp(-x), which is 1 + W(-exp(-1 - x))."""
    if x < 1e-6:  # where 1 - v would have few digits
        p = math.sqrt(2 * x)
        return p - p * p / 3 + p**3 / 36
    v = math.exp(-1 - x)
    for _ in range(60 if v else 0):  # Newton's method for v = 1 - u, from below
        v += v * (v - math.log(v) - 1 - x) / (1 - v)
    return 1 - v


def effective_share(interval: float, failures: FailureModel, costs: CheckpointCosts) -> float:
    """Expected share of time in training that is not lost, for a save after every `interval` seconds of training.

    tau/M exp(-(behind + detection + restart)/M) / (exp((tau + blocking)/M) - 1): the k-th save of an attempt counts if
    nothing fails before k (tau + blocking) + behind, and failures while restarting begin the restart again. For a run
    that is long against M = `failures.seconds`, with a healthy node at hand. Errors: ConfigError.
    """
    _check_interval("interval", interval)
    mean, tau = failures.seconds, max(interval, costs.behind)
    period = (tau + costs.blocking) / mean
    kept = math.exp(-period - (costs.behind + costs.detection + costs.restart) / mean)
    return tau / mean * kept / -math.expm1(-period)


def checkpoint_every(iteration_seconds: float, failures: FailureModel, costs: CheckpointCosts) -> int:
    """Iterations between saves that maximise `effective_share`. Errors: ConfigError."""
    _check_interval("iteration_seconds", iteration_seconds)
    fewest = max(1, math.ceil(costs.behind / iteration_seconds))
    most = max(fewest, math.floor(checkpoint_interval(failures, costs) / iteration_seconds))
    return max((most, most + 1), key=lambda n: effective_share(n * iteration_seconds, failures, costs))


def _check_interval(name: str, seconds: float) -> None:
    require(is_number(seconds) and seconds > 0, f"{name}={seconds!r}: must be a finite number of seconds above 0.")


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
    interval: float, failures: FailureModel, costs: CheckpointCosts, *, days: float = 7.0, seed: int = 0
) -> SimulatedRun:
    """A run of `days` that saves after every `interval` seconds of training, event by event; equal for equal seeds.

    Devices fail while training, saving, restarting and waiting. Errors: ConfigError, also for too many events.
    """
    _check_interval("interval", interval)
    require(is_number(days) and days > 0, f"days={days!r}: must be a finite number above 0.")
    end = days * 24 * _SECONDS
    events = 3 * end / (interval + costs.blocking) + 3 * end / failures.seconds
    require(events <= _MOST_EVENTS, f"{events:.0e} events in {days:g} days: simulate fewer days, or another interval.")
    return _Simulation(interval, failures, costs, seed).run(end)


class _Simulation:
    """A clock, a queue of events, and the phase that the run is in. A failure voids the events of the attempt."""

    def __init__(self, interval: float, failures: FailureModel, costs: CheckpointCosts, seed: int) -> None:
        self.interval, self.model, self.costs, self.random = interval, failures, costs, Random(seed)
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
        if self.model.spares is not None:
            self.out += 1
            self.after(self.model.repair_hours * _SECONDS, self.repaired)
        self.restart()

    def repaired(self) -> None:
        self.out -= 1
        if self.phase == "waiting":
            self.restart()

    def restart(self) -> None:
        self.phase = "waiting" if self.out > (self.model.spares or 0) else "restarting"
        if self.phase == "restarting":
            self.after(self.costs.detection + self.costs.restart, self.train, self.attempt)
