"""Rows per second of the synchronous loop, one-step-off and streams, with lognormal response lengths.

Without options, on four host processes of this machine: Ray, vLLM, Megatron-core and a Llama of 0.6 M parameters in
float32. Two hosts train (GRPO with random rewards: log-probabilities, advantages, an update of two mini-batches), two
generate. Batches of 64 rows (16 prompts of 16 tokens, 4 responses each); one response in a thousand is longer than 16
times the median, and cut there. A row has the same length in all loops, which run in turn, `--rounds` times. Rows per
second are those of the batches after the warm-up, from update to update, median of the rounds. Before each round,
speeds are measured: of decoding, prompts, training and weight syncs, each alone, and of decoding and training at the
same time, because four processes share the machine's cores. `predicted` is what the simulator makes of them.

`--simulate` only runs the planner's simulator (`hybridflow.planner.simulate_stream`), which acts on the streams' own
admission policy, for 64 to 1,024 devices and responses whose longest of a thousand has 4, 16 and 64 times the median
length of 1,024 tokens. A batch is 128 prompts of 256 tokens with 16 responses each. `sync` uses all devices for
generation and then for training; the others split them, half or three quarters for generation, whichever gives more
rows per second; `split` is the synchronous loop on such a split. The seconds are those of a 7B model on devices like an
H100, by arithmetic and not measured: one replica per device; a decoding step of 8 ms for one row and 28 ms for 256;
0.03 ms per token of prompts and interrupted rows; 0.14 ms of one device per trained token (log-probabilities and
update); 2 s per weight sync.

Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hybridflow as hf
from benchmarks.stream_runs import PROMPT, REPLICAS, TRAINERS, Job, LoopRun, Speeds, make_policy, measure_speeds
from hybridflow.planner import DecodingSpeed, ResponseLengths, SimulatedStream, StreamRun, simulate_stream
from hybridflow.planner.admission import StreamOptions

ASYNCHRONOUS = {"one_step_off": 1, "stream_1": 1, "stream_2": 2, "stream_4": 4}
"""Each mode with its bound on staleness."""
SPLIT = {"split": 0, **ASYNCHRONOUS}
HERE = {"sync": 0, **ASYNCHRONOUS}
SHARES = (1 / 2, 3 / 4)
SPEED = DecodingSpeed.fitted((1, 0.008), (256, 0.028), prefill=3e-5)
TRAINING = 1.4e-4  # seconds of one device per token


def simulated_run(mode: str, devices: int, rollout: int, ratio: float, batches: int) -> StreamRun:
    """`rollout` of the devices generate; the others train, or all where that is all of them."""
    return StreamRun(
        options=StreamOptions(rows=2048, n=16, max_staleness=SPLIT.get(mode, 0)),
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
    for mode in SPLIT:
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


def predict(mode: str, speeds: Speeds, lengths: Sequence[int], args: argparse.Namespace) -> SimulatedStream:
    """The loop of `mode` on this machine; `lengths` in the order of the rows.

    Replicas of a stream decode in calls of `call_seconds`. Each call takes a little longer than it decodes; what has
    ended is known at its end, after one call on average (half a call, and more during a weight sync); and the trainer's
    sync waits for the later one of two calls that it finds half done.
    """
    calls = args.call_seconds if mode.startswith("stream") else 0.0
    slower = 1.0 + speeds.call_overhead / calls if calls else 1.0
    decoding = speeds.decoding
    run = StreamRun(
        options=StreamOptions(rows=args.rows, n=args.n, max_staleness=HERE[mode]),
        replicas=REPLICAS,
        speed=replace(decoding, base=decoding.base * slower, per_row=decoding.per_row * slower),
        lengths=lengths,
        prompt_tokens=PROMPT,
        train_seconds=2 / 3 * calls,
        train_seconds_per_token=speeds.train_seconds_per_token,
        sync_seconds=speeds.sync_seconds,
        report_seconds=calls,
        whole_batches=mode == "one_step_off",
        cores=speeds.cores,
        train_processes=TRAINERS,
        batches=args.batches,
        warm_up=args.warm_up,
    )
    return simulate_stream(run)


def compare(runs: Sequence[LoopRun], predictions: Sequence[SimulatedStream], sync: float) -> dict[str, Any]:
    """One mode: medians over rounds, and over all rows the staleness; `sync`: rows per second of that mode."""

    def median(name: str, of: Sequence[Any] = runs) -> float:
        return statistics.median(getattr(one, name) for one in of)

    staleness = [age for run in runs for age in run.staleness]
    measured, predicted = median("rows_per_second"), median("rows_per_second", predictions)
    return {
        "rows_per_s": round(measured, 1),
        "ratio": round(measured / sync, 2),
        "predicted": round(predicted, 1),
        "error": round(predicted / measured - 1, 3),
        "trainer_idle": [round(1 - median("trainer_busy", of), 2) for of in (runs, predictions)],
        "recomputed": [round(median("recomputed", of), 3) for of in (runs, predictions)],
        "staleness": [round(statistics.mean(staleness), 2), max(staleness)],
        "repeats": [round(run.rows_per_second, 1) for run in runs],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All modes in turn. `trainer_idle` and `recomputed` are pairs: measured, predicted; `staleness`: mean, maximum."""
    tail = ResponseLengths(median=args.median, ratio=16)
    runs: dict[str, list[LoopRun]] = {mode: [] for mode in HERE}
    predictions: dict[str, list[SimulatedStream]] = {mode: [] for mode in HERE}
    found: list[Speeds] = []
    with tempfile.TemporaryDirectory() as directory:
        job = Job(make_policy(Path(directory), PROMPT + 16 * args.median), tail, args.rows, args.n, args.call_seconds)
        for bound in (0, 1):
            job.run(bound, whole_batches=False, batches=2, warm_up=1)
        for _ in range(args.rounds):
            found.append(measure_speeds(job, repeats=5, few=4, many=args.rows))
            for mode, bound in HERE.items():
                runs[mode].append(job.run(bound, mode == "one_step_off", args.batches, args.warm_up))
                print(f"{mode}: {runs[mode][-1].rows_per_second:.1f} rows/s", file=sys.stderr)
        lengths = job.lengths((args.batches + 5) * args.rows)
        hf.shutdown()
    for speeds in found:
        for mode in HERE:
            predictions[mode].append(predict(mode, speeds, lengths, args))
    sync = statistics.median(run.rows_per_second for run in runs["sync"])
    return {
        "lengths": {"median": statistics.median(lengths), "mean": statistics.mean(lengths), "max": max(lengths)},
        "speeds": [as_milliseconds(one) for one in found],
        "modes": {mode: compare(runs[mode], predictions[mode], sync) for mode in HERE},
    }


def as_milliseconds(speeds: Speeds) -> dict[str, float]:
    ms = {
        "step_base_ms": speeds.decoding.base,
        "step_per_row_ms": speeds.decoding.per_row,
        "prefill_per_token_ms": speeds.decoding.prefill,
        "train_per_token_ms": speeds.train_seconds_per_token,
        "sync_ms": speeds.sync_seconds,
        "call_overhead_ms": speeds.call_overhead,
    }
    return {name: round(1e3 * seconds, 4) for name, seconds in ms.items()} | {"cores": round(speeds.cores, 2)}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--simulate", action="store_true")
    out.add_argument("--devices", type=int, nargs="+", default=[64, 256, 1024])
    out.add_argument("--ratios", type=float, nargs="+", default=[4, 16, 64])
    out.add_argument("--batches", type=int, help="default: 12, simulated 34")
    out.add_argument("--rows", type=int, default=64)
    out.add_argument("--n", type=int, default=4)
    out.add_argument("--median", type=int, default=24, help="tokens of a response")
    out.add_argument("--warm-up", type=int, default=4, help="batches")
    out.add_argument("--rounds", type=int, default=2)
    out.add_argument("--call-seconds", type=float, default=0.05)
    return out


def main() -> None:
    args = parser().parse_args()
    if args.simulate:
        found = {
            f"max_over_median_{ratio:g}": {str(n): simulate(n, ratio, args.batches or 34) for n in args.devices}
            for ratio in args.ratios
        }
        print(json.dumps({"simulated": found}))
        return
    os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15 hosts wait for whatever else computes
    args.batches = args.batches or 12
    print(json.dumps({"benchmark": "streams", **measure(args)}))


if __name__ == "__main__":
    main()
