"""The share of a run's time that is training, by published failure rate: expected, and simulated event by event.

Each run of `--days` on `--devices` saves at the interval that `hf.planner.checkpoint_interval` finds for two kinds of
saves: asynchronous (`async`, 2 s of standstill, complete after 60 s) and synchronous (`sync`, 30 s). Detection takes
5 s and a restart 300 s. `worst` is the worst of `--seeds` runs, `below_97` the number of them under 97 %. Prints one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from hybridflow.planner import (
    PUBLISHED,
    CheckpointCosts,
    FailureModel,
    checkpoint_interval,
    effective_share,
    simulate_run,
)

COSTS = {"async": CheckpointCosts(blocking=2, complete=60), "sync": CheckpointCosts(blocking=30)}


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
    print(json.dumps({"devices": given.devices, "days": given.days, "seeds": given.seeds, "rates": found}))


if __name__ == "__main__":
    main()
