"""Which idle models to keep in host memory between their calls, where that lets a plan fit or makes it faster. Pure.

Models that are away leave memory to others: to weights in fewer parts, and to the KV cache of generation. Each of their
calls pays for the way from and to host memory. All sets of groups that can be away are tried by stage-wise cost; a
further group must shorten the iteration by more than the predictions' error, as a further layout must."""

from __future__ import annotations

import math
from itertools import combinations

from hybridflow.placement import GIB
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.mesh import ExecutionPlan
from hybridflow.planner.search.auto_mapping import AutoMapping
from hybridflow.planner.search.deadline import NEVER, Deadline


def offloaded(costs: Costs, deadline: Deadline = NEVER) -> list[Costs]:
    """What is worth a search: the costs as they are, and with the groups away that have the fastest placement, where
    that is another one; these alone where nothing fits otherwise."""
    if not costs.may_wait:
        return [costs]
    best, stay = list[Costs](), AutoMapping(costs, deadline).best
    limit = math.inf if stay is None else stay.seconds
    sets = [names for count in range(len(costs.may_wait)) for names in combinations(costs.may_wait, count + 1)]
    for names in sets:
        if limit < math.inf and deadline.over:
            break
        worth = (1 + costs.margin) ** len(names)
        other = costs.offloading(names)
        if (found := AutoMapping(other, deadline, limit / worth).best) is not None:
            best, limit = [other], found.seconds * worth
    return [costs, *best] if stay is not None or not best else best


def offload_lines(costs: Costs, plan: ExecutionPlan) -> list[str]:
    """What each group that is away costs, and what it leaves to others."""
    lines = []
    for group in sorted(costs.away & {*costs.graph.groups}):
        home = plan[costs.homes[group]]
        seconds = sum(costs.trip(call, home) for call in costs.graph.of_group(group))
        room = costs.resting(group, home).static
        lines.append(f"{group} offloaded: +{seconds:.3g} s per iteration, {room / GIB:.3g} GiB per device")
    return lines
