"""Run time of the planner's searches, and quality of their plans over time.

`mapping`: HybridFlow's algorithm 1 for PPO with four models (13B actor and reference, 34B critic and reward) on nodes
of eight A100s: seconds of one core by number of devices, and the numbers of allocations bounded and evaluated; `growth`
is the exponent of the time over the last two numbers of devices. `search`: MCMC over execution plans of four 70B models
on eight nodes of eight H100s: microseconds of CPU and wall time per plan, and the seconds per iteration of the best
plan after each of `--budgets` wall seconds of one run, relative to the last. It starts from algorithm 1's placements by
stages (`mapped_s`) and by timeline (`overlapped_s`). Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.dataflows import ppo
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Graph
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search.auto_mapping import auto_map, overlap_map
from hybridflow.planner.search.call_search import mcmc
from hybridflow.planner.search.deadline import Deadline

SIZES = {"7B": (4096, 14336, 32, 32, 8), "13B": (5120, 13824, 40, 40, 40), "34B": (8192, 22016, 48, 64, 8)}
SIZES["70B"] = (8192, 28672, 80, 64, 8)


def llama(size: str, head: Any = "lm") -> ModelSpec:
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    return ModelSpec(
        family="llama",
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab=128256,
        head=head,
    )


def problem_of(graph: Graph, cluster: str, rows: int) -> Costs:
    spec, work = ClusterSpec.of(cluster), Workload(rows=rows, prompt=1024, response=1024, minibatches=8)
    return Costs(spec, graph, work)


def mapping(devices: Sequence[int]) -> dict[str, Any]:
    graph, found = ppo(llama("13B"), llama("34B", "value"), llama("13B"), llama("34B", "value")), {}
    for count in devices:
        began = time.process_time()
        best = auto_map(problem_of(graph, f"a100:{count // 8}x8", 1024))
        took = time.process_time() - began
        sets = {"+".join(groups): mesh.size for groups, mesh in best.sets.items()} if best else None
        figures = {"allocations": best.allocations, "tried": best.tried, "iteration_s": best.seconds} if best else {}
        found[count] = {"seconds": round(took, 2), "sets": sets, **figures}
    last = [(count, found[count]["seconds"]) for count in devices][-2:]
    growth = math.log(last[1][1] / last[0][1]) / math.log(last[1][0] / last[0][0]) if len(last) == 2 else None
    return {"by_devices": found, "growth": growth and round(growth, 2)}


def search(budgets: Sequence[float], seed: int) -> dict[str, Any]:
    graph = ppo(llama("70B"), llama("70B", "value"), llama("70B"), llama("70B", "value"))
    problem = problem_of(graph, "h100:8x8", 1024)
    mapped, overlapped = auto_map(problem), overlap_map(problem)
    starts = [found.plan for found in (mapped, overlapped) if found]
    began = time.process_time()
    best = mcmc(problem, starts=starts, seed=seed, deadline=Deadline.of(max(budgets)))
    took = time.process_time() - began
    if best is None:
        return {"found": None}
    after = {budget: min(cost for at, cost in best.history if at <= budget) for budget in sorted(budgets)}
    return {
        "plans": best.evaluations,
        "cpu_us_per_plan": round(1e6 * took / best.evaluations, 1),
        "wall_us_per_plan": round(1e6 * best.elapsed / best.evaluations, 1),
        "mapped_s": mapped and problem.timeline(mapped.plan).per_iteration,
        "overlapped_s": overlapped and overlapped.seconds,
        "iteration_s": best.seconds,
        "over_last": {budget: round(cost / best.seconds, 4) for budget, cost in after.items()},
        "plan": {name: str(call) for name, call in best.plan.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[16, 32, 64, 128, 1024])
    parser.add_argument("--budgets", type=float, nargs="*", default=[10.0, 60.0, 600.0])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = {"mapping": mapping(given.devices)} if given.devices else {}
    if given.budgets:
        found["search"] = search(given.budgets, given.seed)
    print(json.dumps({"benchmark": "planner", **found}))


if __name__ == "__main__":
    main()
