"""Checks whether the planner's predictions confirm HybridFlow's findings about placements (section 8.3, figures 12, 13
and 15).

A100-80GB with NVLink, 200 Gbit/s between nodes of 8; prompts and responses of 1,024 tokens, 1,024 rows, 8 updates; the
models have LLaMA-3's sizes, and the loop is that of figure 6, whose old log-probabilities are those of generation.

Kinds of placement: all models together (colocate); actor and reference apart from critic and reward model (split); each
model on its own devices (standalone); the critic apart from the others (critic apart). Two placements of each kind are
evaluated: algorithm 1's result for its stage-wise cost (`by stages`), timed by its timeline, and the best one by
timeline (`by timeline`), in which stages on separate devices overlap. The paper's findings are measurements, so a
finding holds if the timelines of algorithm 1's results confirm it; figure 12 compares the first three kinds. Prints one
JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from benchmarks.dataflows import ppo
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Apart, Constraint, Together
from hybridflow.planner.describe.graph import Graph
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search.auto_mapping import AutoMapping, Mapped, auto_map, overlap_map

SIZES = {
    "7B": (4096, 14336, 32, 32, 8),
    "13B": (5120, 13824, 40, 40, 40),
    "34B": (8192, 22016, 48, 64, 8),
    "70B": (8192, 28672, 80, 64, 8),
}
WORKLOAD = Workload(rows=1024, prompt=1024, response=1024, minibatches=8)
GROUPS = ("actor", "critic", "reference", "reward")
KINDS: dict[str, tuple[Constraint, ...]] = {
    "colocate": tuple(Together("actor", group) for group in GROUPS[1:]),
    "split": (Together("actor", "reference"), Together("critic", "reward"), Apart("actor", "critic")),
    "standalone": tuple(Apart(*pair) for pair in combinations(GROUPS, 2)),
    "critic apart": (Together("actor", "reference"), Together("actor", "reward"), Apart("actor", "critic")),
}
FIGURE_12, APART = ("colocate", "split", "standalone"), ("critic apart",)
Case = tuple[str, str, int]  # the actor's size, the critic's, devices
EQUAL: tuple[Case, ...] = (
    ("7B", "7B", 16), ("7B", "7B", 32), ("7B", "7B", 64),
    ("13B", "13B", 16), ("13B", "13B", 32), ("13B", "13B", 64),
    ("34B", "34B", 32), ("34B", "34B", 64),
)  # fmt: skip
STRONG = {"7B": 8, "13B": 16, "34B": 32, "70B": 64}  # least devices of each size in figure 9


def model(size: str) -> ModelSpec:
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    return ModelSpec(
        family="llama", hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=hidden // heads, vocab=128256, context=8192,
    )  # fmt: skip


def program(actor: str, critic: str) -> Graph:
    value = replace(model(critic), head="value")
    return ppo(model(actor), value, model(actor), value, log_probs=False)


def problem_of(case: Case, constraints: tuple[Constraint, ...] = ()) -> Costs:
    cluster, graph = ClusterSpec.of(f"a100:{case[2] // 8}x8@200Gbps"), program(*case[:2])
    return Costs(cluster, graph, WORKLOAD, constraints=constraints)


def placements(case: Case, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Seconds per iteration by kind of placement that fits: by stages, by timeline, and the least timeline of the kind,
    with the devices of each colocated set."""
    found = {}
    for kind in kinds:
        problem = problem_of(case, KINDS[kind])
        mapping = AutoMapping(problem)
        mapped, overlapped = mapping.best, overlap_map(problem, search=mapping)
        if mapped is not None and overlapped is not None:
            found[kind] = {
                "stages": round(mapped.seconds, 1),
                "timeline": round(problem.timeline(mapped.plan).per_iteration, 1),
                "devices": devices(mapped),
                "best timeline": round(overlapped.seconds, 1),
                "its devices": devices(overlapped),
            }
    return found


def devices(mapped: Mapped) -> dict[str, int]:
    return {"+".join(sorted(groups)): mesh.size for groups, mesh in mapped.sets.items()}


def finding(cases: Sequence[Case], wanted: str, among: Sequence[str], beside: Sequence[str] = ()) -> dict[str, Any]:
    """Whether the `wanted` kind is the fastest of the kinds `among` in all cases, with the seconds of these and of the
    kinds `beside`."""
    numbers = {
        f"{actor}+{critic} on {n}": placements((actor, critic, n), (*among, *beside)) for actor, critic, n in cases
    }

    def others(figure: str) -> list[str]:
        """Cases in which another kind is faster."""
        fitting = {name: {kind: own[kind][figure] for kind in among if kind in own} for name, own in numbers.items()}
        return [name for name, own in fitting.items() if own and min(own, key=own.__getitem__) != wanted]

    wrong = others("timeline")
    best = {"not by the best timelines for": others("best timeline")}
    return {"holds": not wrong, "not for": wrong, **best, "among": list(among), "seconds": numbers}


def generation_sizes(size: str) -> dict[int, float]:
    """Seconds of transition and generation by t_g, for an actor trained at 1-8-2 on 16 separate devices."""
    simulator = Costs(ClusterSpec.of("a100:2x8@200Gbps"), program(size, size), WORKLOAD)
    mesh, call = Mesh.of(0, 16), "actor.generate_sequences"
    home = CallPlan(mesh, Parallel(1, 8, 2))
    found = {}
    for t in (1, 2, 4, 8):
        plan = CallPlan(mesh, Parallel(1, t, 16 // t))
        found[t] = round(simulator.cost(call, plan).seconds + simulator.reallocation("actor", home, plan), 2)
    return found


def best_size(size: str, wanted: int) -> dict[str, Any]:
    seconds = generation_sizes(size)
    found = {f"t_g={t}": taken for t, taken in seconds.items()}
    return {"holds": min(seconds, key=seconds.__getitem__) == wanted, "seconds": found}


def strong_scaling() -> dict[str, Any]:
    """Section 8.2: scaling efficiency from the fewest devices to 128, by model size and on average (published average
    over all algorithms: 66.8 %)."""
    found = {}
    for size, fewest in STRONG.items():
        mapped = [auto_map(problem_of((size, size, count))) for count in (fewest, 128)]
        few, many = (one.seconds if one else float("nan") for one in mapped)
        found[size] = round(few / many / (128 / fewest), 3)
    return {"published": 0.668, "mean": round(sum(found.values()) / len(found), 3), **found}


def findings() -> dict[str, Any]:
    larger = ("13B", "70B", 128)
    return {
        "colocating everything wins on 16-64 devices": finding(EQUAL, "colocate", FIGURE_12, APART),
        "splitting wins for 34B at 96-128": finding([("34B", "34B", n) for n in (96, 128)], "split", FIGURE_12, APART),
        "standalone is best for 13B at 128": finding([("13B", "13B", 128)], "standalone", FIGURE_12, APART),
        "a 70B critic beside a 13B actor at 128 gets its own half": finding(
            [larger], "critic apart", FIGURE_12 + APART
        ),
        "t_g = 2 is best for 7B trained at 1-8-2 on 16": best_size("7B", 2),
        "t_g = 4 is best for 13B trained at 1-8-2 on 16": best_size("13B", 4),
        "strong scaling": strong_scaling(),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps({"benchmark": "planner_findings", **findings()}))


if __name__ == "__main__":
    main()
