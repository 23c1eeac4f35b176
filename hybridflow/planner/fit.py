"""Fit: whether the models of a graph have room on a cluster at all, and which cluster they need. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridflow.errors import ModelError, PlacementError
from hybridflow.planner.cluster_spec import ClusterSpec
from hybridflow.planner.devices import GIB
from hybridflow.planner.plans import CallPlan, Mesh, Parallel
from hybridflow.planner.simulator import Simulator

MOST_DEVICES = 1 << 16


@dataclass(frozen=True)
class Need:
    """What one group needs on each device when its model is cut over all of them: bytes that stay, and on top."""

    group: str
    static: float
    active: float


def check_fits(simulator: Simulator) -> None:
    """Every model has room when all are cut over all devices, which needs least memory of all placements.

    Errors: PlacementError that names the model with the largest share, the missing memory, and the smallest cluster of
    such devices on which all fit.
    """
    cluster = simulator.cluster
    found, capacity = needs(simulator), simulator.capacity(_everywhere(cluster, 1, cluster.size))
    missing = _total(found) - capacity
    if missing <= 0:
        return
    largest = max(found, key=lambda need: need.static + need.active)
    model = simulator.graph.models[largest.group]
    size = f"{model.num_parameters / 1e9:.1f}B parameters" if model else "no model"
    enough = smallest_cluster(simulator)
    advice = (
        f"The smallest cluster of its devices that fits is {enough}" if enough else "No cluster of its devices fits"
    )
    raise PlacementError(
        f"the models do not fit on {cluster} ({cluster.size} devices with {capacity / GIB:.1f} GiB to use each): "
        f"{', '.join(need.group for need in found)} together need {_total(found) / GIB:.1f} GiB a device, "
        f"{missing / GIB:.1f} GiB more ({missing * cluster.size / GIB:.0f} GiB in all) than there are. Most of it is "
        f"for {largest.group} ({size}): {(largest.static + largest.active) / GIB:.1f} GiB a device. {advice}; or train "
        f"smaller models, recompute activations, or use a smaller micro_tokens."
    )


def needs(simulator: Simulator) -> list[Need]:
    """By group, in the layout over all devices that takes least. Groups that no layout can cut so are left at one
    device's share: they then miss memory."""
    found = []
    for group in simulator.graph.groups:
        if simulator.graph.models[group] is None:
            continue
        calls = [call.name for call in simulator.graph.of_group(group)]
        layouts = list(_layouts(simulator, group))
        options = [
            Need(group, simulator.static(group, plan), max(simulator.active(name, plan) for name in calls))
            for plan in layouts
        ]
        found.append(min(options, key=lambda need: need.static + need.active))
    return found


def smallest_cluster(simulator: Simulator) -> ClusterSpec | None:
    """The cluster with the fewest devices like the last node's on which all models fit together."""
    node = simulator.cluster.nodes[-1]
    sizes = [n for n in (1, 2, 4, 8, 16, 32) if n < node.count] + [node.count]
    clusters = [replace(simulator.cluster, nodes=(replace(node, count=n),)) for n in sizes]
    count = 2
    while count * node.count <= MOST_DEVICES and not _fits(clusters[-1], simulator):
        clusters.append(replace(simulator.cluster, nodes=(node,) * count))
        count = count + 1 if count < 8 else count + count // 8
    return next((cluster for cluster in clusters if _fits(cluster, simulator)), None)


def _fits(cluster: ClusterSpec, simulator: Simulator) -> bool:
    other = Simulator(cluster, simulator.graph, simulator.workload, simulator.coefficients)
    return _total(needs(other)) <= other.capacity(_everywhere(cluster, 1, cluster.size))


def _total(found: list[Need]) -> float:
    return sum(need.static for need in found) + max((need.active for need in found), default=0.0)


def _everywhere(cluster: ClusterSpec, p: int, t: int) -> CallPlan:
    return CallPlan(Mesh.of(0, cluster.size), Parallel(p, t, cluster.size // (p * t)))


def _layouts(simulator: Simulator, group: str) -> Iterator[CallPlan]:
    """All ways to cut a group's model over all devices that its sizes allow; on one device there is always one."""
    cluster = simulator.cluster
    for t in _divisors(cluster.size):
        for p in _divisors(cluster.size // t):
            plan = _everywhere(cluster, p, t)
            try:
                simulator.setting(group, plan)
            except ModelError:
                continue
            yield plan


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
