"""HybridFlow's findings about placements (section 8.3, figures 12, 13 and 15), asked of the planner: each holds or does
not, with the numbers behind it.

A100-80GB with NVLink, 200 Gbit/s between nodes of 8; prompts and responses of 1,024 tokens, 1,024 rows, 8 updates; the
models have LLaMA-3's sizes. Placements are the best that algorithm 1 finds among those of one kind: all models
together (colocate), actor and reference beside critic and reward model (split), each on its own (standalone), the
critic alone beside the others (critic apart). Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import combinations

from hybridflow.model_spec import ModelSpec
from hybridflow.planner.auto_mapping import auto_map
from hybridflow.planner.cluster_spec import ClusterSpec
from hybridflow.planner.constraints import Apart, Constraint, Together
from hybridflow.planner.graph import Graph, ppo
from hybridflow.planner.plans import CallPlan, Mesh, Parallel
from hybridflow.planner.simulator import Simulator
from hybridflow.planner.space import Problem
from hybridflow.planner.workload import Workload

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


def model(size: str) -> ModelSpec:
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    return ModelSpec(
        family="llama", hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=hidden // heads, vocab=128256, context=8192,
    )  # fmt: skip


def program(actor: str, critic: str) -> Graph:
    value = replace(model(critic), head="value")
    return ppo(model(actor), value, model(actor), value)


def placements(actor: str, critic: str, devices: int) -> dict[str, float | None]:
    """Seconds of an iteration by kind of placement; None where it does not fit."""
    cluster, graph = ClusterSpec.of(f"a100:{devices // 8}x8"), program(actor, critic)
    simulator = Simulator(cluster, graph, WORKLOAD)
    found = {kind: auto_map(Problem(graph, cluster, simulator, constraints=rules)) for kind, rules in KINDS.items()}
    return {kind: round(mapped.seconds, 1) if mapped else None for kind, mapped in found.items()}


def best(seconds: dict[str, float | None]) -> str | None:
    fitting = {kind: taken for kind, taken in seconds.items() if taken is not None}
    return min(fitting, key=fitting.__getitem__) if fitting else None


def generation_sizes() -> dict[int, float]:
    """Seconds of transition and generation of a 7B actor trained at 1-8-2 on 16 devices, by t_g."""
    simulator = Simulator(ClusterSpec.of("a100:2x8"), program("7B", "7B"), WORKLOAD)
    mesh, call = Mesh.of(0, 16), "actor.generate_sequences"
    home = CallPlan(mesh, Parallel(1, 8, 2))
    beside = sum(simulator.static(group, home) for group in GROUPS)
    found = {}
    for t in (1, 2, 4, 8):
        plan = CallPlan(mesh, Parallel(1, t, 16 // t))
        generation = simulator.cost(call, plan, simulator.room(call, plan, beside)).seconds
        found[t] = round(generation + simulator.reallocation("actor", home, plan), 2)
    return found


def findings() -> dict:
    equal = {
        (size, devices): placements(size, size, devices)
        for size, sweep in (("7B", (16, 32, 64)), ("13B", (16, 32, 64, 128)), ("34B", (64, 96, 128)))
        for devices in sweep
    }
    larger, sizes = placements("13B", "70B", 128), generation_sizes()
    small = {key: seconds for key, seconds in equal.items() if key[1] <= 64 and best(seconds)}
    wide = {key: seconds for key, seconds in equal.items() if key[0] == "34B" and key[1] > 64}
    alone = {("13B", 128): equal["13B", 128]}
    return {
        "colocating everything wins on 16-64 devices": _said(small, "colocate"),
        "splitting wins for 34B at 96-128": _said(wide, "split"),
        "standalone is best for 13B at 128": _said(alone, "standalone"),
        "a 70B critic beside a 13B actor at 128 gets its own half": _said({("13B+70B", 128): larger}, "critic apart"),
        "t_g = 2 is best for 7B trained at 1-8-2 on 16": {
            "holds": min(sizes, key=sizes.__getitem__) == 2,
            "seconds": {f"t_g={t}": seconds for t, seconds in sizes.items()},
        },
    }


def _said(numbers: dict[tuple[str, int], dict[str, float | None]], kind: str) -> dict:
    wrong = [f"{size} on {devices}" for (size, devices), seconds in numbers.items() if best(seconds) != kind]
    return {
        "holds": not wrong,
        "not for": wrong,
        "seconds": {f"{size} on {devices}": seconds for (size, devices), seconds in numbers.items()},
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(json.dumps(findings()))


if __name__ == "__main__":
    main()
