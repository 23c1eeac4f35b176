"""Simulator: seconds and bytes of every call of a graph, for any plan of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hybridflow.config import DType
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost import device_memory as memory
from hybridflow.planner.cost.backends import MEGATRON, Backend
from hybridflow.planner.cost.call_cost import function, generation, inference, training
from hybridflow.planner.cost.device_memory import DeviceMemory
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients, Site
from hybridflow.planner.cost.layer_costs import Sizes
from hybridflow.planner.cost.layer_profile import LayerProfile
from hybridflow.planner.cost.pipeline_cost import CallContext, CallCost
from hybridflow.planner.cost.reallocation_cost import reallocation
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Call, Graph, Kind
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Workload


class Simulator:
    """Prices the calls of `graph` on `cluster` under `workload`; every answer is remembered.

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
        self._backends = {group: Backend.of(graph.strategies.get(group)) for group in graph.models}
        self._workloads = {group: backend.workload(workload) for group, backend in self._backends.items()}
        self._costs: dict[tuple[str, CallPlan, float | None], CallCost] = {}
        self._static: dict[tuple[str, CallPlan], DeviceMemory] = {}
        self._active: dict[tuple[str, CallPlan, bool], DeviceMemory] = {}
        self._moves: dict[tuple[str, CallPlan, CallPlan], float] = {}
        self._sites: dict[tuple[CallPlan, DType, int], Site] = {}
        self._meshes: dict[tuple[Mesh, DType], Site] = {}
        self._shared = any(node.slowdown for node in cluster.nodes)
        self._capacities: dict[Mesh, float] = {}

    def cost(self, call: str, plan: CallPlan, room: float | None = None) -> CallCost:
        """Seconds of the call on `plan`. `room` are the bytes of KV cache that each device has for generation; without
        it, what its memory leaves beside this group alone."""
        found = self._costs.get((call, plan, room))
        return found if found is not None else self._costs.setdefault((call, plan, room), self._cost(call, plan, room))

    def _cost(self, name: str, plan: CallPlan, room: float | None) -> CallCost:
        call = self.graph.call(name)
        setting = self.setting(call.group, plan, call.kind)
        if setting is None or call.kind == "function":
            found = function(self.workload.rows * call.rows, plan.mesh.size, self.coefficients)
            return found.times(self.slowdown(plan.mesh))
        rows = self.workload.rows * call.rows
        if call.kind == "training":
            found = training(setting, rows, *self.updates(call))
        elif call.kind == "inference":
            found = inference(setting, rows)
        else:
            found = generation(setting, rows, self.room(name, plan) if room is None else room)
        return found.times(self.slowdown(plan.mesh, found.busy))

    def slowdown(self, mesh: Mesh, busy: float = 1.0) -> float:
        """How much longer its devices take than one that has its node for itself, as they all work at once for the
        share `busy` of their time."""
        if not self._shared:
            return 1.0
        counts = self.cluster.counts(mesh.devices).items()
        return max(self.cluster.nodes[node].slow(count * busy) for node, count in counts)

    def updates(self, call: Call) -> tuple[int, int]:
        """Mini-batches and epochs of a training call: its own where it has some, else the workload's."""
        work = self.workload
        return (
            call.minibatches if call.minibatches > 1 else work.minibatches,
            call.epochs if call.epochs > 1 else work.epochs,
        )

    def setting(self, group: str, plan: CallPlan, kind: Kind | None = None) -> CallContext | None:
        """What formulas read of a call of this kind (None: of where weights lie); None for a group of functions.

        Errors: ModelError when sizes do not split the model, or the group's strategy has no such sizes.
        """
        if group not in self.graph.models:
            raise ConfigError(f"no group of the loop is named {group!r}. Known: {', '.join(self.graph.models)}.")
        model, sizes = self.graph.models[group], plan.parallel
        if model is None:
            return None
        _check_split(model, sizes, group)
        backend, work = self._backends[group], self._workloads[group]
        if kind == "generation":
            backend, work = MEGATRON, self.workload
        if backend.strategy is not MEGATRON.strategy and backend.parallel(*sizes.sizes, sizes.micro_batches) != sizes:
            if kind is not None or sizes.shards > 1:
                name = type(backend.strategy).__name__
                raise ModelError(f"{group} cannot have p-t-d = {sizes}: {name} as it is set has no such layout.")
            backend, work = MEGATRON, self.workload  # those of a generation engine
        elif backend is MEGATRON and sizes.shards > 1:
            raise ModelError(f"{group} cannot cut its parameters over {sizes.shards} data parallel ranks here.")
        site = self._site(plan, work.dtype, sizes.t if work.sequence_parallel else 1)
        profile = self.profile if backend.lora is None else None  # it was measured with all parameters in training
        return CallContext(site, model, Sizes.of(model), sizes, work, self.coefficients, profile, backend)

    def _site(self, plan: CallPlan, dtype: DType, shares: int) -> Site:
        found = self._sites.get((plan, dtype, shares))
        if found is None:
            base = self._meshes.get((plan.mesh, dtype))
            if base is None:
                base = self._meshes[plan.mesh, dtype] = Site.of(self.cluster, plan, dtype, self.coefficients)
            p, t, d = plan.parallel.sizes
            found = self._sites[plan, dtype, shares] = replace(base, p=p, t=t, d=d, shares=shares)
        return found

    def capacity(self, plan: CallPlan) -> float:
        """Bytes that may be used on each device of the mesh: on the smallest, less what the runtime keeps."""
        found = self._capacities.get(plan.mesh)
        if found is None:
            nodes = self.cluster.counts(plan.mesh.devices)
            least = min(self.cluster.nodes[node].device.memory for node in nodes)
            found = self._capacities[plan.mesh] = least * self.coefficients.usable_memory
        return found

    def room(self, call: str, plan: CallPlan, beside: float | None = None) -> float:
        """Bytes of KV cache that generation finds on each device, `beside` the static bytes of all groups there.

        Without `beside`, those of its own group, cut over the devices as well as can be.
        """
        group = self.graph.call(call).group
        setting = self.setting(group, plan, "generation")
        if setting is None:
            return self.capacity(plan)
        copied = group in self.graph.trained
        if beside is None:
            one = replace(setting.site, p=1, t=1, d=1)
            home = {"backend": self._backends[group], "workload": self._workloads[group]}
            whole = memory.static(replace(setting, parallel=Parallel(), site=one, **home), copied)
            beside = whole.static / plan.mesh.size if copied else memory.weights(setting)
        return max(0.0, self.capacity(plan) - beside - (memory.weights(setting) if copied else 0.0))

    def memory(
        self, call: str, plan: CallPlan, room: float | None = None, home: CallPlan | None = None
    ) -> DeviceMemory:
        """Bytes on the fullest device while the call runs, for this group alone. `home` is where its static bytes are
        laid out (default: as `plan`); generation uses all of `room` that its rows need."""
        group = self.graph.call(call).group
        least, still = self._least(call, plan, _differs(plan, home)), self._still(group, home or plan)
        setting = self.setting(group, plan, self.graph.call(call).kind)
        if setting is None:
            return least
        cache = least.kv_cache
        if cache:
            room = self.room(call, plan) if room is None else room
            rows = self.workload.rows * self.graph.call(call).rows
            cache = max(cache, memory.cache(setting, rows, room))
        return replace(
            least, parameters=still.parameters, gradients=still.gradients, optimizer=still.optimizer, kv_cache=cache
        )

    def static(self, group: str, plan: CallPlan) -> float:
        """Bytes per device that stay between calls: parameters, and gradients and optimizer state if trained."""
        return self._still(group, plan).static

    def active(self, call: str, plan: CallPlan, home: CallPlan | None = None, room: float | None = None) -> float:
        """The least bytes per device on top while the call runs: activations, logits, KV cache for a few rows; with
        `room` for a KV cache, what generation uses of it.

        Where `home`, the layout in which the group's static bytes lie, is given and differs from `plan`, the call has
        weights of its own.
        """
        if room is not None:
            return self.memory(call, plan, room, home).active
        return self._least(call, plan, _differs(plan, home)).active

    def _still(self, group: str, plan: CallPlan) -> DeviceMemory:
        found = self._static.get((group, plan))
        if found is None:
            setting = self.setting(group, plan)
            found = memory.static(setting, group in self.graph.trained) if setting else DeviceMemory()
            self._static[group, plan] = found
        return found

    def _least(self, name: str, plan: CallPlan, elsewhere: bool) -> DeviceMemory:
        found = self._active.get((name, plan, elsewhere))
        if found is None:
            call = self.graph.call(name)
            setting = self.setting(call.group, plan, call.kind)
            rows = self.workload.rows * call.rows
            if call.kind == "training":
                rows /= self.updates(call)[0]
            found = memory.active(setting, call.kind, rows, elsewhere) if setting else DeviceMemory()
            self._active[name, plan, elsewhere] = found
        return found

    def reallocation(self, group: str, source: CallPlan, target: CallPlan) -> float:
        """Seconds until the weights of `group` have gone from the layout of `source` to that of `target`.

        Ranks with weights of their own keep them in host memory between calls: they come from there, and go back.
        """
        found = self._moves.get((group, source, target))
        if found is None:
            setting, there = self.setting(group, source), self.setting(group, target)
            found = 0.0
            if setting is not None and there is not None and not source.alike(target):
                size, k = setting.size, self.coefficients
                both = Mesh(tuple(sorted({*source.mesh.devices, *target.mesh.devices})))
                found = reallocation(size, self.cluster, source, target, setting.itemsize, k)
                if group not in self.graph.generating or not target.within(source):
                    found += 2 * memory.weights(there) / there.site.host
                found *= self.slowdown(both)
            self._moves[group, source, target] = found
        return found

    def seconds(self, plans: Mapping[str, CallPlan]) -> dict[str, float]:
        """Seconds of every planned call."""
        return {name: self.cost(name, plan).seconds for name, plan in plans.items()}


def _differs(plan: CallPlan, home: CallPlan | None) -> bool:
    """Weights that lie as `home` says are not where `plan` wants them. Micro-batches move no weights."""
    if home is None or plan is home:
        return False
    return not plan.alike(home)


def _check_split(model: ModelSpec, sizes: Parallel, group: str) -> None:
    """`ModelSpec.check_parallel` without its lists, for the many sizes that a search tries."""
    if not model.divides(sizes.t) or sizes.p > model.layers:
        raise ModelError(
            f"{group} cannot be split by p={sizes.p}, t={sizes.t}: it has {model.layers} layers, {model.heads} heads, "
            f"{model.kv_heads} kv-heads and {model.intermediate} MLP columns."
        )
