"""Symmetric plans: all groups on all devices, every model cut alike. Pure.

A placement is compared with three of them: the plain one, without pipeline stages; the heuristic one, which an expert
would write (ReaL, section 8.1); and the fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from hybridflow.placement import Colocated
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, Parallel
from hybridflow.topology import divisors

_ENOUGH = 1e18  # bytes of KV cache for any rows


@dataclass(frozen=True)
class Symmetric:
    """`plan` has `pp` stages of `tp` ranks, and `used` of `capacity` bytes on its fullest device; the rest holds the
    keys and values of all rows in `waves`."""

    pp: int
    tp: int
    plan: ExecutionPlan
    used: float
    capacity: float
    waves: int

    def fits(self, margin: float = 0.0) -> bool:
        return self.used * (1 + margin) <= self.capacity

    def priced(self, costs: Costs) -> Colocated:
        seconds = costs.timeline(self.plan).per_iteration if self.fits() else 0.0
        return Colocated(self.tp, seconds, self.used, self.capacity, pp=self.pp)


def symmetric_plans(costs: Costs) -> list[Symmetric]:
    """One for each tp inside a node and number of stages, the fewest devices of a model first."""
    node, found = math.gcd(*(node.count for node in costs.cluster.nodes)), list[Symmetric]()
    for tp in divisors(node):
        for pp in divisors(costs.cluster.size // tp):
            if (plan := _plan(costs, pp, tp)) is not None and all(plan != other.plan for other in found):
                found.append(_measured(costs, pp, tp, plan))
    return found


def _plan(costs: Costs, pp: int, tp: int) -> ExecutionPlan | None:
    """Each group has the largest divisors of `tp` and `pp` that its model and its strategy allow. None where a group
    has no such layout."""
    mesh, plan = Mesh.of(0, costs.cluster.size), dict[str, CallPlan]()

    def largest(given: list[Parallel]) -> Parallel | None:
        alike = (sizes for sizes in given if pp % sizes.p == 0 and tp % sizes.t == 0)
        return max(alike, key=lambda sizes: (sizes.t, sizes.p), default=None)

    for group in costs.graph.groups:
        if (home := largest(costs.strategies(group, mesh))) is None:
            return None
        for call in costs.graph.of_group(group):
            here = largest(costs.generation_sizes(group, mesh, home)) if call.kind == "generation" else home
            plan[call.name] = CallPlan(mesh, here or home)
    return plan


def _measured(costs: Costs, pp: int, tp: int, plan: ExecutionPlan) -> Symmetric:
    homes = {call.name: plan[costs.homes[call.group]] for call in costs.calls}
    active = max(costs.added(call.name, plan[call.name], homes[call.name]).active for call in costs.calls)
    kept, waves = costs.kept(plan), 1
    devices = zip(kept, costs.capacity, strict=True)
    used, capacity = max(((static + active, most) for static, most in devices), key=lambda one: one[0] / one[1])
    for call in (call for call in costs.calls if call.kind == "generation"):
        room = costs.kv_budget(call.name, plan[call.name], max(kept))
        wanted = costs.added(call.name, plan[call.name], kv_budget=_ENOUGH).kv_cache
        waves = max(waves, math.ceil(wanted / max(room, 1.0)))
    return Symmetric(pp, tp, plan, used, capacity, waves)


def heuristic(costs: Costs, plans: list[Symmetric]) -> Symmetric | None:
    """tp inside a node, stages across nodes, data parallel ranks the rest: as few devices of a model as fit, also where
    the prediction is too low by its error, with room for the keys and values of all rows, or in the fewest waves. None
    where none does."""
    widest = max((one.tp for one in plans), default=0)
    alike = (one for one in plans if (one.pp == 1 or one.tp == widest) and one.fits(costs.margin))
    return min(alike, key=lambda one: (one.waves, one.tp, one.pp), default=None)


def heuristic_map(costs: Costs) -> ExecutionPlan | None:
    """The heuristic plan, if it keeps the constraints."""
    rules, found = costs.rules, heuristic(costs, symmetric_plans(costs))
    if found is None or not rules.allows_sets([costs.graph.groups]):
        return None
    here = ((call, found.plan[call.name]) for call in costs.calls)
    allowed = all(rules.allows(c.group, at.mesh, at.parallel, c.kind == "generation") for c, at in here)
    return found.plan if allowed else None


def compared_with(costs: Costs) -> tuple[Colocated, Colocated, Colocated]:
    """The plain placement with the smallest tp that fits, the heuristic and the fastest symmetric one; where none fits,
    the one that lacks least. Of the constraints only `Apart` counts: two generating groups cannot share hosts."""
    against = f"against {costs.rules.apart[0]}" if costs.rules.apart else "a group has no layout on all of them"
    plans = [] if costs.rules.apart else symmetric_plans(costs)
    least = partial(min, key=lambda one: one.used / one.capacity)
    flat, fitting = ([one for one in plans if one.pp == 1], [one for one in plans if one.fits()])
    priced = {id(one): one.priced(costs) for one in fitting}

    def value(given: list[Symmetric], chosen: Symmetric | None) -> Colocated:
        if not given:
            return Colocated(against=against)
        return priced[id(chosen)] if chosen else least(given).priced(costs)

    fastest = min(priced.values(), key=lambda one: one.seconds, default=None)
    plain = value(flat, next((one for one in flat if one.fits()), None))
    return plain, value(plans, heuristic(costs, plans)), fastest or value(plans, None)
