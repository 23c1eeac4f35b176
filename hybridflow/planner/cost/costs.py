"""Costs: seconds and bytes of the calls of a graph, for any plan of it that the user's constraints allow. Pure.

Searches ask for the same prices again and again: they are remembered by the shape of a mesh, which is how many devices
of which nodes it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from hybridflow.config import DType
from hybridflow.errors import ConfigError, ModelError, PlacementError
from hybridflow.planner.cost import device_memory as memory
from hybridflow.planner.cost.backends import MEGATRON, Backend, check_pin, check_split
from hybridflow.planner.cost.call_cost import CallCost, function, generation, inference, training, update_work
from hybridflow.planner.cost.device_memory import DeviceMemory
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients, LayerProfile, LinkModel
from hybridflow.planner.cost.pipeline_cost import CallContext
from hybridflow.planner.cost.reallocation_cost import CONTROLLER, Read, arrival, reads, reallocation
from hybridflow.planner.cost.timeline import Contention, Timeline, simulate
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Constraint, Rules
from hybridflow.planner.describe.graph import HELPER, Call, Graph, Kind, home
from hybridflow.planner.describe.mesh import (
    CallPlan,
    ExecutionPlan,
    Mesh,
    Parallel,
    generation_sizes,
    powers,
    strategies,
)
from hybridflow.planner.describe.model_sizes import Sizes
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.pipeline import schedule as pipeline_schedule
from hybridflow.planner.pipeline.shared_schedule import serial_makespan, together
from hybridflow.settings import require

T = TypeVar("T")
STEPS = 64
"""Static bytes count for the KV-cache budget in this part of a device."""


class Option(NamedTuple):
    """One way to run a call."""

    plan: CallPlan
    seconds: float
    """Of generation with all memory for its KV cache."""
    static: float
    """Bytes that stay between calls if the weights stay here."""
    active: float
    """Bytes on top while the call runs."""
    copy: float
    """Bytes of a second copy of the weights, if they stay elsewhere."""
    busy: float = 1.0
    """Share of the seconds in which devices work."""


class Remembered(dict[tuple, Any]):
    """Answers by their keys."""

    def once(self, key: tuple, made: Callable[[], T]) -> T:
        try:
            return self[key]
        except KeyError:
            return self.setdefault(key, made())


class Costs:
    """Prices the calls of `graph` on `cluster` under `workload`.

    A plan is worth each further layout of a group only if it saves more than the share `margin` of its seconds. Errors:
    those of `ClusterSpec` for meshes outside of it, ConfigError for calls and groups that the graph has not, ModelError
    for sizes that a model cannot be split by, PlacementError for constraints that cannot be kept."""

    def __init__(
        self,
        cluster: ClusterSpec,
        graph: Graph,
        workload: Workload,
        coefficients: Coefficients = DEFAULT,
        profile: LayerProfile | None = None,
        constraints: Iterable[Constraint] = (),
        margin: float = 0.0,
    ) -> None:
        self.cluster, self.graph, self.workload = cluster, graph, workload
        self.coefficients, self.profile, self.margin = coefficients, profile, margin
        self.backends = {group: Backend.of(graph.strategies.get(group)) for group in graph.models}
        for group in graph.strategies.keys() & self.backends.keys():
            if (model := graph.models[group]) is not None:
                self.backends[group].check(model, Parallel(), group)  # families that it does not train
        self.calls = tuple(call for call in graph.calls if call.group != HELPER)
        self.contexts, self._sent = (1,), frozenset[str]()
        self.homes = {group: home(graph, group) for group in graph.groups}
        """By group, the call in whose layout its weights stay."""
        self._workloads = {group: backend.workload(workload) for group, backend in self.backends.items()}
        self._known = Remembered()
        measured = profile is not None and profile.latency is not None  # such messages include their launches
        self._launching = replace(coefficients, latency=0.0) if measured else coefficients
        self.constraints = tuple(constraints)
        self._constrain()

    def _constrain(self) -> None:
        self.rules = rules = Rules(self.constraints, self.graph.groups, self.cluster.size)
        for group, pin in rules.pins.items():
            check_pin(pin, self.graph, self.backends[group], self.cluster, one_layout=group in rules.one_layout)
        asked = {group: pin.offload for group, pin in rules.pins.items() if pin.offload is not None}
        waits = {group for group, waits in {**self.graph.offload, **asked}.items() if waits}
        self.away = self._sent | waits
        """Groups whose models are in host memory between their calls, which have one layout."""
        open_ = {group for group in self.graph.offload if group not in asked and group not in self.graph.generating}
        self.may_wait = tuple(sorted(open_ - self.away))
        rules.one_layout = tuple(dict.fromkeys((*rules.one_layout, *sorted(self.away))))

    def keeping(self, *constraints: Constraint) -> Costs:
        """The same prices under other constraints."""
        return self._but(constraints=constraints)

    def offloading(self, groups: Iterable[str]) -> Costs:
        """With these groups away between their calls, beside those of the driver and of pins."""
        return self._but(_sent=frozenset(groups))

    def sharing_rows(self) -> Costs:
        """With any power of two of ranks that share rows."""
        return self._but(contexts=tuple(powers(self.cluster.size)))

    def _but(self, **changes: Any) -> Costs:
        other = copy(self)
        vars(other).update(changes)
        other._constrain()
        return other

    def on(self, cluster: ClusterSpec, workload: Workload | None = None) -> Costs:
        work, rules = workload or self.workload, self.constraints
        made = Costs(cluster, self.graph, work, self.coefficients, self.profile, rules, self.margin)
        made = made.offloading(self._sent)
        return made if self.contexts == (1,) else made.sharing_rows()

    @property
    def alike(self) -> tuple[tuple[str, ...], ...]:
        """Calls that have one layout, because of what runs them: an optimizer's state is in one place, a group has one
        generation engine, and what functions keep is never moved. Of a group with `OneLayout`, all that do not
        generate."""
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

    @property
    def hybrid(self) -> tuple[tuple[str, str], ...]:
        """A generation call of each group with `OneLayout`, with the call in whose layout the group's weights stay:
        it generates on the same devices, in sizes that divide those."""
        firsts = {call.group: call.name for call in reversed(self.calls) if call.kind == "generation"}
        return tuple((firsts[group], self.homes[group]) for group in self.rules.one_layout if group in firsts)

    @cached_property
    def updates(self) -> tuple[tuple[str, str], ...]:
        """Pairs of training calls of two groups that could run together; none without `Workload.time_sharing`."""
        found = [call for call in self.calls if call.kind == "training"] * self.workload.time_sharing
        pairs = list[tuple[str, str]]()
        while len(found) > 1:
            first = found.pop(0)
            if first.group != found[0].group:
                pairs.append((first.name, found.pop(0).name))
        return tuple(pairs)

    @property
    def capacity(self) -> float:
        """Usable bytes of a device."""
        return self.cluster.node.device.memory * self.coefficients.usable_memory

    @cached_property
    def sharing(self) -> Contention | None:
        return Contention.of(self.cluster)

    @cached_property
    def step(self) -> float:
        """Bytes in which static memory counts for the KV-cache budget of generation."""
        return self.capacity / STEPS

    def shape(self, mesh: Mesh) -> tuple[int, ...]:
        """How many devices of each node it has."""
        return self._known.once(("shape", mesh.bits), lambda: tuple(self.cluster.counts(mesh.devices).values()))

    def strategies(self, group: str, mesh: Mesh, generates: bool = False) -> list[Parallel]:
        """All layouts of a group on a mesh, in training and inference or where it generates: tensor parallel groups do
        not lie across nodes, and the ranks that may share rows are the pin's or the strategy's, else `contexts`."""
        node = math.gcd(*self.cluster.counts(mesh.devices).values())
        model, pin = self.graph.models[group], self.rules.pins.get(group)
        own = getattr(self.backends[group].strategy, "cp", 1)
        contexts = (own,) if own > 1 else self.contexts
        if pin is not None and pin.parallel is not None:
            contexts = (pin.parallel.cp,)

        def cut() -> list[Parallel]:
            found = strategies(model, mesh.size, node)
            if generates or model is None:
                return found
            return [own for sizes in found for own in self.backends[group].layouts(model, sizes, contexts)]

        return self._known.once(("strategies", group, mesh.size, node, generates, contexts), cut)

    def generation_sizes(self, group: str, mesh: Mesh, train: Parallel) -> list[Parallel]:
        """Layouts in which an engine can generate in the processes that train in `train`."""
        within = CallPlan(mesh, train)
        every = self.strategies(group, mesh, generates=True) if train.shards > 1 else generation_sizes(train)
        return [sizes for sizes in every if CallPlan(mesh, sizes).within(within)]

    def further(self, plan: ExecutionPlan) -> int:
        """Layouts that groups have beside that of their weights, and of generation within it; groups sent away."""
        away = set()
        for call in self.calls:
            at, home = plan[call.name], plan[self.homes[call.group]]
            if at != home and not (call.kind == "generation" and at.within(home)):
                away.add((call.group, at))
        return len(away) + len(self._sent)

    def weighted(self, seconds: float, plan: ExecutionPlan) -> float:
        """Seconds of an iteration that make plans comparable: with the margin for each further layout."""
        return seconds * (1 + self.margin) ** self.further(plan) if self.margin else seconds

    def cost(self, call: str, plan: CallPlan, kv_budget: float | None = None) -> CallCost:
        """Seconds of the call on `plan`. `kv_budget` are the bytes of KV cache that each device has for generation;
        without it, what its memory leaves beside this group alone."""
        own = self.graph.call(call)
        context, rows = self.context(own.group, plan, own.kind), self.workload.rows * own.rows
        if context is None or own.kind == "function":
            return function(rows, plan.mesh.size, self.coefficients).times(self.slowdown(plan.mesh))
        if own.kind == "training":
            found = training(context, rows, *self.minibatches(own))
        elif own.kind == "inference":
            found = inference(context, rows)
        else:
            budget = self.kv_budget(call, plan) if kv_budget is None else kv_budget
            shared = own.group in self.graph.trained or own.group in self.away
            found = generation(context, rows, budget, own.ahead if own.continuous else 0, shared)
        found = found.times(self.slowdown(plan.mesh, found.busy))
        return found.beside("offload", self.trip(own, plan)) if own.group in self.away else found

    def trip(self, call: Call, plan: CallPlan) -> float:
        """Seconds in which what a call needs of a model comes from host memory; what it steps goes back afterwards,
        all else is only dropped, and gradients are only allocated. The model of the call before has left by then."""
        still, host = self.resting(call.group, plan), self._links(plan.mesh, self.workload.dtype).host
        moved = 2 * (still.static - still.gradients) if call.kind == "training" else still.parameters
        return moved / host * self.slowdown(plan.mesh)

    def cost_together(self, first: str, second: str, plan: CallPlan) -> float:
        """Seconds of two training calls that share the pipeline stages of `plan` (`hf.together`): those of one after
        the other, less what filling each other's bubbles saves. Nothing with one stage, or where one of the models
        comes from host memory: there is room for one at a time."""
        calls = [self.graph.call(name) for name in (first, second)]
        for call in calls:
            require(call.kind == "training", f"{call.name} does not train: only updates share pipeline stages.")
        serial, p = sum(self.cost(call.name, plan).seconds for call in calls), plan.parallel.p
        here = [self.context(call.group, plan, call.kind) for call in calls if call.group not in self.away]
        contexts = [context for context in here if context is not None and context.backend.pipeline]
        if p == 1 or calls[0].group == calls[1].group or len(contexts) < 2:
            return serial
        given = [(self.workload.rows * call.rows, *self.minibatches(call)) for call in calls]
        works = tuple(update_work(context, *own) for context, own in zip(contexts, given, strict=True))
        saved = serial_makespan(p, works) - pipeline_schedule.simulate(together(p, works)).makespan
        return serial - max(0.0, saved) * self.slowdown(plan.mesh)

    def slowdown(self, mesh: Mesh, busy: float = 1.0) -> float:
        """How much longer its devices take than one that has its node for itself, as they all work at once for the
        share `busy` of their time."""
        return max(self.cluster.node.slow(count * busy) for count in self.cluster.counts(mesh.devices).values())

    def minibatches(self, call: Call) -> tuple[int, int]:
        """Mini-batches and epochs of a training call: its own where it has some, else the workload's."""
        own, epochs = call.minibatches, call.epochs
        return own if own > 1 else self.workload.minibatches, epochs if epochs > 1 else self.workload.epochs

    def context(self, group: str, plan: CallPlan, kind: Kind | None = None) -> CallContext | None:
        """Inputs of the formulas of a call of this kind (None: of the weights' layout); None for a group of functions.
        Errors: ModelError when sizes do not split the model, or the group's strategy has no such sizes."""
        if (key := ("context", group, plan, kind)) in self._known:
            return self._known[key]
        if group not in self.graph.models:
            raise ConfigError(f"no group of the loop is named {group!r}. Known: {', '.join(self.graph.models)}.")
        model, sizes = self.graph.models[group], plan.parallel
        if model is None:
            return None
        check_split(model, sizes, group)
        backend, work = self.backends[group], self._workloads[group]
        if kind == "generation":
            if (sizes.cp, sizes.ep, sizes.etp) != (1, 1, None):
                raise ModelError(f"{group} cannot generate with p-t-d = {sizes}: vLLM cuts experts as other layers.")
            backend, work = MEGATRON, self.workload
        elif kind is not None:
            self._known.once(("checked", group, sizes), lambda: backend.check(model, sizes, group))
        if backend.strategy is not MEGATRON.strategy and backend.parallel(*sizes.cut) != sizes:
            if kind is not None or sizes.shards > 1:
                name = type(backend.strategy).__name__
                raise ModelError(f"{group} cannot have p-t-d = {sizes}: {name} as it is set has no such layout.")
            backend, work = MEGATRON, self.workload  # those of a generation engine
        elif backend is MEGATRON and sizes.shards > 1:
            raise ModelError(f"{group} cannot cut its parameters over {sizes.shards} data parallel ranks here.")
        shares = sizes.t if work.sequence_parallel else 1
        links = replace(self._links(plan.mesh, work.dtype), p=sizes.p, t=sizes.t, d=sizes.d, shares=shares)
        profile = self.profile if backend.lora is None else None  # it was measured with all parameters in training
        made = CallContext(links, model, Sizes.of(model), sizes, work, self.coefficients, profile, backend)
        return self._known.setdefault(key, made)

    def _links(self, mesh: Mesh, dtype: DType) -> LinkModel:
        return self._known.once(
            ("links", mesh, dtype), lambda: LinkModel.of(self.cluster, mesh, dtype, self._launching)
        )

    def kv_budget(self, call: str, plan: CallPlan, beside: float | None = None) -> float:
        """Bytes of KV cache that generation finds on each device, `beside` the static bytes of all groups there.

        Without `beside`, those of its own group, cut over the devices as well as can be."""
        group = self.graph.call(call).group
        context = self.context(group, plan, "generation")
        if context is None:
            return self.capacity
        copied = group in self.graph.trained
        if beside is None:
            one = replace(context.links, p=1, t=1, d=1)
            home = {"backend": self.backends[group], "workload": self._workloads[group]}
            whole = memory.static(replace(context, parallel=Parallel(), links=one, **home), copied)
            beside = whole.static / plan.mesh.size if copied else memory.weights(context)
        own = memory.weights(context) if copied or group in self.away else 0.0
        return max(0.0, self.capacity - beside - own - memory.step_images(context))

    def still(self, group: str, plan: CallPlan) -> DeviceMemory:
        """Bytes per device that stay between calls: parameters, and gradients and optimizer state if trained."""
        return DeviceMemory() if group in self.away else self.resting(group, plan)

    def resting(self, group: str, plan: CallPlan) -> DeviceMemory:
        """`still` of a group that is here or in host memory."""
        if (context := self.context(group, plan)) is None:
            return DeviceMemory()
        return memory.static(context, group in self.graph.trained, group in self.graph.averaged)

    def static(self, group: str, plan: CallPlan) -> float:
        return self.still(group, plan).static

    def added(
        self, call: str, plan: CallPlan, home: CallPlan | None = None, kv_budget: float | None = None
    ) -> DeviceMemory:
        """The least bytes per device on top while the call runs: activations, logits, KV cache for a few rows; with
        `kv_budget` for a KV cache, what generation uses of it.

        Where `home`, the layout in which the group's static bytes lie, is given and differs from `plan`, the call has
        weights of its own."""
        own, copied = self.graph.call(call), home is not None and home != plan
        context = self.context(own.group, plan, own.kind)
        rows = self.workload.rows * own.rows / (self.minibatches(own)[0] if own.kind == "training" else 1)
        if context is None:
            return DeviceMemory()
        found = memory.active(context, own.kind, rows, copied, kv_budget)
        if own.group not in self.away:
            return found
        still = self.resting(own.group, plan)
        return replace(found, visiting=still.static if own.kind == "training" else still.parameters)

    def reallocation(self, group: str, source: CallPlan, target: CallPlan) -> float:
        """Seconds until the weights of `group` have gone from the layout of `source` to that of `target`.

        Ranks with weights of their own keep them in host memory between calls: they come from there, and go back. A
        group that is not trained, such as a rollout, gets those of another group into weights that it has."""
        context, there = self.context(group, source), self.context(group, target)
        if context is None or there is None or source == target:
            return 0.0
        own = group in self.graph.trained
        moved = reallocation(context.size, self.cluster, source, target, context.itemsize, self.coefficients, fresh=own)
        seconds, busy = moved
        union = Mesh(tuple(sorted({*source.mesh.devices, *target.mesh.devices})))
        seconds *= self.slowdown(union, busy)
        if own and (group not in self.graph.generating or not target.within(source)):
            seconds += 2 * memory.weights(there) / there.links.host * self.slowdown(target.mesh)
        return seconds

    def option(self, call: Call, mesh: Mesh, parallel: Parallel, shape: tuple | None = None) -> Option | None:
        """None where a call cannot run so. Cached per mesh shape; only the mesh differs."""

        def priced() -> Option | None:
            plan, elsewhere = CallPlan(mesh, parallel), CallPlan(Mesh((mesh.devices[-1] + 1,)), Parallel())
            try:
                active, cost = self.added(call.name, plan).active, self.beside(call, plan, 0.0)
                static, other = self.static(call.group, plan), self.added(call.name, plan, elsewhere).active
            except (PlacementError, ModelError):
                return None
            return Option(plan, cost.seconds, static, active, other - active, cost.busy)

        key = (call.name, parallel, self.shape(mesh) if shape is None else shape, call.group in self.away)
        found = self._known.once(key, priced)
        return found if found is None or found.plan.mesh == mesh else found._replace(plan=CallPlan(mesh, parallel))

    def beside(self, call: Call, plan: CallPlan, static: float) -> CallCost:
        """The cost of a call where `static` bytes of all groups stay on each device: generation has the others."""
        budget = self.kv_budget(call.name, plan, static) if call.kind == "generation" else None
        return self.cost(call.name, plan, budget)

    def generation(self, call: Call, plan: CallPlan, beside: float) -> CallCost:
        """`beside` of a generation call, with static bytes rounded up to a 64th of the smallest memory."""
        steps = math.ceil(beside / self.step - 1e-9)
        key = (call.name, plan.parallel, self.shape(plan.mesh), steps, call.group in self.away)
        return self._known.once(key, lambda: self.beside(call, plan, steps * self.step))

    def moved(self, group: str, source: CallPlan, target: CallPlan) -> float:
        """`reallocation`: pairs that differ by whole nodes cost the same."""
        if source == target:
            return 0.0
        low = min(source.mesh.devices[0], target.mesh.devices[0])
        shift = low - low % self.cluster.node.count
        key = (group, source.parallel, target.parallel, source.mesh.bits >> shift, target.mesh.bits >> shift)
        return self._known.once(key, lambda: self.reallocation(group, source, target))

    def kept(self, plan: ExecutionPlan) -> list[float]:
        """Bytes that stay on each device between calls."""
        found = [0.0] * self.cluster.size
        for group, name in self.homes.items():
            more = self.static(group, plan[name])
            for device in plan[name].mesh.devices:
                found[device] += more
        return found

    def seconds(self, plan: ExecutionPlan) -> dict[str, float]:
        """Seconds of each call, of generation with its KV-cache budget."""
        found = {name: seconds for name, (seconds, _, _) in self._priced(plan).items()}
        for first, second in self.updates:
            if (at := plan[first]) == plan[second]:
                key = ("together", first, second, at.parallel, self.shape(at.mesh), self.away)
                found[second] = self._known.once(key, partial(self.cost_together, first, second, at)) - found[first]
        for read in (read for read in self.reads if read.reader in found):
            there = plan[read.writer].mesh if read.writer in plan else CONTROLLER
            found[read.reader] += self.arrival(read.nbytes, there, plan[read.reader].mesh)
        return found

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        return reads(self.graph, self.workload)

    def arrival(self, nbytes: float, there: Mesh, here: Mesh) -> float:
        key = ("arrival", there.bits, here.bits)
        return nbytes * self._known.once(key, lambda: arrival(self.cluster, self.coefficients, there, here))

    def _priced(self, plan: ExecutionPlan) -> dict[str, tuple[float, float, float]]:
        """Of each call that can run so: its seconds, the share of them in which devices work, its rows' latency."""
        kept, found = self.kept(plan), {}
        for call in self.calls:
            here = plan[call.name]
            if (option := self.option(call, here.mesh, here.parallel)) is not None:
                found[call.name] = option.seconds, option.busy, 0.0
            if call.kind == "generation":
                cost = self.generation(call, here, max(kept[device] for device in here.mesh.devices))
                found[call.name] = cost.seconds, option.busy if option else 1.0, cost.latency
        return found

    def timeline(self, plan: ExecutionPlan) -> Timeline:
        priced, took = self._priced(plan), self.seconds(plan)
        busy = {name: share for name, (_, share, _) in priced.items()} if self.sharing else None
        latency = {name: seconds for name, (_, _, seconds) in priced.items() if seconds}
        own = {"busy": busy, "latency": latency, "sharing": self.sharing}
        return simulate(self.graph, plan, took, reallocation=self.moved, **own)
