"""Seconds of each call of PPO at each layout, measured and predicted, and the calibration that follows (ReaL, tables 1
and 6).

All four groups have one layout (p, t, d) after the other, on all devices; calls wait for one another, so each has the
devices to itself. Predictions are those of the uncalibrated planner, and of the one that is calibrated on these calls,
which `--save FILE` writes for `hybridflow plan --coefficients FILE`. The model is small, or `--model DIR` with
`--reward-model DIR`. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hybridflow as hf
from benchmarks.planner_truth import Job, call_plan, program
from benchmarks.throughput import small_models
from hybridflow.models.spec import ModelSpec
from hybridflow.planner import Observation, calibrate
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import DEFAULT
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.mesh import Parallel
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search.planning import placement_of
from hybridflow.topology import divisors
from hybridflow.tracing.auto import as_priced


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The model, and the sizes of an iteration."""
    cuda = torch.cuda.device_count()
    parser.add_argument("--model", help="a directory with weights; default: a small random model")
    parser.add_argument("--reward-model", help="with --model: a directory")
    sizes = {"devices": cuda or 2, "rows": 64, "prompt": 16, "response": 32, "minibatches": 2, "repeats": 3}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)


def workload(args: argparse.Namespace) -> Workload:
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    sizes = {name: getattr(args, name) for name in ("rows", "prompt", "response", "minibatches")}
    return Workload(**sizes, dtype=dtype)


@contextmanager
def models(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as directory:
        yield (args.model, args.reward_model) if args.model else small_models(Path(directory))


class Layouts:
    """PPO on all devices, by the layout of its groups and that of generation."""

    def __init__(self, args: argparse.Namespace, policy: str, reward: str) -> None:
        self.args, self.models = args, (policy, reward)
        self.graph, self.work = program(policy, reward), workload(args)
        self.cluster = ClusterSpec.of("here") if torch.cuda.is_available() else ClusterSpec.this_machine(args.devices)
        self.costs = Costs(self.cluster, self.graph, self.work)

    def measure(self, sizes: tuple[int, int, int], generate: tuple[int, int]) -> tuple[Any, Mapping[str, float]]:
        """The placement with its predictions, and the median seconds of each call."""
        where = {"all": (tuple(range(self.args.devices)), sizes)}
        plans = {call.name: call_plan(call, where, generate) for call in self.costs.calls}
        placement = as_priced(placement_of(self.costs, plans, "given"), self.work)
        job = Job(placement, *self.models, self.work)
        each = list[Mapping[str, float]]()
        try:
            iterations = job.actor.session.iterations
            for _ in range(self.args.repeats + 1):
                iterations.begin(in_flight=1)
                for update in job.iteration():
                    update.get()
                each.append(iterations.seconds(iterations.current))
        finally:
            job.close()
        names = each[-1]  # the first iteration warms up
        return placement, {name: statistics.median(one[name] for one in each[1:]) for name in names}

    def observation(self, name: str, placement: Any, seconds: float) -> Observation:
        call, model = self.graph.call(name), self.graph.models[self.graph.call(name).group]
        assert isinstance(model, ModelSpec)
        return Observation(
            self.cluster, model, call.kind, Parallel(*placement.calls[name].sizes[:3]),
            self.work, seconds,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser)
    parser.add_argument("--layouts", nargs="+", metavar="P,T,D", help="default: every p = 1 and t of the devices")
    parser.add_argument("--save", metavar="FILE", help="the calibrated coefficients")
    args = parser.parse_args()
    given = [tuple(map(int, one.split(","))) for one in args.layouts or ()]
    layouts: Any = given or [(1, t, args.devices // t) for t in divisors(args.devices)]
    seen = list[tuple[str, str, Observation]]()
    with models(args) as (policy, reward):
        runs = Layouts(args, policy, reward)
        for sizes in layouts:
            placement, seconds = runs.measure(sizes, (1, sizes[1]))
            for name in (call.name for call in runs.graph.calls if call.kind != "function"):
                seen.append(("-".join(map(str, sizes)), name, runs.observation(name, placement, seconds[name])))
    hf.shutdown()
    fitted = calibrate([observation for *_, observation in seen])
    if args.save:
        fitted.save(args.save)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for layout, name, one in seen:
        taken = {"measured": one.seconds, "predicted": one.predicted(DEFAULT), "calibrated": one.predicted(fitted)}
        found.setdefault(layout, {})[name] = {kind: round(seconds, 4) for kind, seconds in taken.items()}
    errors = [abs(one.predicted(fitted) / one.seconds - 1) for *_, one in seen]
    result = {"benchmark": "calls", "layouts": found, "median_error_calibrated": round(statistics.median(errors), 3)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
