"""Problem: the search space: meshes of a cluster, parallel sizes of a model, and their costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, combinations
from typing import Any, NamedTuple

from hybridflow.errors import ModelError, PlacementError
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.backends import Backend
from hybridflow.planner.cost.call_cost import CallCost
from hybridflow.planner.cost.simulator import Simulator
from hybridflow.planner.cost.timeline import Contention, Timeline, simulate
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Constraint, OneLayout, Pin, Rules
from hybridflow.planner.describe.graph import Call, Graph, home
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, Parallel, generation_sizes, strategies

STEPS = 64


class Option(NamedTuple):
    """One way to run a call: seconds (generation: with all memory for it), bytes that stay if the weights stay
    here, bytes on top while it runs, those of a second copy of the weights if they are at home elsewhere, and the share
    of the seconds in which devices work."""

    plan: CallPlan
    seconds: float
    static: float
    active: float
    copy: float
    busy: float = 1.0


@dataclass(frozen=True)
class Problem:
    """The placement of the graph that `costs` prices, on its cluster.

    A plan is worth each further layout of a group only if it saves more than the share `margin` of its seconds.
    Errors: PlacementError for constraints that name unknown groups or contradict each other.
    """

    costs: Simulator
    constraints: tuple[Constraint, ...] = ()
    margin: float = 0.0
    _known: dict[tuple, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Options, seconds of generation, moves, and shapes of meshes that were asked for."""

    def __post_init__(self) -> None:
        for pin in self.rules.pins.values():
            backend, one = self.costs.backends[pin.group], pin.group in self.rules.one_layout
            check_pin(pin, self.graph.models[pin.group], backend, self.cluster, one)

    @property
    def graph(self) -> Graph:
        return self.costs.graph

    @property
    def cluster(self) -> ClusterSpec:
        return self.costs.cluster

    @cached_property
    def rules(self) -> Rules:
        return Rules(self.constraints, self.graph.groups, self.cluster.size)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Calls that run on devices."""
        groups = set(self.graph.groups)
        return tuple(call for call in self.graph.calls if call.group in groups)

    @cached_property
    def alike(self) -> tuple[tuple[str, ...], ...]:
        """Calls that have one layout, because of what runs them: an optimizer's state is in one place, a group has one
        generation engine, and what functions keep is never moved. Of a group with `OneLayout`, all that do not
        generate.
        """
        found = []
        for group in self.graph.groups:
            calls = self.graph.of_group(group)
            trains, generates = ([c.name for c in calls if c.kind == kind] for kind in ("training", "generation"))
            if self.graph.models[group] is None:
                found.append([call.name for call in calls])
            elif group in self.rules.one_layout:
                found += [[call.name for call in calls if call.kind != "generation"], generates]
            else:
                found += [trains, generates]
        return tuple(tuple(names) for names in found if len(names) > 1)

    @cached_property
    def hybrid(self) -> tuple[tuple[str, str], ...]:
        """A generation call of each group with `OneLayout`, with the call in whose layout the group's weights stay:
        it generates on the same devices, in sizes that divide those."""
        generating = (self.graph.of_group(group) for group in self.rules.one_layout)
        found = [next((call for call in calls if call.kind == "generation"), None) for calls in generating]
        return tuple((call.name, self.homes[call.group]) for call in found if call is not None)

    @cached_property
    def homes(self) -> Mapping[str, str]:
        """By group, the call in whose layout its weights stay."""
        return {group: home(self.graph, group) for group in self.graph.groups}

    @cached_property
    def updates(self) -> tuple[tuple[str, str], ...]:
        """Pairs of training calls of two groups that could run together; none without `Workload.time_sharing`."""
        training = [call for call in self.calls if call.kind == "training"] * self.costs.workload.time_sharing
        found, pairs = list(training), list[tuple[str, str]]()
        while len(found) > 1:
            first = found.pop(0)
            if first.group != found[0].group:
                pairs.append((first.name, found.pop(0).name))
        return tuple(pairs)

    @cached_property
    def capacity(self) -> tuple[float, ...]:
        """Usable bytes of each device."""
        share = self.costs.coefficients.usable_memory
        return tuple(self.cluster.device(i).memory * share for i in range(self.cluster.size))

    @cached_property
    def sharing(self) -> Contention | None:
        return Contention.of(self.cluster)

    @cached_property
    def step(self) -> float:
        """Bytes in which static memory counts for the KV-cache budget of generation."""
        return min(self.capacity) / STEPS

    @cached_property
    def homogeneous(self) -> bool:
        return not any(self._kinds)

    @cached_property
    def _kinds(self) -> list[int]:
        """Of each node, a number that equal nodes share."""
        kinds = list(dict.fromkeys(self.cluster.nodes))
        return [kinds.index(node) for node in self.cluster.nodes]

    def shape(self, mesh: Mesh) -> tuple:
        """Meshes of equal shape cost the same: how many devices of which nodes."""
        key = ("shape", mesh.bits)
        if key not in self._known:
            self._known[key] = tuple((self._kinds[node], count) for node, count in self.counts(mesh).items())
        return self._known[key]

    def counts(self, mesh: Mesh) -> dict[int, int]:
        """How many devices of each node are in a mesh."""
        return self.cluster.counts(mesh.devices)

    def strategies(self, group: str, mesh: Mesh, generates: bool = False) -> list[Parallel]:
        """All layouts of a group on a mesh, in training and inference or where it generates: tensor parallel groups do
        not lie across nodes."""
        found = strategies(self.graph.models[group], mesh.size, math.gcd(*self.counts(mesh).values()))
        if generates or self.graph.models[group] is None:
            return found
        backend = self.costs.backends[group]
        return [own for sizes in found if (own := backend.parallel(*sizes.sizes)) is not None]

    def generation_sizes(self, group: str, mesh: Mesh, train: Parallel) -> list[Parallel]:
        """Layouts in which an engine can generate in the processes that train in `train`."""
        within = CallPlan(mesh, train)
        every = self.strategies(group, mesh, generates=True) if train.shards > 1 else generation_sizes(train)
        return [sizes for sizes in every if CallPlan(mesh, sizes).within(within)]

    def option(self, call: Call, mesh: Mesh, parallel: Parallel, shape: tuple | None = None) -> Option | None:
        """None where the simulator refuses it. Cached per mesh shape; only the mesh differs."""
        key = (call.name, parallel, shape if shape is not None else self.shape(mesh))
        if key not in self._known:
            self._known[key] = self._asked(call, CallPlan(mesh, parallel))
        found = self._known[key]
        if found is None or found.plan.mesh == mesh:
            return found
        return found._replace(plan=CallPlan(mesh, parallel))

    def _asked(self, call: Call, plan: CallPlan) -> Option | None:
        elsewhere = CallPlan(Mesh((plan.mesh.devices[-1] + 1,)), Parallel())
        try:
            active = self.costs.active(call.name, plan)
            cost = self._cost(call, plan, 0.0)
            static, other = self.costs.static(call.group, plan), self.costs.active(call.name, plan, elsewhere)
            return Option(plan, cost.seconds, static, active, other - active, cost.busy)
        except (PlacementError, ModelError):
            return None

    def _cost(self, call: Call, plan: CallPlan, beside: float) -> CallCost:
        kv_budget = self.costs.kv_budget(call.name, plan, beside) if call.kind == "generation" else None
        return self.costs.cost(call.name, plan, kv_budget)

    def generation(self, call: Call, plan: CallPlan, beside: float) -> CallCost:
        """The cost of a generation call where static bytes of all groups take `beside` of a device, rounded up to a
        64th of the smallest memory."""
        steps = math.ceil(beside / self.step - 1e-9)
        key = (call.name, plan.parallel, self.shape(plan.mesh), steps)
        if key not in self._known:
            self._known[key] = self._cost(call, plan, steps * self.step)
        return self._known[key]

    def limit(self, call: Call, plan: CallPlan, beside: float) -> str:
        """The largest part of a call's time; `beside` as for `generation`."""
        return self._cost(call, plan, beside).limit

    def reallocation(self, group: str, source: CallPlan, target: CallPlan) -> float:
        """Seconds, remembered: pairs that differ by whole nodes cost the same."""
        if source == target:
            return 0.0
        low = min(source.mesh.devices[0], target.mesh.devices[0])
        shift = low - low % self.cluster.nodes[0].count if self.homogeneous else 0
        key = (group, source.parallel, target.parallel, source.mesh.bits >> shift, target.mesh.bits >> shift)
        if key not in self._known:
            self._known[key] = self.costs.reallocation(group, source, target)
        return self._known[key]

    def static(self, plan: ExecutionPlan) -> list[float]:
        """Bytes that stay on each device between calls."""
        found = [0.0] * self.cluster.size
        for group, name in self.homes.items():
            more = self.costs.static(group, plan[name])
            for device in plan[name].mesh.devices:
                found[device] += more
        return found

    def seconds(self, plan: ExecutionPlan) -> dict[str, float]:
        """Seconds of each call, of generation with its KV-cache budget."""
        static, found = self.static(plan), {}
        for call in self.calls:
            here = plan[call.name]
            if call.kind == "generation":
                found[call.name] = self.generation(call, here, max(static[d] for d in here.mesh.devices)).seconds
            elif (option := self.option(call, here.mesh, here.parallel)) is not None:
                found[call.name] = option.seconds
        for first, second in self.updates:
            if plan[first] == plan[second]:
                found[second] = self.together(first, second, plan[first]) - found[first]
        return found

    def further(self, plan: ExecutionPlan) -> int:
        """Layouts that groups have beside that of their weights, and of generation within it."""
        own = {(call.group, at) for call in self.calls if not self.at_home(call, at := plan[call.name], plan)}
        return len(own)

    def at_home(self, call: Call, at: CallPlan, plan: ExecutionPlan) -> bool:
        """The call runs where the weights of its group stay."""
        home = plan[self.homes[call.group]]
        return at == home or (call.kind == "generation" and at.within(home))

    def weighted(self, seconds: float, plan: ExecutionPlan) -> float:
        """Seconds of an iteration that make plans comparable: with the margin for each further layout."""
        return seconds * (1 + self.margin) ** self.further(plan) if self.margin else seconds

    def together(self, first: str, second: str, plan: CallPlan) -> float:
        """Seconds of two updates in one layout."""
        key = ("together", first, second, plan.parallel, self.shape(plan.mesh))
        if key not in self._known:
            self._known[key] = self.costs.cost_together(first, second, plan)
        return self._known[key]

    def timeline(self, plan: ExecutionPlan) -> Timeline:
        """The timeline of `plan` with this problem's costs."""
        busy = {call.name: self._cost(call, plan[call.name], 0.0).busy for call in self.calls} if self.sharing else None
        static, streamed = self.static(plan), [(call, plan[call.name]) for call in self.calls if call.continuous]
        beside = [max(static[device] for device in at.mesh.devices) for _, at in streamed]
        latency = {c.name: self.generation(c, at, b).latency for (c, at), b in zip(streamed, beside, strict=True)}
        seconds, how = self.seconds(plan), {"reallocation": self.reallocation, "sharing": self.sharing, "busy": busy}
        return simulate(self.graph, plan, seconds, latency=latency, **how)


def check_pin(pin: Pin, model: ModelSpec | None, backend: Backend, cluster: ClusterSpec, one_layout: bool) -> None:
    """`one_layout`: generation has sizes within those of training.

    Errors: PlacementError for sizes by which the model is not cut, that its strategy has not, or whose tensor parallel
    groups would lie across nodes.
    """
    for sizes in (pin.parallel, pin.generate):
        if sizes is None:
            continue
        if model is None and sizes.p * sizes.t > 1:
            raise PlacementError(f"{pin} cannot be: {pin.group} runs functions, which are not cut. Pin p=1, t=1.")
        try:
            if model is not None:
                model.check_parallel(sizes.p, sizes.t, pin.group)
        except ModelError as error:
            raise PlacementError(f"{pin} cannot be: {error}") from None
        _check_nodes(pin, sizes, cluster)
    if model is None or pin.parallel is None:
        return
    if (own := backend.parallel(*pin.parallel.sizes)) is None:
        raise PlacementError(f"{pin} cannot be: {pin.group} trains with {backend.strategy}, which has no such sizes.")
    mesh = Mesh.of(0, own.size)
    if one_layout and pin.generate and not CallPlan(mesh, pin.generate).within(CallPlan(mesh, own)):
        raise PlacementError(
            f"{pin} and {OneLayout(pin.group)} contradict each other: generation sizes divide those of training where "
            "both have one layout."
        )


def _check_nodes(pin: Pin, sizes: Parallel, cluster: ClusterSpec) -> None:
    counts = [node.count for node in cluster.nodes]
    listed, inside = " or ".join(map(str, sorted(set(counts)))), counts
    if pin.devices is not None:
        inside = list(cluster.counts(pin.devices).values())
    elif sizes.size <= max(counts):
        inside = [sizes.size]
    elif not any(b - a == sizes.size for a, b in combinations(accumulate([0, *counts]), 2)):
        raise PlacementError(
            f"{pin} cannot be: {sizes.size} devices are neither devices of one node nor whole nodes, which have "
            f"{listed}. Use other sizes, or pin devices."
        )
    if any(count % sizes.t for count in inside):
        raise PlacementError(
            f"{pin} cannot be: tensor parallel groups of t={sizes.t} would lie across nodes, which have {listed} "
            "devices. Use a smaller t, or other devices."
        )
