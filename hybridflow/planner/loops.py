"""Which loop? A traced loop as the four that the library runs, each with the placement that suits it. Pure.

    colocated   the trained model generates, in turns with training     nothing is stale
    split       a group of its own generates whole batches, one ahead   one update
    streamed    a group of its own generates without a pause            up to the bound
    elastic     devices generate or train as rows finish                nothing is stale

Only the call that generates differs: its group, and how old its weights may be. Switches have their price in each:
transitions, weight syncs and recomputed caches, moves of devices. `plan_elastic` prices elastic iterations, as they are
simulated with the cost model's seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from hybridflow.errors import ConfigError, PlacementError
from hybridflow.placement import GIB, LoopPrice, Placement, ranges
from hybridflow.planner.cost.call_cost import cache_bytes, decode, prefill
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.device_memory import MAIN, weights
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients, LayerProfile
from hybridflow.planner.cost.reallocation_cost import reallocation
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Apart, Constraint, OneLayout, groups_of
from hybridflow.planner.describe.graph import Call, Graph
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, Parallel, divides, powers
from hybridflow.planner.describe.workload import Lengths, Workload
from hybridflow.planner.elastic.policies import POLICIES
from hybridflow.planner.elastic.simulation import ElasticRun, best_static, simulate_elastic
from hybridflow.planner.elastic.state import Policy, Speeds
from hybridflow.planner.stream_simulation import TAIL, DecodingSpeed, ResponseLengths
from hybridflow.settings import require

_SPLITS, _ROWS = 6, 256  # static splits that are compared; rows that a replica decodes at once
_KINDS = 3  # of state that an optimizer moves, in float32
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


@dataclass(frozen=True)
class ElasticPlan:
    """The fastest static split of the devices, and the predicted seconds of an iteration."""

    run: ElasticRun
    """With the sizes at the start."""
    generate: Parallel
    train: Parallel
    """Sizes of an instance: p, t, and d = 1."""
    static: float
    """Where devices stay there."""
    elastic: float
    """Where devices move as the policy says."""

    @property
    def pays(self) -> bool:
        return self.elastic < self.static

    def __str__(self) -> str:
        run = self.run
        return (
            f"{run.actor} actor instances of {self.train.size} devices (p={self.train.p}, t={self.train.t}) and "
            f"{run.rollout} rollouts of {self.generate.size}: {self.static:.3g} s per iteration, elastic "
            f"{self.elastic:.3g} s"
        )


def plan_elastic(
    graph: Graph,
    cluster: ClusterSpec,
    workload: Workload,
    *,
    minibatches: int = 4,
    generate: Parallel | None = None,
    train: Parallel | None = None,
    lengths: ResponseLengths | Sequence[int] | None = None,
    policy: str | Policy = "gain",
    iterations: int = 4,
    coefficients: Coefficients = DEFAULT,
    profile: LayerProfile | None = None,
) -> ElasticPlan:
    """The fastest static split of the cluster between the rollouts and the actor of a loop, and what `policy` (a name
    or a function, as for `hf.Elastic`) saves from there.

    All calls but generation run on the actor's devices, one after another for each of `minibatches`. `generate`
    (without pipeline stages) and `train` are the sizes of an instance, d = 1 (default: the fewest devices of a node
    that hold it, tensor parallel). `lengths` default to a lognormal distribution with the workload's mean and maximum;
    seconds are means of `iterations` simulated ones. Errors: PlacementError for a loop that does not generate in one
    call and train, or that needs a larger cluster; ConfigError for other settings and a policy that is refused."""
    named = POLICIES.get(policy) if isinstance(policy, str) else policy
    if not callable(named):
        raise ConfigError(f"plan_elastic(policy={policy!r}): known are {', '.join(POLICIES)}, or a function.")
    for name, value in (("minibatches", minibatches), ("iterations", iterations)):
        require(type(value) is int and value > 0, f"plan_elastic({name}={value!r}): give a whole number above 0.")
    generation = [call for call in graph.calls if call.kind == "generation"]
    trained = [call for call in graph.calls if call.kind == "training"]
    if len(generation) != 1 or not trained:
        raise PlacementError(
            f"an elastic loop generates in one call and trains; this one has {len(generation)} calls that generate "
            f"and {len(trained)} that train."
        )
    rows, n, devices = workload.rows, workload.responses_per_prompt, cluster.size
    text = f"the {rows // n} prompts of an iteration are not divided by it."
    require(rows // n % minibatches == 0, f"plan_elastic(minibatches={minibatches}): {text}")
    once = replace(graph, calls=tuple(replace(call, minibatches=1) for call in graph.calls))
    costs = Costs(cluster, once, replace(workload, rows=rows // minibatches, minibatches=1), coefficients, profile)
    others = [call for call in graph.calls if call.kind != "generation"]
    generate, train = _sizes(costs, "generate", generation, generate), _sizes(costs, "train", others, train)
    if devices < generate.size + train.size:
        both = f"an actor on {train.size} devices and a rollout on {generate.size}"
        raise PlacementError(f"{both} need more than the {devices} devices of the cluster.")
    speeds, sync = _speeds(costs, generation[0], others, generate, train)
    run = ElasticRun(
        devices=devices, rollout=1, actor=1, prompts=rows // n, n=n, minibatches=minibatches, speeds=speeds,
        lengths=_distribution(workload.response) if lengths is None else lengths, tp=generate.size, mp=train.size,
        prompt_tokens=round(workload.prompt.mean), sync_seconds=sync, iterations=iterations,
    )  # fmt: skip
    most = (devices - generate.size) // train.size
    actors = sorted({max(1, round(most * part / _SPLITS)) for part in range(1, _SPLITS + 1)})
    run, static = best_static(run, [((devices - actor * train.size) // generate.size, actor) for actor in actors])
    found = simulate_elastic(run, named)
    require(found.refused is None, f"plan_elastic(policy={policy!r}): it was refused. {found.refused}")
    return ElasticPlan(run, generate, train, static, found.mean)


def _sizes(costs: Costs, name: str, calls: Sequence[Call], given: Parallel | None) -> Parallel:
    """The given sizes, or the fewest devices of a node, tensor parallel: those on which all calls fit beside what their
    groups keep."""
    node, room, rolls = costs.cluster.node.count, costs.capacity, name == "generate"
    models = {call.group: costs.graph.models[call.group] for call in calls}
    good = given is None or (given.d == 1 and not (rolls and given.p > 1))
    require(good, f"plan_elastic({name}={given}): give the sizes of one instance, d=1{', p=1' * rolls}.")
    needed = math.inf
    for size in powers(node) if given is None else [given.size]:
        sizes = given or Parallel(t=size)
        if any(model is not None and not divides(model, sizes.t) for model in models.values()):
            continue
        plan = CallPlan(Mesh.of(0, size), sizes)
        if rolls:  # a group of its own, without gradients
            context = costs.context(calls[0].group, plan, "generation")
            kept = 0.0 if context is None else weights(context)
        else:
            kept = sum(costs.static(group, plan) for group in models)
        needed = kept + max(costs.added(call.name, plan).active for call in calls)
        if needed <= room:
            return sizes
    raise PlacementError(
        f"{', '.join(group for group, model in models.items() if model is not None)} with "
        f"{'up to ' * (given is None)}{given.size if given else node} devices per instance need "
        f"{needed / GIB:.0f} GiB on each, {room / GIB:.0f} GiB are usable. Give more devices, or recompute=True."
    )


def _speeds(
    costs: Costs, generation: Call, others: Sequence[Call], generate: Parallel, train: Parallel
) -> tuple[Speeds, float]:
    """Of one instance each, and the seconds of the weight sync."""
    replica, actor = CallPlan(Mesh.of(train.size, generate.size), generate), CallPlan(Mesh.of(0, train.size), train)
    context, work = costs.context(generation.group, replica, "generation"), costs.workload
    assert context is not None, "a function that generates"
    beside = 0.0 if generation.group in costs.graph.trained else weights(context)
    room = costs.kv_budget(generation.name, replica, beside) / (context.workload.under_way * cache_bytes(context))
    prompts = max(1.0, _ROWS / context.workload.responses_per_prompt)
    steps = ((rows, *decode(context, rows)) for rows in (1, _ROWS))  # without pipeline stages
    decoding = DecodingSpeed.fitted(
        *((rows, step.total + host) for rows, step, _, host in steps),
        prefill=prefill(context, prompts)[0].total / (prompts * context.workload.prompt.mean),
        slots=max(1, min(_ROWS, math.floor(room))),
    )
    # of a mini-batch on the actor: the seconds per token, and those that do not depend on tokens
    more, tokens = costs.on(costs.cluster, replace(work, rows=2 * work.rows)), work.rows * work.tokens
    few, many = (sum(one.cost(call.name, actor).seconds for call in others) for one in (costs, more))
    per_token = max(0.0, many - few) / tokens
    training = {"train": max(0.0, few - per_token * tokens), "train_per_token": per_token}
    speeds = Speeds(decoding, **training, resize=_resize(costs, others, actor))
    return speeds, costs.reallocation(generation.group, actor, replica)


def _resize(costs: Costs, calls: Sequence[Call], plan: CallPlan) -> float:
    """An instance more gets the state of all groups that are trained. Main parameters and both moments travel one after
    another, each with messages and tensors of its own; weights of 16 bits are made of them."""
    if 2 * plan.mesh.size > costs.cluster.size:
        return 0.0  # there is one instance at most
    there = CallPlan(Mesh.of(plan.mesh.size, plan.mesh.size), plan.parallel)
    both, seconds = Mesh.of(0, 2 * plan.mesh.size), 0.0
    for group in {call.group for call in calls if call.kind == "training"}:
        if (context := costs.context(group, plan)) is not None:
            k, cluster = costs.coefficients, costs.cluster
            each, busy = reallocation(context.size, cluster, plan, there, MAIN, k, fresh=True)
            seconds += _KINDS * each * costs.slowdown(both, busy)
    return seconds


def _distribution(response: Lengths) -> ResponseLengths:
    """Lognormal with this maximum, which one in a thousand reaches, and this mean or the least that there is."""

    def mean(ratio: float) -> float:  # of a lognormal variable of median 1 that is cut at `ratio`
        sigma, normal = math.log(ratio) / TAIL, NormalDist()
        return math.exp(sigma * sigma / 2) * normal.cdf(TAIL - sigma) + ratio * (1 - normal.cdf(TAIL))

    low, high = 1.0, response.max
    for _ in range(60):
        ratio = math.sqrt(low * high)
        low, high = (ratio, high) if response.max / ratio * mean(ratio) > response.mean else (low, ratio)
    return ResponseLengths(median=response.max / low, ratio=low)
