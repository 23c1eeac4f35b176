"""Which loop? A traced loop as the four that the library runs, each with the placement that suits it. Pure.

    colocated   the trained model generates, in turns with training     nothing is stale
    split       a group of its own generates whole batches, one ahead   one update
    streamed    a group of its own generates without a pause            up to the bound
    elastic     devices generate or train as rows finish                nothing is stale

Only the call that generates differs: its group, and how old its weights may be. Switches have their price in each:
transitions, weight syncs and recomputed caches, moves of devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridflow.errors import ConfigError, PlacementError
from hybridflow.placement import LoopPrice, Placement, ranges
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.constraints import Apart, Constraint, OneLayout, groups_of
from hybridflow.planner.describe.graph import Call, Graph
from hybridflow.planner.describe.mesh import ExecutionPlan
from hybridflow.planner.elastic.pricing import plan_elastic

ROLLOUT = "rollout"
Planned = Callable[..., Placement]
"""The placement of a graph under `constraints=`."""


def generating_calls(graph: Graph) -> tuple[tuple[Call, ...], str]:
    """The calls that generate with weights that the loop trains, and the group that has these. Errors: PlacementError
    for a loop without, or in which several groups do."""
    calls, trained = list[Call](), set[str]()
    for call in (call for call in graph.calls if call.kind == "generation"):
        steps = {graph.call(edge.source).group for edge in graph.into(call.name) if edge.kind == "parameters"}
        if steps:
            calls.append(call)
            trained |= steps
    groups = sorted({call.group for call in calls})
    if len(groups) != 1 or len(trained) != 1:
        which = f"the groups {', '.join(groups)} generate" if groups else "no group generates"
        raise PlacementError(f"{which} with weights that the loop trains; one can.")
    return tuple(calls), trained.pop()


def as_loop(graph: Graph, group: str | None = None, ahead: int = 0, continuous: bool = False) -> Graph:
    """The graph with generation in `group` (None: in the group that is trained), by weights that may be `ahead` updates
    older than in the synchronous loop; `continuous` as for `Call`."""
    calls, trained = generating_calls(graph)
    here = group or trained
    names = {call.name: f"{here}.{call.name.partition('.')[2]}" for call in calls}
    before = {call.name: call.ahead for call in calls}

    def moved(call: Call) -> Call:
        own = {"name": names.get(call.name, ""), "group": here, "ahead": ahead, "continuous": continuous}
        return replace(call, **own) if call.name in names else call

    edges = list(graph.edges)
    for i, edge in enumerate(edges):
        later = ahead - before.get(edge.target, ahead) if edge.distance else 0
        source, target = (names.get(name, name) for name in (edge.source, edge.target))
        edges[i] = replace(edge, source=source, target=target, distance=edge.distance + later)
    made = tuple(map(moved, graph.calls))
    models = {**graph.models, here: graph.models[calls[0].group]}
    kept = {call.group for call in made}
    models = {name: model for name, model in models.items() if name in kept}
    waits = {name: waits for name, waits in graph.offload.items() if name in kept}
    return replace(graph, calls=made, edges=tuple(edges), models=models, offload=waits)


def price_loops(costs: Costs, planned: Planned, own: Placement | None, staleness: int | None = None) -> list[LoopPrice]:
    """The four loops, in the order above. `own` is the placement of the graph as it is; `staleness` bounds split and
    streamed (None: that of the loop, at least 1)."""
    try:
        calls, trained = generating_calls(costs.graph)
    except PlacementError as error:
        return [LoopPrice(name, against=str(error)) for name in ("colocated", "split", "streamed", "elastic")]
    bound = max(1, calls[0].ahead) if staleness is None else staleness
    tokens = costs.workload.rows * costs.workload.tokens
    taken, names = {call.group for call in costs.graph.calls}, (f"{ROLLOUT}_{at}" for at in itertools.count(2))
    free = next(name for name in itertools.chain([ROLLOUT], names) if name not in taken)
    apart = calls[0].group if calls[0].group != trained else free

    def placed(name: str, graph: Graph, *more: Constraint) -> LoopPrice:
        calls, _ = generating_calls(graph)
        try:
            same = own if graph == costs.graph else None
            kept = [one for one in costs.constraints if {*groups_of(one)} <= {*graph.groups}]
            found = same or planned(graph, constraints=[*kept, *more])
        except PlacementError as error:
            return LoopPrice(name, staleness=calls[0].ahead, against=str(error))
        at = {ranges(found.calls[calls[0].name].devices): ["generation"]}
        for group, where in found.groups.items():
            if costs.graph.models.get(group) is not None and group != ROLLOUT:
                at.setdefault(ranges(where.devices), []).append(group)
        devices = "; ".join(f"{', '.join(groups)} on {where}" for where, groups in at.items())
        return LoopPrice(name, found.seconds, tokens / found.seconds, calls[0].ahead, devices)

    against = "the bound on staleness is 0" if not bound else "it generates in several calls" if calls[1:] else ""
    split = as_loop(costs.graph, apart, min(bound, 1))
    return [
        placed("colocated", as_loop(costs.graph)),
        placed("split", split, Apart(apart, trained)),
        LoopPrice("streamed", staleness=bound, against=against)
        if against
        else placed("streamed", as_loop(costs.graph, apart, bound, continuous=True), OneLayout(apart)),
        _elastic(costs, as_loop(costs.graph)),
    ]


def _elastic(costs: Costs, graph: Graph) -> LoopPrice:
    """By the policy `gain`, from the fastest static split."""
    steps = max((costs.minibatches(call)[0] for call in graph.calls if call.kind == "training"), default=1)
    how: dict[str, Any] = {"coefficients": costs.coefficients, "profile": costs.profile, "iterations": 1}
    try:
        found = plan_elastic(graph, costs.cluster, costs.workload, minibatches=steps, **how)
    except (PlacementError, ConfigError) as error:
        return LoopPrice("elastic", against=str(error))
    run = found.run
    rollouts = (run.devices - run.rollout * run.tp, run.devices)
    first, last = (ranges(range(*ends)) for ends in ((0, run.actor * run.mp), rollouts))
    devices = f"at the start generation on {last}, the others on {first}"
    return LoopPrice("elastic", found.elastic, costs.workload.rows * costs.workload.tokens / found.elastic, 0, devices)


def needed_staleness(costs: Costs, plan: ExecutionPlan) -> int | None:
    """The least staleness with which the loop takes no longer on these devices, by more than the predictions' error;
    None for a synchronous loop."""
    ahead = max((call.ahead for call in costs.calls if call.kind == "generation"), default=0)
    if not ahead:
        return None
    try:
        calls, _ = generating_calls(costs.graph)
    except PlacementError:  # of several groups
        return ahead
    group, continuous = calls[0].group, calls[0].continuous

    def seconds(bound: int) -> float:
        graph = as_loop(costs.graph, group, bound, continuous)
        other = Costs(costs.cluster, graph, costs.workload, costs.coefficients, costs.profile)
        return other.timeline(plan).per_iteration

    most = seconds(ahead) * (1 + costs.margin)
    return next((bound for bound in range(1, ahead) if seconds(bound) <= most), ahead)
