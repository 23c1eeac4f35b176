"""Planning: from a graph, a cluster and a workload to the best placement found. Pure.

HybridFlow's algorithm 1 (auto-mapping) finds the devices and one layout of every group. From there calls of a group get
layouts of their own where that is faster (ReaL): by trying all of them where there are few, else by random changes that
are kept the more often the faster they are (Markov chain Monte Carlo, MCMC).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, get_args

from hybridflow.errors import ConfigError, PlacementError, nearest
from hybridflow.placement import Bar, CallLayout, CallPlacement, GroupPlacement, Placement
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients
from hybridflow.planner.cost.layer_profile import LayerProfile
from hybridflow.planner.cost.simulator import Simulator
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Constraint
from hybridflow.planner.describe.graph import Call, Graph, moves
from hybridflow.planner.describe.mesh import ExecutionPlan
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.explain import alternatives, infeasibility_report, stream_shape
from hybridflow.planner.search.auto_mapping import AutoMapping, overlap_map
from hybridflow.planner.search.call_search import PATIENCE, exact, mcmc, space_size
from hybridflow.planner.search.deadline import Deadline, TimeUpError
from hybridflow.planner.search.problem import Problem
from hybridflow.planner.search.similarity import similarity_map
from hybridflow.settings import require

Search = Literal["auto", "auto_mapping", "exact", "mcmc", "similarity"]
SMALL, FEW = 1e7, 32
"""Execution plans, and devices, up to which all plans are tried, as far as time allows."""
LEAST = 1.0
"""Seconds to search where no plan is known yet, or a trace has taken all of them."""


def plan(
    graph: Graph,
    cluster: ClusterSpec | str,
    workload: Workload,
    constraints: Sequence[Constraint] = (),
    *,
    coefficients: Coefficients = DEFAULT,
    profile: LayerProfile | None = None,
    budget_s: float | Deadline = 10.0,
    seed: int = 0,
    per_call: bool = True,
    search: Search = "auto",
) -> Placement:
    """The placement with the least time per iteration that is found in `budget_s` seconds.

    All that takes time ends then, as soon as there is one placement that fits. A `Deadline` in place of seconds may
    have begun before.

    Each further layout of a group must shorten the iteration by more than the predictions' error
    (`Coefficients.error`). With `per_call=False` all calls of a group but generation have one layout. `search` asks
    for one search instead of those that suit the size: "auto_mapping", "exact" and "mcmc" (which start from that), or
    "similarity", which puts all groups on all devices.

    Errors: ConfigError; PlacementError for constraints that contradict each other, and for a cluster that is too small
    (for which model, how much memory is missing, and the smallest cluster that fits).
    """
    deadline = Deadline.of(budget_s)
    require(workload.micro_batches is None, "Workload(micro_batches): engines cut by micro_tokens. Leave it out.")
    if search not in get_args(Search):
        raise ConfigError(f"search={search!r} is unknown.{nearest(str(search), get_args(Search))}")
    spec = ClusterSpec.of(cluster)
    if profile is not None:
        spec, coefficients = profile.measured(spec), profile.coefficients(coefficients)
    problem = Problem(Simulator(spec, graph, workload, coefficients, profile), tuple(constraints), coefficients.error)
    found = _search(problem, search, deadline, seed, per_call)
    if found is None and search == "similarity":
        raise PlacementError(
            f"search='similarity' puts all groups on all {spec.size} devices, where they do not fit or constraints "
            "part them. Use search='auto'."
        )
    if found is None:
        raise infeasibility_report(problem, per_call=per_call)
    return placement_of(problem, *found)


def _search(
    problem: Problem, search: Search, deadline: Deadline, seed: int, per_call: bool
) -> tuple[ExecutionPlan, str] | None:
    """The best plan of all that the search finds, and how it was found."""
    if search == "similarity":
        mapped = similarity_map(problem, deadline)
        return None if mapped is None else (mapped, "similarity search")
    of_calls = search != "auto_mapping" and (search != "auto" or per_call)
    shared = _sharing(problem, deadline.part(1 / 8)) if search == "auto" and problem.updates else None
    mapping = AutoMapping(problem, deadline.part(7 / 8) if of_calls else deadline)
    first = mapping.first
    mapped = [] if first is None else [overlap_map(problem, mapping, first), mapping.best]
    plans = [(one.plan, "one layout for each group") for one in mapped if one is not None]
    plans += [] if shared is None else [(shared, "updates in each other's bubbles")]
    if of_calls or not plans:
        plans += _search_calls(problem, search, [plan for plan, _ in plans], deadline, seed)

    def rounded(one: tuple[ExecutionPlan, str]) -> float:  # of equals the earlier one: it moves fewer weights
        return float(f"{problem.weighted(problem.timeline(one[0]).per_iteration, one[0]):.6g}")

    return min(plans, key=rounded, default=None)


def _sharing(problem: Problem, deadline: Deadline) -> ExecutionPlan | None:
    """A plan in which updates may share pipeline stages; None where groups cannot all be on all devices."""
    with suppress(PlacementError):
        return similarity_map(problem, deadline)


def _search_calls(
    problem: Problem, search: Search, starts: Sequence[ExecutionPlan], deadline: Deadline, seed: int
) -> list[tuple[ExecutionPlan, str]]:
    """Plans in which each call may have a layout of its own, and how they were found."""
    found, few = [], problem.cluster.size <= FEW
    if not starts:  # something must be found
        deadline = deadline.at_least(LEAST)
    with suppress(TimeUpError):
        if search == "exact" or (search == "auto" and few and space_size(problem, deadline) <= SMALL):
            until = deadline if search == "exact" else deadline.part(1 / 2)
            best = exact(problem, start=starts[0] if starts else None, deadline=until)
            if best is not None:
                found.append((best.plan, "all layouts tried" if best.complete else "many layouts tried in order"))
            if best is not None and best.complete:
                return found
        if search != "exact":
            best = mcmc(problem, starts=starts, seed=seed, deadline=deadline, patience=PATIENCE)
            if best is not None:
                found.append((best.plan, "random changes of layouts, kept where they help (MCMC)"))
    return found


def placement_of(problem: Problem, found: ExecutionPlan, found_by: str) -> Placement:
    """An execution plan with everything that there is to say of it."""
    timeline = problem.timeline(found)
    nodes, groups = tuple(node.count for node in problem.cluster.nodes), {}
    for group in problem.graph.groups:
        home, train, generate, share = found[problem.homes[group]], None, None, None
        if problem.graph.models[group] is not None:
            train = problem.costs.backends[group].sized(home.parallel)
        for call in problem.graph.of_group(group):
            if call.kind == "generation" and share is None:
                generate, share = found[call.name].parallel.sizes[:2], _memory_fraction(problem, found, call)
        away = _elsewhere(problem, found, group)
        groups[group] = GroupPlacement(home.mesh.devices, nodes, train, generate, away, share)
    middle = (max(span.iteration for span in timeline.spans) + 1) // 2
    spans = [(span, span.mesh) for span in timeline.of(middle) if span.mesh is not None]
    first = min((span.start for span, _ in spans), default=0.0)
    bars = []
    for span, mesh in spans:
        group, moves = problem.graph.call(span.call).group, span.moves is not None
        bars.append(Bar(span.call, group, mesh.devices, span.start - first, span.stop - first, moves))
    calls, cluster = _calls(problem, found), str(problem.cluster)
    others = partial(alternatives, problem, found)
    shape = stream_shape(problem, found, timeline.per_iteration)
    return Placement(nodes, groups, calls, timeline.per_iteration, cluster, found_by, tuple(bars), shape, others)


def _memory_fraction(problem: Problem, found: ExecutionPlan, call: Call) -> float:
    """The share of a device's memory that is left for generation: its weights and its KV cache."""
    here, static = found[call.name], problem.static(found)
    # of a group that is not trained, the weights that stay are those it generates with
    stays = here == found[problem.homes[call.group]] and call.group not in problem.graph.trained
    own = problem.costs.static(call.group, here) if stays else 0.0
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
        if not all(at.within(home) if generates else at == home for at in plans):
            away += [CallPlacement(method, at.mesh.devices, at.parallel.sizes) for at in plans]
    return tuple(away)


def _calls(problem: Problem, found: ExecutionPlan) -> dict[str, CallLayout]:
    seconds, static = problem.seconds(found), problem.static(found)
    uses = moves(problem.graph)
    moved = {use.target: problem.reallocation(use.group, found[use.source], found[use.target]) for use in uses}
    calls = {}
    for call in problem.calls:
        here, home = found[call.name], found[problem.homes[call.group]]
        on_cpu = problem.graph.models[call.group] is None
        devices = here.mesh.devices
        beside = max(static[d] for d in devices)
        kv_budget = problem.costs.kv_budget(call.name, here, beside) if call.kind == "generation" else None
        active = problem.costs.active(call.name, here, home, kv_budget)
        fullest = max(devices, key=lambda d: (static[d] + active) / problem.capacity[d])
        calls[call.name] = CallLayout(
            group=call.group,
            kind="function" if on_cpu else call.kind,
            devices=devices,
            sizes=here.parallel.sizes,
            seconds=seconds[call.name],
            differs=here != home,
            move_seconds=moved.get(call.name, 0.0),
            limit=problem.limit(call, here, beside),
            memory=0.0 if on_cpu else static[fullest] + active,
            capacity=0.0 if on_cpu else problem.capacity[fullest],
        )
    return calls
