"""Planning: from a graph, a cluster and a workload to the best placement found, or to what does not fit. Pure.

HybridFlow's algorithm 1 (auto-mapping) finds the devices and one layout of every group. From there calls of a group get
layouts of their own where that is faster (ReaL): by trying all of them where there are few, else by random changes that
are kept the more often the faster they are (Markov chain Monte Carlo, MCMC)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Literal, get_args

import numpy as np

from hybridflow.errors import ConfigError, PlacementError, nearest
from hybridflow.placement import GIB, Bar, CallLayout, CallPlacement, GroupPlacement, Placement
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients, LayerProfile
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Constraint, OneLayout, Together
from hybridflow.planner.describe.graph import Call, Graph, moves
from hybridflow.planner.describe.mesh import ExecutionPlan, Mesh
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.loops import needed_staleness, price_loops
from hybridflow.planner.search.all_devices import compared_with, heuristic_map, similarity_map
from hybridflow.planner.search.auto_mapping import AutoMapping, overlap_map
from hybridflow.planner.search.call_search import PATIENCE, exact, mcmc, space_size
from hybridflow.planner.search.deadline import NEVER, Deadline, TimeUpError
from hybridflow.planner.search.stages import STATIC, Front, undominated
from hybridflow.settings import require

Explained = tuple[ExecutionPlan, str]
"""A plan, and how it was found."""
Search = Literal["auto", "mcmc", "heuristic"]
SMALL, FEW = 1e7, 32
"""Execution plans, and devices, up to which all plans are tried, as far as time allows."""
LEAST = 1.0
"""Seconds to search where no plan is known yet, or a trace has taken all of them."""

LOOP_SECONDS = 2.5
"""Of the search for another loop's placement, at most: a quarter of the time for this one's."""
MOST_DEVICES = 1 << 15
MOST_SAMPLED = 32
SAMPLES, SECONDS = 1500, 5.0  # plans with a layout per call, on this number of devices at most
MOST_SEARCHED = 128
"""Devices on which all ways to place groups are tried; on more, all groups on all devices."""


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
    share_rows: bool = True,
    staleness: int | None = None,
) -> Placement:
    """The placement with the least time per iteration that is found in `budget_s` seconds.

    All that takes time ends then, as soon as there is one placement that fits. A `Deadline` in place of seconds may
    have begun before.

    Each further layout of a group must shorten the iteration by more than the predictions' error
    (`Coefficients.error`). With `per_call=False` all calls of a group but generation have one layout. `search="auto"`
    takes the searches that suit the size; with "mcmc" random changes follow auto-mapping whatever the size;
    "heuristic" is an expert's plan (see `search.all_devices`), all groups on all devices. Idle models of
    `Graph.offload` wait in host memory where that pays. Where nothing fits otherwise, ranks share rows (cp), unless
    `share_rows=False`.

    `Placement.loops` prices the workload as other loops, too, with `staleness` as the bound of those that generate
    ahead (default: that of the loop, at least 1).

    Errors: ConfigError; PlacementError for constraints that contradict each other, and for a cluster that is too small
    (for which model, how much memory is missing, and the smallest cluster that fits)."""
    deadline = Deadline.of(budget_s)
    loop_s = min(LOOP_SECONDS, max(LEAST, deadline.at - deadline.clock()) / 4)
    require(workload.micro_batches is None, "Workload(micro_batches): engines cut by micro_tokens. Leave it out.")
    good = staleness is None or (type(staleness) is int and staleness >= 0)
    require(good, f"staleness={staleness!r}: give a whole number of weight updates.")
    if search not in get_args(Search):
        raise ConfigError(f"search={search!r} is unknown.{nearest(str(search), get_args(Search))}")
    mixed = search == "mcmc" and not per_call
    require(not mixed, 'search="mcmc" changes layouts of calls: leave it out with per_call=False (--one-layout).')
    spec = ClusterSpec.of(cluster)
    if profile is not None:
        spec, coefficients = profile.measured(spec), profile.coefficients(coefficients)
    costs = Costs(spec, graph, workload, coefficients, profile, constraints, coefficients.error)
    run = partial(_search, search=search, seed=seed, per_call=per_call)
    found = _searched(costs, run, deadline) or (share_rows and _searched(costs.sharing_rows(), run, deadline))
    if not found and search == "heuristic":
        raise PlacementError(
            f"search={search!r} puts all groups on all {spec.size} devices, where they do not fit or constraints "
            "part them. Use search='auto'."
        )
    if not found:
        raise infeasibility_report(costs, per_call=per_call)
    costs, one = found
    how: dict[str, Any] = {"seed": seed, "per_call": per_call, "share_rows": share_rows, "budget_s": loop_s}
    again = partial(plan, cluster=spec, workload=workload, coefficients=coefficients, profile=profile, **how)
    placed = placement_of(costs, *one)
    return replace(placed, loops=partial(price_loops, costs, again, placed, staleness))


def _rounded(costs: Costs, one: Explained) -> float:
    return float(f"{costs.weighted(costs.timeline(one[0]).per_iteration, one[0]):.6g}")


def _searched(
    costs: Costs, search: Callable[..., Explained | None], deadline: Deadline
) -> tuple[Costs, Explained] | None:
    """The best of all sets of models that may be worth keeping in host memory."""
    left, found = offloaded(costs, deadline.part(1 / 4)), list[tuple[Costs, Explained]]()
    while left:
        until, own = deadline.part(1 / len(left)), left.pop(0)
        if (one := search(own, deadline=until)) is not None:
            found.append((own, one))
    return min(found, key=lambda each: _rounded(*each), default=None)


def offloaded(costs: Costs, deadline: Deadline = NEVER) -> list[Costs]:
    """What is worth a search: the costs as they are, and with those idle models in host memory between their calls that
    give the fastest placement, where that is another one; these alone where nothing fits otherwise.

    Models that are away leave memory to others: to weights in fewer parts, and to the KV cache of generation. Each of
    their calls pays for the way from and to host memory. All sets of them are tried by stage-wise cost; a further one
    must shorten the iteration by more than the predictions' error, as a further layout must."""
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


def _search(costs: Costs, *, search: Search, deadline: Deadline, seed: int, per_call: bool) -> Explained | None:
    """The best plan of all that the search finds, and how it was found."""
    if search == "heuristic":
        found = heuristic_map(costs)
        return None if found is None else (found, "heuristic: tp inside a node, stages across nodes")
    shared = similarity_map(costs, deadline.part(1 / 8)) if costs.updates else None
    mapping = AutoMapping(costs, deadline.part(7 / 8) if per_call else deadline)
    first = mapping.first
    mapped = [] if first is None else [overlap_map(costs, mapping, first), mapping.best]
    plans = [(one.plan, "one layout for each group") for one in mapped if one is not None]
    plans += [] if shared is None else [(shared, "updates in each other's bubbles")]
    if per_call or not plans:  # each call may have a layout of its own
        starts = [plan for plan, _ in plans]
        deadline = deadline if starts else deadline.at_least(LEAST)  # something must be found
        with suppress(TimeUpError):
            best, few = None, search == "auto" and costs.cluster.size <= FEW
            if few and space_size(costs, deadline) <= SMALL:
                best = exact(costs, start=starts[0] if starts else None, deadline=deadline.part(1 / 2))
                if best is not None:
                    plans.append((best.plan, "all layouts tried" if best.complete else "many layouts tried in order"))
            if best is None or not best.complete:
                best = mcmc(costs, starts=starts, seed=seed, deadline=deadline, patience=PATIENCE)
                if best is not None:
                    plans.append((best.plan, "random changes of layouts, kept where they help (MCMC)"))

    return min(plans, key=partial(_rounded, costs), default=None)  # of equals the earlier one: it moves fewer weights


def placement_of(costs: Costs, found: ExecutionPlan, found_by: str) -> Placement:
    """An execution plan with everything that there is to say of it."""
    timeline, kept = costs.timeline(found), costs.kept(found)
    nodes, groups = tuple(node.count for node in costs.cluster.nodes), {}
    for group in costs.graph.groups:
        home, train, generate, share = found[costs.homes[group]], None, None, None
        if costs.graph.models[group] is not None:
            train = costs.backends[group].sized(home.parallel)
        methods = defaultdict[str, list[Call]](list)
        for call in costs.graph.of_group(group):
            methods[call.method].append(call)
            if call.kind == "generation" and share is None:
                here = found[call.name]
                # of a group that is not trained, the weights that stay are those it generates with
                stays = here == home and group not in costs.graph.trained
                own, most = costs.static(group, here) if stays else 0.0, max(kept[d] for d in here.mesh.devices)
                left = (costs.capacity - most + own) / costs.cluster.node.device.memory
                generate, share = here.parallel.sizes[:2], min(0.99, max(0.01, math.floor(100 * left) / 100))
        away = list[CallPlacement]()  # methods that are not always in the group's layout, or generate within that
        for method, calls in methods.items():
            plans, generates = [found[call.name] for call in calls], calls[0].kind == "generation"
            if not all(at.within(home) if generates else at == home for at in plans):
                away += [CallPlacement(method, at.mesh.devices, at.parallel.written) for at in plans]
        waits = group in costs.away if group in costs.graph.offload else None
        groups[group] = GroupPlacement(home.mesh.devices, nodes, train, generate, tuple(away), share, waits)
    middle = (max(span.iteration for span in timeline.spans) + 1) // 2
    spans = [(span, span.mesh) for span in timeline.of(middle) if span.mesh is not None]
    first = min((span.start for span, _ in spans), default=0.0)
    bars = []
    for span, mesh in spans:
        group, moves = costs.graph.call(span.call).group, span.moves is not None
        bars.append(Bar(span.call, group, mesh.devices, span.start - first, span.stop - first, moves))
    shape, needed = offload_lines(costs, found), needed_staleness(costs, found)
    if needed is not None and needed < max(call.ahead for call in costs.calls):
        shape.insert(0, f"max_staleness={needed} is enough")
    calls, cluster = _calls(costs, found, kept), str(costs.cluster)
    head = nodes, groups, calls, timeline.per_iteration, cluster, found_by
    compared = compared_with(costs.offloading(()))
    return Placement(*head, tuple(bars), "\n".join(shape), *compared, needed)


def _calls(costs: Costs, found: ExecutionPlan, kept: Sequence[float]) -> dict[str, CallLayout]:
    seconds, calls = costs.seconds(found), {}
    moved = {use.target: costs.moved(use.group, found[use.source], found[use.target]) for use in moves(costs.graph)}
    for call in costs.calls:
        here, home = found[call.name], found[costs.homes[call.group]]
        on_cpu, devices = costs.graph.models[call.group] is None, here.mesh.devices
        beside = max(kept[d] for d in devices)
        kv_budget = costs.kv_budget(call.name, here, beside) if call.kind == "generation" else None
        active = costs.added(call.name, here, home, kv_budget).active
        fullest = max(devices, key=kept.__getitem__)
        held = account(costs, found, call.name, fullest, kv_budget)
        calls[call.name] = CallLayout(
            group=call.group,
            kind="function" if on_cpu else call.kind,
            devices=devices,
            sizes=here.parallel.written,
            seconds=seconds[call.name],
            differs=here != home,
            move_seconds=moved.get(call.name, 0.0),
            limit=costs.beside(call, here, beside).limit,
            memory=0.0 if on_cpu else kept[fullest] + active,
            held="" if on_cpu else ", ".join(f"{owner} {size / GIB:.2f}" for owner, size in held.items()),
            capacity=0.0 if on_cpu else costs.capacity,
        )
    return calls


def account(
    costs: Costs, found: ExecutionPlan, call: str, device: int, kv_budget: float | None = None
) -> dict[str, float]:
    """Bytes by owner on a device while a call runs, as the events of a run have them (`Event.held`)."""
    held = dict[str, float]()
    for group, name in costs.homes.items():
        if device in found[name].mesh.devices:
            held |= costs.still(group, found[name]).owned(group)
    own = costs.graph.call(call).group
    return held | costs.added(call, found[call], found[costs.homes[own]], kv_budget).owned(own)


def offload_lines(costs: Costs, plan: ExecutionPlan) -> list[str]:
    """What each group that is away costs, and what it leaves to others."""
    lines = []
    for group in sorted(costs.away & {*costs.graph.groups}):
        home = plan[costs.homes[group]]
        seconds = sum(costs.trip(call, home) for call in costs.graph.of_group(group))
        room = costs.resting(group, home).static
        lines.append(f"{group} offloaded: +{seconds:.3g} s per iteration, {room / GIB:.3g} GiB per device")
    return lines


def infeasibility_report(costs: Costs, *, per_call: bool = False) -> PlacementError:
    """The error for a problem that has no placement; `per_call`: calls of a group may have layouts of their own."""
    costs, free, given = _emptied(costs), _emptied(costs.keeping()), _limiting(costs)
    where = f"{costs.cluster.size} device{'s' if costs.cluster.size > 1 else ''} of {costs.cluster}"
    if given and fits(free, per_call):
        named = [one for one in given if not fits(_emptied(costs.keeping(one)), per_call)]
        if not named:
            without = (_emptied(costs.keeping(*(c for c in costs.constraints if c is not one))) for one in given)
            named = [one for one, rest in zip(given, without, strict=True) if fits(rest, per_call)] or given
        return PlacementError(
            f"no placement on {where} keeps {' and '.join(map(str, named))}: all groups fit there "
            f"without {'it' if len(named) == 1 else 'them'}. Loosen a constraint, or use more devices."
        )
    limits = " and ".join(map(str, given))
    more = f"No number of nodes is enough{limits and f' while {limits} must hold'}."
    if smallest := smallest_cluster(costs, per_call):
        more = f"The smallest cluster of such nodes that fits is {smallest}."
    text = f"the cluster is too small: {_missing(free, where)}. {more}"
    return PlacementError(f"{text} Or use smaller models, batches or lengths.")


def _emptied(costs: Costs) -> Costs:
    """With all models in host memory between their calls that may wait there."""
    return costs.offloading(costs.may_wait)


def _missing(costs: Costs, where: str) -> str:
    needs = dict[str, tuple[float, int]]()
    for group in costs.graph.groups:
        if (need := _least(costs, group)) is None:
            return f"{group} cannot be cut for {where} in any way"
        needs[group] = need
    largest = max(needs, key=lambda group: needs[group][0])
    (most, devices), model = needs[largest], costs.graph.models[largest]
    billions = f" ({model.num_parameters / 1e9:.1f} billion parameters)" if model else ""
    who = f"{largest}{billions} needs"
    if most <= costs.capacity:
        most, devices = _least_together(costs), costs.cluster.size
        who = f"all models together, of which {largest}{billions} is the largest, need"
    if most <= costs.capacity or most == math.inf:  # each model fits alone, and all of them never at once
        return f"{who} more than {where} have, in whatever way they share them"
    some = where if devices == costs.cluster.size else f"{devices} of the {where}"
    return (
        f"{who} at least {most / GIB:.1f} GiB on each of {some}, {costs.capacity / GIB:.1f} GiB are usable: "
        f"{(most - costs.capacity) / GIB:.1f} GiB a device are missing"
    )


def _limiting(costs: Costs) -> list[Constraint]:
    """Constraints that all groups on all devices, each in one layout, may not keep."""
    return [one for one in costs.constraints if not isinstance(one, OneLayout | Together)]


def fits(costs: Costs, per_call: bool = False) -> bool:
    """Some placement keeps the constraints and fits into memory, as far as searches see."""
    size = costs.cluster.size
    if not _limiting(costs) and _least_together(costs) <= costs.capacity:
        return True
    if size <= MOST_SEARCHED and AutoMapping(costs).first is not None:
        return True
    sampled = per_call and size <= MOST_SAMPLED
    return sampled and mcmc(costs, deadline=Deadline.of(SECONDS), evaluations=SAMPLES) is not None


def smallest_cluster(costs: Costs, per_call: bool = False) -> ClusterSpec | None:
    """The cluster with the fewest further nodes on which everything fits."""
    low, high = len(costs.cluster.nodes), 2 * len(costs.cluster.nodes)
    most = max(MOST_SEARCHED if _limiting(costs) else MOST_DEVICES, 2 * costs.cluster.size)
    while not fits(grown(costs, high), per_call):
        low, high = high, 2 * high
        if grown(costs, high).cluster.size > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(grown(costs, middle), per_call) else (middle, high)
    return grown(costs, high).cluster


def grown(costs: Costs, nodes: int) -> Costs:
    """The problem on `nodes` nodes."""
    return costs.on(replace(costs.cluster, nodes=(costs.cluster.node,) * nodes))


def _least(costs: Costs, group: str) -> tuple[float, int] | None:
    """The least bytes that a group alone needs on each of a number of devices, and that number; None if its model does
    not divide."""
    search, found = AutoMapping(costs), list[tuple[float, int]]()
    for size in search.sizes:
        if (mesh := search.place((search.kinds[group],), size)) is not None:
            asked = Front.of(costs, group, mesh, math.inf).values[:, STATIC:].sum(axis=1)
            found += [(float(asked.min()), size)] if len(asked) else []
    return min(found, key=lambda need: need[0], default=None)


def _least_together(costs: Costs) -> float:
    """What all groups on all devices need at least."""
    mesh, both = Mesh.of(0, costs.cluster.size), np.zeros((1, 2))  # static and active bytes
    for group in costs.graph.groups:
        asked = Front.of(costs, group, mesh, math.inf).values[:, STATIC:]
        static = (both[:, None, 0] + asked[None, :, 0]).reshape(-1)
        active = np.maximum(both[:, None, 1], asked[None, :, 1]).reshape(-1)
        both = np.stack([static, active], axis=1)
        both = both[undominated(both)]
    return float(both.sum(axis=1).min(initial=math.inf))
