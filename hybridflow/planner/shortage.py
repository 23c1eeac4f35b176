"""Shortage: what is missing when nothing fits: of which model, how much memory, and which cluster has it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hybridflow.errors import PlacementError
from hybridflow.planner.auto_mapping import auto_map
from hybridflow.planner.cluster_spec import ClusterSpec
from hybridflow.planner.devices import GIB
from hybridflow.planner.graph import Call
from hybridflow.planner.plans import Mesh
from hybridflow.planner.space import Problem
from hybridflow.planner.stages import undominated

MOST_NODES = 4096


def shortage(problem: Problem, on: Callable[[ClusterSpec], Problem]) -> PlacementError:
    """The error for a problem that has no placement. `on` states the same problem for another cluster."""
    capacity, size = min(problem.capacity), problem.cluster.size
    needs = {group: least_memory(problem, group) for group in problem.graph.groups}
    where = f"{size} devices of {problem.cluster}"
    if impossible := [group for group, choices in needs.items() if not len(choices)]:
        what = f"{impossible[0]} cannot be cut for {where} in any way"
    else:
        alone = {group: float(choices.sum(axis=1).min()) for group, choices in needs.items()}
        together = _together(list(needs.values()))
        largest = max(alone, key=alone.__getitem__)
        asked, name = (alone[largest], largest) if alone[largest] > capacity else (together, "")
        model = problem.graph.models[largest]
        billions = f" ({model.num_parameters / 1e9:.1f} billion parameters)" if model else ""
        who = f"{name}{billions}" if name else f"all models together, of which {largest}{billions} is the largest,"
        lack = asked - capacity
        if lack <= 0:
            given = ", ".join(str(constraint) for constraint in problem.constraints)
            return PlacementError(f"no placement on {where} keeps {given or 'what fits'}. Loosen a constraint.")
        what = (
            f"{who} needs at least {asked / GIB:.1f} GiB on each of {where}, {capacity / GIB:.1f} GiB are usable: "
            f"{lack / GIB:.1f} GiB a device are missing"
        )
    smallest = smallest_cluster(problem, on)
    more = (
        f"The smallest cluster of such nodes that fits is {smallest}." if smallest else "No number of nodes is enough."
    )
    return PlacementError(f"the cluster is too small: {what}. {more} Or use smaller models, batches or lengths.")


def least_memory(problem: Problem, group: str) -> np.ndarray:
    """[choices, 2]: static and active bytes per device of a group on the whole cluster, which no other choice beats."""
    mesh, rows = Mesh.of(0, problem.cluster.size), []
    calls = problem.graph.of_group(group)
    for parallel in problem.strategies(group, mesh, all(call.kind == "generation" for call in calls)):
        options = [problem.option(call, mesh, parallel) for call in calls if _at_home(call, calls)]
        known = [option for option in options if option is not None]
        if len(known) == len(options) and known:
            rows.append((known[0].static, max(option.active for option in known)))
    found = np.array(rows).reshape(-1, 2)
    return found[undominated(found)]


def smallest_cluster(problem: Problem, on: Callable[[ClusterSpec], Problem]) -> ClusterSpec | None:
    """The cluster with the fewest further nodes, like its last, on which everything fits."""
    cluster = problem.cluster
    low, high = len(cluster.nodes), len(cluster.nodes)
    while high < MOST_NODES:
        high = high * 2
        if _fits(on(grown(cluster, high))):
            break
        low = high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(on(grown(cluster, middle))) else (middle, high)
    return grown(cluster, high)


def grown(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """With so many nodes, further ones like the last."""
    return replace(cluster, nodes=cluster.nodes + cluster.nodes[-1:] * (nodes - len(cluster.nodes)))


def _fits(problem: Problem) -> bool:
    """All groups on all devices; where sizes do not divide well, any placement of a cluster that is not too large."""
    needs = [least_memory(problem, group) for group in problem.graph.groups]
    capacity = min(problem.capacity)
    if all(len(choices) for choices in needs) and _together(needs) <= capacity:
        return True
    return problem.cluster.size <= 32 and auto_map(problem) is not None


def _together(needs: list[np.ndarray]) -> float:
    """Least bytes per device of all groups on the same devices."""
    both = np.zeros((1, 2))
    for choices in needs:
        static = (both[:, None, 0] + choices[None, :, 0]).reshape(-1)
        active = np.maximum(both[:, None, 1], choices[None, :, 1]).reshape(-1)
        both = np.stack([static, active], axis=1)
        both = both[undominated(both)]
    return float(both.sum(axis=1).min()) if len(both) else float("inf")


def _at_home(call: Call, calls: tuple[Call, ...]) -> bool:
    """Generation may have a layout of its own; alone, it is at home."""
    return call.kind != "generation" or all(other.kind == "generation" for other in calls)
