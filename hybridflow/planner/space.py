"""The space that searches walk through: meshes of a cluster, parallel sizes of a model, what each costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from hybridflow.errors import ModelError, PlacementError
from hybridflow.model_spec import ModelSpec
from hybridflow.planner.backends import Backend
from hybridflow.planner.cluster_spec import ClusterSpec, NodeSpec
from hybridflow.planner.constraints import Constraint, Rules
from hybridflow.planner.graph import Call, Graph
from hybridflow.planner.pinning import check_pin
from hybridflow.planner.plans import CallPlan, ExecutionPlan, Mesh, Parallel
from hybridflow.planner.sharing import Sharing
from hybridflow.planner.timeline import Timeline, home, moves, simulate

MANY_NODES = 16
STEPS = 64


class Cost(Protocol):
    """Seconds of a call of one iteration, what most of them are spent on, as a phrase, and the share of them in which
    a device works."""

    @property
    def seconds(self) -> float: ...
    @property
    def busy(self) -> float: ...
    @property
    def limit(self) -> str: ...


class Costs(Protocol):
    """What searches ask of a simulator. Memory is in bytes per device. Errors: PlacementError for what cannot run."""

    @property
    def usable_memory(self) -> float:
        """Share of a device's memory that may be used."""
        ...

    def cost(self, call: str, plan: CallPlan, room: float | None = None) -> Cost:
        """`room` is what each device has for the KV cache of a generation call."""
        ...

    def static(self, group: str, plan: CallPlan) -> float:
        """What stays between calls of a group whose weights lie as `plan` says."""
        ...

    def active(self, call: str, plan: CallPlan, home: CallPlan | None = None, room: float | None = None) -> float:
        """What a call needs on top while it runs, or with `room` for a KV cache, uses; where `home`, the layout of the
        static bytes, is given and another, with weights of its own."""
        ...

    def room(self, call: str, plan: CallPlan, beside: float) -> float:
        """What a generation call finds for its KV cache beside so many static bytes of all groups; more bytes never
        leave more room, and less room never makes it faster."""
        ...

    def reallocation(self, group: str, source: CallPlan, target: CallPlan) -> float:
        """Seconds in which weights get from one layout into another."""
        ...


class Option(NamedTuple):
    """One way to run a call: seconds (generation: with all memory for it), bytes that stay if the weights are at home
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
    """What is to be placed where, with what it costs.

    Errors: PlacementError for constraints that name unknown groups or contradict each other.
    """

    graph: Graph
    cluster: ClusterSpec
    costs: Costs
    constraints: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        for pin in self.rules.pins.values():
            backend, one = self.backends[pin.group], pin.group in self.rules.one_layout
            check_pin(pin, self.graph.models[pin.group], backend, self.cluster, one)

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
    def capacity(self) -> tuple[float, ...]:
        """Usable bytes of each device."""
        share = self.costs.usable_memory
        return tuple(self.cluster.device(i).memory * share for i in range(self.cluster.size))

    @cached_property
    def sharing(self) -> Sharing | None:
        return Sharing.of(self.cluster)

    @cached_property
    def step(self) -> float:
        """Bytes in which static memory counts for the room that generation finds."""
        return min(self.capacity) / STEPS

    @cached_property
    def homogeneous(self) -> bool:
        return len(set(self.cluster.nodes)) == 1

    @cached_property
    def _options(self) -> dict[tuple, Option | None]:
        return {}

    @cached_property
    def _moves(self) -> dict[tuple, float]:
        return {}

    def shape(self, mesh: Mesh) -> tuple:
        """Meshes of equal shape cost the same: how many devices of which nodes."""
        if mesh.bits not in self._shapes:
            counts = self.counts(mesh)
            kinds = ((self._kinds[self.cluster.nodes[node]], count) for node, count in counts.items())
            self._shapes[mesh.bits] = tuple(counts.values()) if self.homogeneous else tuple(kinds)
        return self._shapes[mesh.bits]

    @cached_property
    def _kinds(self) -> dict[NodeSpec, int]:
        """A number for each kind of node: numbers are quicker to compare."""
        return {node: number for number, node in enumerate(dict.fromkeys(self.cluster.nodes))}

    @cached_property
    def _shapes(self) -> dict[int, tuple]:
        return {}

    def counts(self, mesh: Mesh) -> dict[int, int]:
        """How many devices of each node are in a mesh."""
        return self.cluster.counts(mesh.devices)

    def strategies(self, group: str, mesh: Mesh, generates: bool = False) -> list[Parallel]:
        """All layouts of a group on a mesh, in training and inference or where it generates: tensor parallel groups do
        not lie across nodes."""
        found = strategies(self.graph.models[group], mesh.size, math.gcd(*self.counts(mesh).values()))
        if generates or self.graph.models[group] is None:
            return found
        backend = self.backends[group]
        return [own for sizes in found if (own := backend.parallel(*sizes.sizes)) is not None]

    def generation_sizes(self, group: str, mesh: Mesh, train: Parallel) -> list[Parallel]:
        """Layouts in which an engine can generate in the processes that train in `train`."""
        within = CallPlan(mesh, train)
        every = self.strategies(group, mesh, generates=True) if train.shards > 1 else generation_sizes(train)
        return [sizes for sizes in every if CallPlan(mesh, sizes).within(within)]

    @cached_property
    def backends(self) -> Mapping[str, Backend]:
        """By group, what its strategy means."""
        return {group: Backend.of(self.graph.strategies.get(group)) for group in self.graph.groups}

    def option(self, call: Call, mesh: Mesh, parallel: Parallel, shape: tuple | None = None) -> Option | None:
        """None where the simulator refuses it. The answer is the same object for equal shapes but for the mesh."""
        key = (call.name, parallel, shape if shape is not None else self.shape(mesh))
        if key not in self._options:
            self._options[key] = self._asked(call, CallPlan(mesh, parallel))
        found = self._options[key]
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

    def _cost(self, call: Call, plan: CallPlan, beside: float) -> Cost:
        room = self.costs.room(call.name, plan, beside) if call.kind == "generation" else None
        return self.costs.cost(call.name, plan, room)

    def generation(self, call: Call, plan: CallPlan, beside: float) -> float:
        """Seconds of a generation call where static bytes of all groups take `beside` of a device, rounded up to a
        64th of the smallest memory."""
        steps = math.ceil(beside / self.step - 1e-9)
        key = (call.name, plan.parallel, self.shape(plan.mesh), steps)
        if key not in self._generation:
            self._generation[key] = self._cost(call, plan, steps * self.step).seconds
        return self._generation[key]

    def limit(self, call: Call, plan: CallPlan, beside: float) -> str:
        """What most of a call's time is spent on; `beside` as for `generation`."""
        return self._cost(call, plan, beside).limit

    @cached_property
    def _generation(self) -> dict[tuple, float]:
        return {}

    def reallocation(self, group: str, source: CallPlan, target: CallPlan) -> float:
        """Seconds, remembered: pairs that differ by whole nodes cost the same."""
        if source == target:
            return 0.0
        key = (group, source.parallel, target.parallel, *self._relative(source.mesh, target.mesh))
        if key not in self._moves:
            self._moves[key] = self.costs.reallocation(group, source, target)
        return self._moves[key]

    @cached_property
    def _shifts(self) -> dict[tuple[int, int], tuple]:
        return {}

    def _relative(self, first: Mesh, second: Mesh) -> tuple:
        key = (first.bits, second.bits)
        if key not in self._shifts:
            low = min(first.devices[0], second.devices[0])
            shift = low - low % self.cluster.nodes[0].count if self.homogeneous else 0
            self._shifts[key] = (key[0] >> shift, key[1] >> shift)
        return self._shifts[key]

    def static(self, plan: ExecutionPlan) -> list[float]:
        """Bytes that stay on each device between calls."""
        found = [0.0] * self.cluster.size
        for group, name in self.homes.items():
            more = self.costs.static(group, plan[name])
            for device in plan[name].mesh.devices:
                found[device] += more
        return found

    def memory(self, plan: ExecutionPlan) -> list[float]:
        """Bytes in use on each device at its fullest moment, with the least KV cache that generation can do with."""
        active = [0.0] * self.cluster.size
        for call in self.calls:
            here = plan[call.name]
            more = self.costs.active(call.name, here, plan[self.homes[call.group]])
            for device in here.mesh.devices:
                active[device] = max(active[device], more)
        return [a + b for a, b in zip(self.static(plan), active, strict=True)]

    def fits(self, plan: ExecutionPlan) -> bool:
        return all(used <= limit for used, limit in zip(self.memory(plan), self.capacity, strict=True))

    def seconds(self, plan: ExecutionPlan) -> dict[str, float]:
        """Seconds of each call, of generation with the KV cache that it finds room for."""
        static, found = self.static(plan), {}
        for call in self.calls:
            here = plan[call.name]
            if call.kind == "generation":
                found[call.name] = self.generation(call, here, max(static[d] for d in here.mesh.devices))
            else:
                found[call.name] = self._cost(call, here, 0.0).seconds
        return found

    def timeline(self, plan: ExecutionPlan, **how) -> Timeline:
        """The timeline of `plan` with this problem's costs. Keywords as for `simulate`."""
        busy = {call.name: self._cost(call, plan[call.name], 0.0).busy for call in self.calls} if self.sharing else None
        how = {"reallocation": self.reallocation, "sharing": self.sharing, "busy": busy, **how}
        return simulate(self.graph, plan, self.seconds(plan), **how)

    def obeys(self, plan: ExecutionPlan) -> bool:
        """The plan keeps all constraints."""
        for call in self.calls:
            here = plan[call.name]
            if not self.rules.allows(call.group, here.mesh, here.parallel, call.kind == "generation"):
                return False
        meshes = {group: [plan[c.name].mesh for c in self.graph.of_group(group)] for group in self.graph.groups}
        for pair in self.rules.apart:
            if any(a.overlaps(b) for a in meshes[pair.first] for b in meshes[pair.second]):
                return False
        if any(len({plan[name] for name in names}) > 1 for names in self.alike):
            return False
        if not all(plan[name].within(plan[home]) for name, home in self.hybrid):
            return False
        return all(len({*meshes[pair.first], *meshes[pair.second]}) == 1 for pair in self.rules.together)


def meshes(cluster: ClusterSpec) -> list[Mesh]:
    """Meshes that calls may run on (ReaL, section 4): whole neighbouring nodes, or a slice of one node whose size is a
    power of two and which starts at a multiple of it.

    Beyond 16 nodes runs of nodes are as slices are: powers of two, aligned; and the whole cluster.
    """
    found: dict[tuple[int, ...], None] = {}
    for node in range(len(cluster.nodes)):
        devices = cluster.devices_of(node)
        for size in _powers(len(devices)):
            for start in range(0, len(devices) - size + 1, size):
                found[tuple(devices[start : start + size])] = None
    count = len(cluster.nodes)
    lengths = range(1, count + 1) if count <= MANY_NODES else [*_powers(count), count]
    for length in lengths:
        for start in range(0, count - length + 1, 1 if count <= MANY_NODES else length):
            first, last = cluster.devices_of(start), cluster.devices_of(start + length - 1)
            found[tuple(range(first[0], last[-1] + 1))] = None
    return [Mesh(devices) for devices in found]


def strategies(model: ModelSpec | None, size: int, node: int) -> list[Parallel]:
    """All p, t, d on `size` devices that the model can be cut by; tensor parallel groups lie within `node` neighbours.

    A group without a model (functions) is data parallel.
    """
    if model is None:
        return [Parallel(d=size)]
    found = []
    for t in _divisors(size):
        if node % t or not model.divides(t):
            continue
        for p in _divisors(size // t):
            if p <= model.layers:
                found.append(Parallel(p, t, size // t // p))
    return found


def generation_sizes(train: Parallel) -> list[Parallel]:
    """Generation layouts within a training layout (paper, section 5): p_g divides p and t_g divides t."""
    return [Parallel(p, t, train.size // (p * t)) for p in _divisors(train.p) for t in _divisors(train.t)]


def plan_moves(problem: Problem, plan: ExecutionPlan) -> dict[str, float]:
    """By call, the seconds in which weights get into its layout; calls without such a move are left out."""
    found = {}
    for move in moves(problem.graph):
        if plan[move.source] != plan[move.target]:
            found[move.target] = problem.reallocation(move.group, plan[move.source], plan[move.target])
    return found


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
