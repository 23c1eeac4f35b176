"""Rows per second of synchronous loops, one-step-off and streams, from lognormal response lengths.

`--simulate` runs the planner's simulator (`hybridflow.planner.simulate_stream`), which acts on the streams' own
admission policy, for 64 to 1,024 devices and responses whose longest of a thousand has 4, 16 and 64 times the median
length of 1,024 tokens. A batch is 128 prompts of 256 tokens with 16 responses each. `sync` uses all devices for
generation and then for training; the others split them, half or three quarters for generation, whichever gives more
rows per second; `split` is the synchronous loop on such a split. The seconds are those of a 7B model on devices like an
H100, by arithmetic and not measured: one replica per device; a decoding step of 8 ms for one row and 28 ms for 256;
0.03 ms per token of prompts and interrupted rows; 0.14 ms of one device per trained token (log-probabilities and
update); 2 s per weight sync. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hybridflow.admission import StreamOptions
from hybridflow.planner import DecodingSpeed, ResponseLengths, StreamRun, simulate_stream

MODES = {"split": 0, "one_step_off": 1, "stream_1": 1, "stream_2": 2, "stream_4": 4}
"""Each mode that splits the devices, with its bound on staleness."""
SHARES = (1 / 2, 3 / 4)
SPEED = DecodingSpeed.fitted((1, 0.008), (256, 0.028), prefill=3e-5)
TRAINING = 1.4e-4  # seconds of one device per token


def simulated_run(mode: str, devices: int, rollout: int, ratio: float, batches: int) -> StreamRun:
    """`rollout` of the devices generate; the others train, or all where that is all of them."""
    return StreamRun(
        options=StreamOptions(rows=2048, n=16, max_staleness=MODES.get(mode, 0)),
        replicas=rollout,
        speed=SPEED,
        lengths=ResponseLengths(median=1024, ratio=ratio),
        prompt_tokens=256,
        train_seconds_per_token=TRAINING / (devices - rollout or devices),
        sync_seconds=2.0,
        whole_batches=mode == "one_step_off",
        batches=batches,
    )


def simulate(devices: int, ratio: float, batches: int) -> dict[str, Any]:
    """Rows per second of `sync`, and for the other modes their ratio to it, with the best share for generation."""
    sync = simulate_stream(simulated_run("sync", devices, devices, ratio, batches)).rows_per_second
    found: dict[str, Any] = {"sync_rows_per_s": round(sync, 2)}
    for mode in MODES:
        rollouts = [round(devices * share) for share in SHARES]
        runs = {n: simulate_stream(simulated_run(mode, devices, n, ratio, batches)) for n in rollouts}
        best = max(runs, key=lambda n: runs[n].rows_per_second)
        found[mode] = {
            "ratio": round(runs[best].rows_per_second / sync, 2),
            "rollout_devices": best,
            "trainer_busy": round(runs[best].trainer_busy, 2),
            "recomputed": round(runs[best].recomputed, 2),
            "staleness": round(runs[best].staleness_mean, 2),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", required=True)
    parser.add_argument("--devices", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--ratios", type=float, nargs="+", default=[4, 16, 64])
    parser.add_argument("--batches", type=int, default=34)
    given = parser.parse_args()
    found = {
        f"max_over_median_{ratio:g}": {str(n): simulate(n, ratio, given.batches) for n in given.devices}
        for ratio in given.ratios
    }
    print(json.dumps({"simulated": found}))


if __name__ == "__main__":
    main()
