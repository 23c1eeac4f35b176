"""How often to save a checkpoint, and what failures cost a run, in closed form. Pure.

Failures come at random, at the same rate for every device and at any time; one stops the whole run. It loses the work
since the last checkpoint that was complete by then, and starts again from there."""

from __future__ import annotations

import math

from hybridflow.settings import NonNegative, Positive, Size, is_number, require, settings

PUBLISHED = {"llama3": 16_384 * 54 * 24 / 419, "opt": 992 * 60 * 24 / 105, "rsc": 1_024 * 7.9}
"""Hours of one device between failures.

llama3: 419 unexpected interruptions of 16,384 H100 in 54 days ("The Llama 3 Herd of Models", 2024, section 3.3.4, table
5); opt: 35 manual and about 70 automatic restarts of 992 A100 in two months ("OPT", Zhang et al. 2022, section 2.5);
rsc: 7.9 hours between failures of jobs on 1,024 A100 ("Revisiting Reliability in Large-Scale Machine Learning Research
Clusters", Kokolis et al. 2025)."""
_SECONDS = 3600.0


@settings
class FailureModel:
    """`devices` that fail independently, each on average once in `device_hours` (see `PUBLISHED`)."""

    devices: Size
    device_hours: Positive = PUBLISHED["llama3"]

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
    save is under way, so the interval is at least `costs.behind`."""
    x = costs.blocking / failures.seconds
    # u in (0, 1) with (1 - u) exp(u) = exp(-x), which is 1 + W(-exp(-1 - x)), by Newton's method for v = 1 - u
    v = math.exp(-1 - x)
    for _ in range(60 if v and x >= 1e-6 else 0):
        v += v * (v - math.log(v) - 1 - x) / (1 - v)
    p = math.sqrt(2 * x)
    u = p - p * p / 3 + p**3 / 36 if x < 1e-6 else 1 - v  # 1 - v would have few digits
    return max(costs.behind, failures.seconds * u)


def effective_share(interval: float, failures: FailureModel, costs: CheckpointCosts) -> float:
    """Expected share of time in training that is not lost, for a save after every `interval` seconds of training.

    tau/M exp(-(behind + detection + restart)/M) / (exp((tau + blocking)/M) - 1): the k-th save of an attempt counts if
    nothing fails before k (tau + blocking) + behind, and failures while restarting begin the restart again. For a run
    that is long against M = `failures.seconds`, with a healthy node at hand. Errors: ConfigError."""
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
