"""The plain placement, to compare with: all groups on all devices, tensor parallel groups inside a node. Pure."""

from __future__ import annotations

import math

from hybridflow.placement import Colocated
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh
from hybridflow.topology import divisors


def colocated(costs: Costs) -> Colocated:
    """The plain placement with the smallest tp that fits; where none fits, with the one that lacks least.

    Of the constraints only `Apart` counts: two generating groups cannot share hosts."""
    if costs.rules.apart:
        return Colocated(against=f"against {costs.rules.apart[0]}")
    best, least = Colocated(against="a group has no layout on all of them"), math.inf
    for tp in divisors(math.gcd(*(node.count for node in costs.cluster.nodes))):
        if (plan := colocated_plan(costs, tp)) is None:
            continue
        homes = {call.name: plan[costs.homes[call.group]] for call in costs.calls}
        active = max(costs.added(call.name, plan[call.name], homes[call.name]).active for call in costs.calls)
        devices = zip(costs.kept(plan), costs.capacity, strict=True)
        used, capacity = max(((kept + active, most) for kept, most in devices), key=lambda one: one[0] / one[1])
        if used <= capacity:
            return Colocated(tp, costs.timeline(plan).per_iteration, used, capacity)
        if used / capacity < least:
            best, least = Colocated(tp, 0.0, used, capacity), used / capacity
    return best


def colocated_plan(costs: Costs, tp: int) -> ExecutionPlan | None:
    """All calls on all devices, without pipeline stages; each group has the largest divisor of `tp` that its model and
    its strategy allow. None where a group has no such layout."""
    mesh, plan = Mesh.of(0, costs.cluster.size), dict[str, CallPlan]()
    for group in costs.graph.groups:
        flat = [sizes for sizes in costs.strategies(group, mesh) if sizes.p == 1 and tp % sizes.t == 0]
        if not flat:
            return None
        home = max(flat, key=lambda sizes: sizes.t)
        inside = [sizes for sizes in costs.generation_sizes(group, mesh, home) if sizes.p == 1 and tp % sizes.t == 0]
        for call in costs.graph.of_group(group):
            here = max(inside, key=lambda sizes: sizes.t) if call.kind == "generation" else home
            plan[call.name] = CallPlan(mesh, here)
    return plan
