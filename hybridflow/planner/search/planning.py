"""Planning: from a graph, a cluster and a workload to the best placement found. Pure.

Small spaces of execution plans are searched exactly. In larger ones HybridFlow's auto-mapping finds where every group
goes, and MCMC starts from there to give calls of a group layouts of their own where that is faster (ReaL).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, get_args

from hybridflow.errors import ConfigError, PlacementError, nearest
from hybridflow.placement import Bar, CallLayout, CallPlacement, GroupPlacement, Placement
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients
from hybridflow.planner.cost.layer_profile import LayerProfile
from hybridflow.planner.cost.simulator import Simulator
from hybridflow.planner.cost.timeline import Order
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Constraint
from hybridflow.planner.describe.graph import Graph
from hybridflow.planner.describe.mesh import ExecutionPlan
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.explain import alternatives, infeasibility_report
from hybridflow.planner.search.auto_mapping import AutoMapping, overlap_map
from hybridflow.planner.search.exact import exact, space_size
from hybridflow.planner.search.mcmc import mcmc
from hybridflow.planner.search.problem import Problem, plan_moves
from hybridflow.planner.search.similarity import similarity_map

Search = Literal["auto", "auto_mapping", "exact", "mcmc", "similarity"]
SMALL = 1e7
"""Execution plans that are searched exactly, as far as time allows."""


def plan(
    graph: Graph,
    cluster: ClusterSpec | str,
    workload: Workload,
    constraints: Sequence[Constraint] = (),
    *,
    coefficients: Coefficients = DEFAULT,
    profile: LayerProfile | None = None,
    budget_s: float = 10.0,
    seed: int = 0,
    per_call: bool = True,
    search: Search = "auto",
    order: Order = "program",
) -> Placement:
    """The placement with the least time per iteration that is found, after auto-mapping, in `budget_s` seconds.

    With `per_call=False` all calls of a group but generation have one layout, as auto-mapping finds it. `search` asks
    for one search instead of those that suit the size: "auto_mapping", "exact" and "mcmc" (which start from that), or
    "similarity", which puts all groups on all devices. `order` is how devices take their calls (see `GraphSchedule`):
    hosts take them in program order.

    Errors: ConfigError; PlacementError for constraints that contradict each other, and for a cluster that is too small
    (for which model, how much memory is missing, and the smallest cluster that fits).
    """
    if not budget_s > 0:
        raise ConfigError(f"budget_s={budget_s!r}: give a positive number of seconds.")
    if search not in get_args(Search):
        raise ConfigError(f"search={search!r} is unknown.{nearest(str(search), get_args(Search))}")
    rules, spec = tuple(constraints), ClusterSpec.of(cluster)
    if profile is not None:
        spec, coefficients = profile.measured(spec), profile.coefficients(coefficients)

    def problem_on(spec: ClusterSpec) -> Problem:
        simulator = Simulator(spec, graph, workload, coefficients, profile)
        return Problem(graph, spec, simulator, rules)

    problem = problem_on(spec)
    found = _search(problem, search, budget_s, seed, per_call, order)
    if found is None and search == "similarity":
        raise PlacementError(
            f"search='similarity' puts all groups on all {spec.size} devices, where they do not fit or constraints "
            "part them. Use search='auto'."
        )
    if found is None:
        raise infeasibility_report(problem, problem_on, per_call=per_call)
    return placement_of(problem, *found, order=order)


def _search(
    problem: Problem, search: Search, budget_s: float, seed: int, per_call: bool, order: Order
) -> tuple[ExecutionPlan, str] | None:
    """The fastest plan of all that the search finds, and by what it was found."""
    found: list[tuple[ExecutionPlan, str]] = []
    if search == "similarity":
        mapped = similarity_map(problem)
        return (mapped, "similarity search") if mapped is not None and problem.fits(mapped) else None
    mapping = AutoMapping(problem)
    by_timeline = overlap_map(problem, order, mapping)
    for mapped, how in ((mapping.best, "auto-mapping"), (by_timeline, "auto-mapping by timeline")):
        if mapped is not None and problem.fits(mapped.plan):
            found.append((mapped.plan, how))
    of_calls = per_call or not found if search == "auto" else search != "auto_mapping"
    left = budget_s if of_calls else 0.0
    if of_calls and (search == "exact" or (search == "auto" and space_size(problem) <= SMALL)):
        share = left if search == "exact" else left / 2
        best = exact(problem, start=found[0][0] if found else None, budget_s=share, order=order)
        left = 0.0 if best and best.complete else left - share
        if best is not None:
            found.append((best.plan, "exact enumeration" if best.complete else "enumeration"))
    if left > 0:
        best = mcmc(problem, starts=[p for p, _ in found], seed=seed, budget_s=left, order=order, patience=12)
        if best is not None:
            found.append((best.plan, "MCMC"))
    # of equals the earlier one: auto-mapping moves less
    return min(found, key=lambda one: _rounded(problem.timeline(one[0], order=order).per_iteration), default=None)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def placement_of(problem: Problem, found: ExecutionPlan, found_by: str, *, order: Order = "program") -> Placement:
    """An execution plan with everything that there is to say of it."""
    timeline = problem.timeline(found, order=order)
    nodes = tuple(node.count for node in problem.cluster.nodes)
    groups = {}
    for group in problem.graph.groups:
        home = found[problem.homes[group]]
        generation = next((c for c in problem.graph.of_group(group) if c.kind == "generation"), None)
        sizes = found[generation.name].parallel if generation else None
        has_model = problem.graph.models[group] is not None
        train = problem.backends[group].sized(home.parallel) if has_model else None
        generate = (sizes.p, sizes.t) if sizes else None
        away = _elsewhere(problem, found, group)
        share = _memory_fraction(problem, found, generation.name) if generation else None
        groups[group] = GroupPlacement(home.mesh.devices, nodes, train, generate, away, share)
    middle = (max(span.iteration for span in timeline.spans) + 1) // 2
    spans = [span for span in timeline.of(middle) if span.mesh is not None]
    first = min((span.start for span in spans), default=0.0)
    bars = tuple(
        Bar(
            span.call,
            problem.graph.call(span.call).group,
            span.mesh.devices if span.mesh else (),
            span.start - first,
            span.stop - first,
            span.moves is not None,
        )
        for span in spans
    )
    calls = _calls(problem, found, order)
    return Placement(nodes, groups, calls, timeline.per_iteration, str(problem.cluster), found_by, bars)


def _memory_fraction(problem: Problem, found: ExecutionPlan, call: str) -> float:
    """The share of a device's memory that is left for generation: its weights and its KV cache."""
    group = problem.graph.call(call).group
    here, static = found[call], problem.static(found)
    stays = here == found[problem.homes[group]] and group not in problem.graph.trained  # the weights it generates with
    own = problem.costs.static(group, here) if stays else 0.0
    left = min((problem.capacity[d] - static[d] + own) / problem.cluster.device(d).memory for d in here.mesh.devices)
    return min(0.99, max(0.01, math.floor(100 * left) / 100))


def _elsewhere(problem: Problem, found: ExecutionPlan, group: str) -> tuple[CallPlacement, ...]:
    """The calls of each method that is not always in its group's layout, or generates within that."""
    home, methods = found[problem.homes[group]], defaultdict(list)
    for call in problem.graph.of_group(group):
        methods[call.method].append(call)
    away = []
    for method, calls in methods.items():
        plans = [found[call.name] for call in calls]
        generates = calls[0].kind == "generation"
        if not all(at.within(home) if generates else at.alike(home) for at in plans):
            away += [CallPlacement(method, at.mesh.devices, at.parallel.sizes) for at in plans]
    return tuple(away)


def _calls(problem: Problem, found: ExecutionPlan, order: Order) -> dict[str, CallLayout]:
    seconds, moved, static = problem.seconds(found), plan_moves(problem, found), problem.static(found)
    others, calls = alternatives(problem, found, order=order), {}
    for call in problem.calls:
        here, home = found[call.name], found[problem.homes[call.group]]
        devices = here.mesh.devices
        room = None
        if call.kind == "generation":
            room = problem.costs.room(call.name, here, max(static[d] for d in devices))
        active = problem.costs.active(call.name, here, home, room)
        fullest = max(devices, key=lambda d: (static[d] + active) / problem.capacity[d])
        runner_up, lost = others.get(call.name, ("", ""))
        calls[call.name] = CallLayout(
            call.group,
            call.kind,
            devices,
            (here.parallel.p, here.parallel.t, here.parallel.d),
            seconds[call.name],
            here != home,
            moved.get(call.name, 0.0),
            problem.limit(call, here, max(static[d] for d in devices)),
            static[fullest] + active,
            problem.capacity[fullest],
            runner_up,
            lost,
        )
    return calls


__all__ = ["SMALL", "placement_of", "plan"]
