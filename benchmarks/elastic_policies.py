"""Seconds of an iteration under device policies, simulated, relative to the best static split of the same devices.

For 8 to 1,024 devices and responses whose longest of a thousand has 4, 16 and 64 times the median length of 1,024
tokens, and 21, as published: with Laminar's, the 99th percentile is ten medians (arXiv 2510.12633, by the summary on
papers.lunadong.com; that it is lognormal is assumed). 128 responses per device, at most 16,384, in groups of 8 with
prompts of 256 tokens, and four mini-batches. The seconds are those of a 7B model with one device for each instance, by
arithmetic and not measured (as in `benchmarks.streams --simulate`): a decoding step of 8 ms for one row and 28 ms for
256; 0.03 ms per token of prompts and migrated rows; 0.14 ms per trained token, 0.5 s per mini-batch; with 1,024 devices
the same for instances of four devices. A resized actor takes 2 s, a joining instance 1 s, a hand-over 0.2 s, a look
20 ms. The static split is the best of six; all policies begin with it and see the lengths of one iteration before.

`search`: the best schedule that `benchmarks.clairvoyant` found; `clairvoyant`: the best of it and the policies, found
and not proven; `lower_bound`: proven. `gain` over either is the ratio of the means over seeds; `worst_gain`: of the
worst one.

Prints one JSON line; `--markdown` the table.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import fmean
from typing import Any

from benchmarks.clairvoyant import Search, lower_bound
from hybridflow.planner import DecodingSpeed, ResponseLengths
from hybridflow.planner.elastic.policies import POLICIES
from hybridflow.planner.elastic.simulation import ElasticRun, best_static, drawn_lengths, simulate_elastic, start_of
from hybridflow.planner.elastic.state import Speeds

DECODING = DecodingSpeed.fitted((1, 0.008), (256, 0.028), prefill=3e-5)
SPEEDS = Speeds(DECODING, train=0.5, train_per_token=1.4e-4, resize=2.0, hand_over=0.2, join=1.0, look=0.02)
RATIOS = (4, 16, 64, 21)
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
MOVING = ("rlinf", "lend", "gain")
COLUMNS = ("static_s", *MOVING, "search", "clairvoyant", "lower_bound", "worst_gain")
OVER = ("clairvoyant", "lower_bound")


def elastic_run(devices: int, ratio: float, seed: int) -> ElasticRun:
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
        seed=seed,
    )


def compare(devices: int, ratio: float, seed: int) -> dict[str, float]:
    """Seconds of the best static split; of everything else the ratio to it."""
    run = elastic_run(devices, ratio, seed)
    instances = run.rollout + run.actor
    actors = sorted({max(1, round(instances * share)) for share in SHARES})
    run, seconds = best_static(run, [(instances - actor, actor) for actor in actors])
    found = {name: simulate_elastic(run, POLICIES[name]).mean for name in MOVING}
    seen, (lengths,) = drawn_lengths(run)
    start = start_of(run, seen)
    found["search"] = Search().seconds(start, lengths)
    found["clairvoyant"] = min(seconds, *found.values())
    found["lower_bound"] = lower_bound(start, lengths)
    return {"static_s": seconds} | {name: each / seconds for name, each in found.items()}


def average(found: list[dict[str, float]]) -> dict[str, float]:
    means = {name: fmean(each[name] for each in found) for name in found[0]}
    means |= {"worst_gain": max(each["gain"] for each in found)}
    ratios = {f"gain_over_{name}": means["gain"] / means[name] for name in OVER}
    return {name: round(value, 3) for name, value in ({name: means[name] for name in COLUMNS} | ratios).items()}


def markdown(table: dict[str, dict[str, float]]) -> str:
    names = (*COLUMNS, *(f"gain_over_{name}" for name in OVER))
    rows = [("devices", "max/median", *names), ("---",) * (len(names) + 2)]
    rows += [(*case.split("x"), *(str(found[name]) for name in names)) for case, found in table.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of all iterations: by how much `gain` is over the others, and how often the search is behind it."""
    over = {name: [run["gain"] / run[name] for run in runs] for name in ("search", "clairvoyant", "lower_bound")}
    found = {f"gain_over_{name}": fmean(each) for name, each in over.items()}
    found |= {f"gain_over_{name}_at_most": max(each) for name, each in over.items()}
    found |= {"worst_over_static": max(run["gain"] for run in runs)}
    found |= {"search_behind_gain": sum(each < 1 - 1e-9 for each in over["search"]), "iterations": len(runs)}
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 32, 128, 1024])
    parser.add_argument("--seeds", type=int, default=3, help="above 128 devices one")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    begun, table, runs = time.perf_counter(), dict[str, dict[str, float]](), list[dict[str, float]]()
    for devices in args.devices:
        for ratio in RATIOS:
            seeds = args.seeds if devices <= 128 else 1
            cell = [compare(devices, ratio, seed) for seed in range(seeds)]
            table[f"{devices}x{ratio}"] = average(cell)
            runs += cell
    if args.markdown:
        print(markdown(table))
    result: dict[str, Any] = {"benchmark": "elastic_policies", **summary(runs), "cases": table}
    print(json.dumps(result | {"seconds": round(time.perf_counter() - begun, 1)}))


if __name__ == "__main__":
    main()
