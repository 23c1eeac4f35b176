"""Seconds of an iteration under device policies, simulated, relative to the best static split of the same devices.

For 8 to 1,024 devices and responses whose longest of a thousand has 4, 16 and 64 times the median length of 1,024
tokens: 128 responses per device, at most 16,384, in groups of 8 with prompts of 256 tokens, and four mini-batches. The
seconds are those of a 7B model with one device for each instance, by arithmetic and not measured (as in
`benchmarks.streams --simulate`): a decoding step of 8 ms for one row and 28 ms for 256; 0.03 ms per token of prompts
and migrated rows; 0.14 ms per trained token, 0.5 s per mini-batch; with 1,024 devices the same for instances of four
devices. A resized actor takes 2 s, a joining instance 1 s, a hand-over 0.2 s, a look 20 ms. The static split is the
best of six; all policies begin with it. `clairvoyant` is the best schedule found by search with known lengths,
`lower_bound` a proven bound (`hybridflow.planner.elastic.bounds`), `worst_gain` the worst iteration set (a seed) of
`gain`. Policies see the lengths of one iteration before.

Prints one JSON line; `--markdown` the table.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import fmean
from typing import Any

from hybridflow.planner import DecodingSpeed, ResponseLengths
from hybridflow.planner.elastic.bounds import best_static, clairvoyant, lower_bound
from hybridflow.planner.elastic.gain import gain
from hybridflow.planner.elastic.policies import lend, rlinf
from hybridflow.planner.elastic.simulated_runs import ElasticRun, drawn_lengths, simulate_elastic, start_of
from hybridflow.planner.elastic.state import Speeds

DECODING = DecodingSpeed.fitted((1, 0.008), (256, 0.028), prefill=3e-5)
SPEEDS = Speeds(DECODING, train=0.5, train_per_token=1.4e-4, resize=2.0, hand_over=0.2, join=1.0, look=0.02)
RATIOS = (4, 16, 64)
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
POLICIES = {"rlinf": rlinf(), "lend": lend, "gain": gain()}
COLUMNS = ("static_s", *POLICIES, "clairvoyant", "lower_bound", "worst_gain", "gain_over_clairvoyant")


def elastic_run(devices: int, ratio: float, seed: int, iterations: int) -> ElasticRun:
    each = 4 if devices > 128 else 1
    instances = devices // each
    return ElasticRun(
        devices=devices,
        rollout=instances // 2,
        actor=instances // 2,
        prompts=min(128 * devices, 16384) // 8,
        n=8,
        minibatches=4,
        speeds=SPEEDS,
        lengths=ResponseLengths(median=1024, ratio=ratio),
        tp=each,
        mp=each,
        prompt_tokens=256,
        iterations=iterations,
        seed=seed,
    )


def compare(devices: int, ratio: float, seed: int, iterations: int) -> dict[str, float]:
    """Seconds of the best static split; of everything else the ratio to it."""
    run = elastic_run(devices, ratio, seed, iterations)
    instances = run.rollout + run.actor
    actors = sorted({max(1, round(instances * share)) for share in SHARES})
    run, seconds = best_static(run, [(instances - actor, actor) for actor in actors])
    results = {name: simulate_elastic(run, policy) for name, policy in POLICIES.items()}
    found = {"static_s": seconds} | {name: result.mean / seconds for name, result in results.items()}
    seen, drawn = drawn_lengths(run)
    start = start_of(run, seen)
    known = [clairvoyant(start, lengths, 3 if devices > 32 else 6) for lengths in drawn]
    best = [min(known[i], *(result.seconds[i] for result in results.values())) for i in range(iterations)]
    bounds = [lower_bound(start, lengths) for lengths in drawn]
    return found | {"clairvoyant": fmean(best) / seconds, "lower_bound": fmean(bounds) / seconds}


def average(found: list[dict[str, float]]) -> dict[str, float]:
    means = {name: fmean(each[name] for each in found) for name in found[0]}
    means |= {"worst_gain": max(each["gain"] for each in found)}
    means |= {"gain_over_clairvoyant": means["gain"] / means["clairvoyant"]}
    return {name: round(means[name], 3) for name in COLUMNS}


def markdown(table: dict[str, dict[str, float]]) -> str:
    rows = [("devices", "max/median", *COLUMNS), ("---",) * (len(COLUMNS) + 2)]
    rows += [(*case.split("x"), *(str(found[name]) for name in COLUMNS)) for case, found in table.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 32, 128, 1024])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    begun, table = time.perf_counter(), dict[str, dict[str, float]]()
    for devices in args.devices:
        for ratio in RATIOS:
            runs = [compare(devices, ratio, seed, args.iterations) for seed in range(args.seeds)]
            table[f"{devices}x{ratio}"] = average(runs)
    if args.markdown:
        print(markdown(table))
    mean = fmean(found["gain_over_clairvoyant"] for found in table.values())
    result: dict[str, Any] = {"benchmark": "elastic_policies", "gain_over_clairvoyant": round(mean, 3), "cases": table}
    print(json.dumps(result | {"seconds": round(time.perf_counter() - begun, 1)}))


if __name__ == "__main__":
    main()
