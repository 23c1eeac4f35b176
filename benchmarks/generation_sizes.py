"""Seconds of generation and of the transition before it by generation size t_g, the actor trained with tp = t on all
devices (HybridFlow, figure 15): measured, and predicted without calibration.

The model is small, or `--model DIR` with `--reward-model DIR`. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json

import hybridflow as hf
from benchmarks.calls import Layouts, add_sizes, models
from hybridflow.topology import divisors

CALL = "actor.generate_sequences"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser)
    parser.add_argument("--tp", type=int, help="t of training; default: all devices")
    args = parser.parse_args()
    t, found = args.tp or args.devices, {}
    with models(args) as (policy, reward):
        runs = Layouts(args, policy, reward)
        for size in divisors(t):
            placement, seconds = runs.measure((1, t, args.devices // t), (1, size))
            transition = seconds.get(f"{CALL}/transition", 0.0)
            found[size] = {
                "generation": round(seconds[CALL] - transition, 4),
                "transition": round(transition, 4),
                "predicted": round(placement.calls[CALL].seconds, 4),
            }
    hf.shutdown()
    best = min(found, key=lambda size: found[size]["generation"] + found[size]["transition"])
    print(json.dumps({"benchmark": "generation_sizes", "t": t, "t_g": found, "fastest": best}))


if __name__ == "__main__":
    main()
