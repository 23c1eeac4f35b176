"""Simulator: seconds and bytes of every call of a graph, for any plan of it. Pure."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.config import DType
from hybridflow.errors import ConfigError, ModelError
from hybridflow.planner.cost import device_memory as memory
from hybridflow.planner.cost.backends import MEGATRON, Backend
from hybridflow.planner.cost.call_cost import CallCost, function, generation, inference, training, update_work
from hybridflow.planner.cost.device_memory import DeviceMemory
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients, LinkModel
from hybridflow.planner.cost.layer_profile import LayerProfile
from hybridflow.planner.cost.pipeline_cost import CallContext, Sizes
from hybridflow.planner.cost.reallocation_cost import reallocation
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Call, Graph, Kind
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.pipeline.schedule_simulation import simulate
from hybridflow.planner.pipeline.shared_schedule import serial_makespan, together
from hybridflow.settings import require


class Simulator:
    """Prices the calls of `graph` on `cluster` under `workload`.

    Errors: those of `ClusterSpec` for meshes outside of it, ConfigError for calls and groups that the graph has not,
    ModelError for sizes that a model cannot be split by.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        graph: Graph,
        workload: Workload,
        coefficients: Coefficients = DEFAULT,
        profile: LayerProfile | None = None,
    ) -> None:
        self.cluster, self.graph, self.workload = cluster, graph, workload
        self.coefficients, self.profile = coefficients, profile
        self.backends = {group: Backend.of(graph.strategies.get(group)) for group in graph.models}
        self._workloads = {group: backend.workload(workload) for group, backend in self.backends.items()}
        self._links: dict[tuple[Mesh, DType], LinkModel] = {}
        self._contexts: dict[tuple[str, CallPlan, Kind | None], CallContext | None] = {}

    def on(self, cluster: ClusterSpec, workload: Workload | None = None) -> Simulator:
        """The simulator of another cluster, or of another workload."""
        return Simulator(cluster, self.graph, workload or self.workload, self.coefficients, self.profile)

    def cost(self, call: str, plan: CallPlan, kv_budget: float | None = None) -> CallCost:
        """Seconds of the call on `plan`. `kv_budget` are the bytes of KV cache that each device has for generation;
        without it, what its memory leaves beside this group alone."""
        own = self.graph.call(call)
        context, rows = self.context(own.group, plan, own.kind), self.workload.rows * own.rows
        if context is None or own.kind == "function":
            return function(rows, plan.mesh.size, self.coefficients).times(self.slowdown(plan.mesh))
        if own.kind == "training":
            found = training(context, rows, *self.updates(own))
        elif own.kind == "inference":
            found = inference(context, rows)
        else:
            ahead = own.ahead if own.continuous else 0
            found = generation(context, rows, self.kv_budget(call, plan) if kv_budget is None else kv_budget, ahead)
        return found.times(self.slowdown(plan.mesh, found.busy))

    def cost_together(self, first: str, second: str, plan: CallPlan) -> float:
        """Seconds of two training calls that share the pipeline stages of `plan` (`hf.together`): those of one after
        the other, less what filling each other's bubbles saves. With one stage, nothing is saved."""
        calls = [self.graph.call(name) for name in (first, second)]
        for call in calls:
            require(call.kind == "training", f"{call.name} does not train: only updates share pipeline stages.")
        serial, p = sum(self.cost(call.name, plan).seconds for call in calls), plan.parallel.p
        settings = [self.context(call.group, plan, call.kind) for call in calls]
        if p == 1 or calls[0].group == calls[1].group or not all(s and s.backend.pipeline for s in settings):
            return serial
        works = []
        for call, context in zip(calls, settings, strict=True):
            assert context is not None
            works.append(update_work(context, self.workload.rows * call.rows, *self.updates(call)))
        saved = serial_makespan(p, works) - simulate(together(p, tuple(works))).makespan
        return serial - max(0.0, saved) * self.slowdown(plan.mesh)

    def slowdown(self, mesh: Mesh, busy: float = 1.0) -> float:
        """How much longer its devices take than one that has its node for itself, as they all work at once for the
        share `busy` of their time."""
        counts = self.cluster.counts(mesh.devices).items()
        return max(self.cluster.nodes[node].slow(count * busy) for node, count in counts)

    def updates(self, call: Call) -> tuple[int, int]:
        """Mini-batches and epochs of a training call: its own where it has some, else the workload's."""
        work = self.workload
        return (
            call.minibatches if call.minibatches > 1 else work.minibatches,
            call.epochs if call.epochs > 1 else work.epochs,
        )

    def context(self, group: str, plan: CallPlan, kind: Kind | None = None) -> CallContext | None:
        """The cached context of a call of this kind (None: of the weights' layout); None for a group of functions.

        Errors: ModelError when sizes do not split the model, or the group's strategy has no such sizes.
        """
        key = (group, plan, kind)
        if key not in self._contexts:
            self._contexts[key] = self._context(group, plan, kind)
        return self._contexts[key]

    def _context(self, group: str, plan: CallPlan, kind: Kind | None) -> CallContext | None:
        if group not in self.graph.models:
            raise ConfigError(f"no group of the loop is named {group!r}. Known: {', '.join(self.graph.models)}.")
        model, sizes = self.graph.models[group], plan.parallel
        if model is None:
            return None
        if not model.divides(sizes.t) or sizes.p > model.layers:
            raise ModelError(
                f"{group} cannot be split by p={sizes.p}, t={sizes.t}: it has {model.layers} layers, {model.heads} "
                f"heads, {model.kv_heads} kv-heads and {model.intermediate} MLP columns."
            )
        backend, work = self.backends[group], self._workloads[group]
        if kind == "generation":
            backend, work = MEGATRON, self.workload
        if backend.strategy is not MEGATRON.strategy and backend.parallel(*sizes.sizes) != sizes:
            if kind is not None or sizes.shards > 1:
                name = type(backend.strategy).__name__
                raise ModelError(f"{group} cannot have p-t-d = {sizes}: {name} as it is set has no such layout.")
            backend, work = MEGATRON, self.workload  # those of a generation engine
        elif backend is MEGATRON and sizes.shards > 1:
            raise ModelError(f"{group} cannot cut its parameters over {sizes.shards} data parallel ranks here.")
        shares = sizes.t if work.sequence_parallel else 1
        links = replace(self._link_model(plan.mesh, work.dtype), p=sizes.p, t=sizes.t, d=sizes.d, shares=shares)
        profile = self.profile if backend.lora is None else None  # it was measured with all parameters in training
        return CallContext(links, model, Sizes.of(model), sizes, work, self.coefficients, profile, backend)

    def _link_model(self, mesh: Mesh, dtype: DType) -> LinkModel:
        if (mesh, dtype) not in self._links:
            found = LinkModel.of(self.cluster, mesh, dtype, self.coefficients)
            if self.profile is not None and self.profile.latency is not None:
                found = replace(found, launch=0.0)  # measured messages include it
            self._links[mesh, dtype] = found
        return self._links[mesh, dtype]

    def kv_budget(self, call: str, plan: CallPlan, beside: float | None = None) -> float:
        """Bytes of KV cache that generation finds on each device, `beside` the static bytes of all groups there.

        Without `beside`, those of its own group, cut over the devices as well as can be.
        """
        group = self.graph.call(call).group
        context = self.context(group, plan, "generation")
        # on the smallest device, less what the runtime keeps
        capacity = self._link_model(plan.mesh, self.workload.dtype).memory * self.coefficients.usable_memory
        if context is None:
            return capacity
        copied = group in self.graph.trained
        if beside is None:
            one = replace(context.links, p=1, t=1, d=1)
            home = {"backend": self.backends[group], "workload": self._workloads[group]}
            whole = memory.static(replace(context, parallel=Parallel(), links=one, **home), copied)
            beside = whole.static / plan.mesh.size if copied else memory.weights(context)
        return max(0.0, capacity - beside - (memory.weights(context) if copied else 0.0))

    def memory(
        self, call: str, plan: CallPlan, kv_budget: float | None = None, home: CallPlan | None = None
    ) -> DeviceMemory:
        """Bytes on the fullest device while the call runs, for this group alone. `home` is where its static bytes are
        laid out (default: as `plan`); generation uses all of `kv_budget` that its rows need."""
        own = self.graph.call(call)
        least, still = self._least(call, plan, home), self.still(own.group, home or plan)
        context, cache = self.context(own.group, plan, own.kind), least.kv_cache
        if context is not None and cache:
            kv_budget = self.kv_budget(call, plan) if kv_budget is None else kv_budget
            cache = max(cache, memory.cache(context, self.workload.rows * own.rows, kv_budget))
        return replace(
            least, parameters=still.parameters, gradients=still.gradients, optimizer=still.optimizer, kv_cache=cache
        )

    def static(self, group: str, plan: CallPlan) -> float:
        """Bytes per device that stay between calls: parameters, and gradients and optimizer state if trained."""
        return self.still(group, plan).static

    def active(self, call: str, plan: CallPlan, home: CallPlan | None = None, kv_budget: float | None = None) -> float:
        """The least bytes per device on top while the call runs: activations, logits, KV cache for a few rows; with
        `kv_budget` for a KV cache, what generation uses of it.

        Where `home`, the layout in which the group's static bytes lie, is given and differs from `plan`, the call has
        weights of its own.
        """
        return (self._least(call, plan, home) if kv_budget is None else self.memory(call, plan, kv_budget, home)).active

    def still(self, group: str, plan: CallPlan) -> DeviceMemory:
        """The parts of `static`."""
        context = self.context(group, plan)
        return DeviceMemory() if context is None else memory.static(context, group in self.graph.trained)

    def _least(self, name: str, plan: CallPlan, home: CallPlan | None) -> DeviceMemory:
        call = self.graph.call(name)
        context = self.context(call.group, plan, call.kind)
        rows = self.workload.rows * call.rows / (self.updates(call)[0] if call.kind == "training" else 1)
        copied = home is not None and home != plan
        return DeviceMemory() if context is None else memory.active(context, call.kind, rows, copied)

    def reallocation(self, group: str, source: CallPlan, target: CallPlan) -> float:
        """Seconds until the weights of `group` have gone from the layout of `source` to that of `target`.

        Ranks with weights of their own keep them in host memory between calls: they come from there, and go back. A
        group that is not trained, such as a rollout, gets those of another group into weights that it has.
        """
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
