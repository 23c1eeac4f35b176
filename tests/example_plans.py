"""Models, loops and a small simulator for tests of searches: cheap, plain, and with all trade-offs of a real one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from benchmarks.dataflows import grpo, ppo
from hybridflow.errors import PlacementError
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.call_cost import CallCost
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import Coefficients
from hybridflow.planner.describe.cluster_spec import ClusterSpec, DeviceSpec, NodeSpec
from hybridflow.planner.describe.constraints import Apart, Cap, Together
from hybridflow.planner.describe.graph import Graph
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, generation_sizes, strategies
from hybridflow.planner.describe.workload import Workload


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int = 128256) -> ModelSpec:
    return ModelSpec(
        family="llama",
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab=vocab,
    )


LLAMA_7B = llama(4096, 14336, 32, 32, 8)
LLAMA_13B = llama(5120, 13824, 40, 40, 40)
LLAMA_34B = llama(8192, 22016, 48, 64, 8)
LLAMA_70B = llama(8192, 28672, 80, 64, 8)
SMALL = llama(512, 1024, 4, 8, 4, vocab=1000)
LARGE = llama(1024, 4096, 6, 8, 8, vocab=1000)


@cache
def _parameters(model: ModelSpec) -> int:
    return model.num_parameters


def value(model: ModelSpec) -> ModelSpec:
    return replace(model, head="value")


def ppo_of(actor: ModelSpec, critic: ModelSpec, **how) -> Graph:
    """PPO whose reward model is as large as the critic."""
    return ppo(actor, value(critic), actor, value(critic), **how)


def grpo_of(actor: ModelSpec, reference: ModelSpec | None = None) -> Graph:
    return grpo(actor, reference)


def cluster(nodes: int, count: int, memory: float = 1e12) -> ClusterSpec:
    device = DeviceSpec("plain", memory, {"bfloat16": 1e14}, 1e12)
    return ClusterSpec((NodeSpec(device, count, 1e11),) * nodes, 1e10)


class PlainCosts(Costs):
    """Seconds and bytes by closed formulas. `asked` counts what was asked for."""

    def __init__(self, graph: Graph, cluster: ClusterSpec, tokens: float = 1e6, usable_memory: float = 1.0) -> None:
        coefficients = Coefficients(usable_memory=usable_memory)
        super().__init__(cluster, graph, Workload(rows=512, prompt=1, response=1), coefficients)
        self.tokens, self.rows, self.asked = tokens, 512, 0

    def cost(self, call: str, plan: CallPlan, kv_budget: float | None = None) -> CallCost:
        self.asked += 1
        found, (p, t, d) = self.graph.call(call), self._sizes(plan)
        if d > self.rows:
            raise PlacementError(f"{self.rows} rows cannot be spread over d={d}.")
        if (model := self.graph.models[found.group]) is None:
            return CallCost.of(compute=0.5 / d)
        flops = {"training": 6.0, "generation": 0.5}.get(found.kind, 2.0) * _parameters(model) * self.tokens
        compute = flops / (plan.mesh.size * 1e14 * (1 - 0.04 * math.log2(t)))
        if found.kind == "generation":
            steps = 200 * (2.0 * _parameters(model) / (p * t) / 1e12 + 1e-5 * model.layers) * p
            need = 20.0 * model.layers * model.hidden * self.tokens / (plan.mesh.size / t / p) / (t * p) / 16
            waves = 1 if kv_budget is None else min(16, math.ceil(need / max(kv_budget, 1.0)))
            return CallCost.of(decode=compute + (steps + 200 * model.layers * 2e-5 * (t > 1)) * waves)
        wire = self.tokens / d / p * model.layers * model.hidden * 4 * (t - 1) / t / 1e11
        bubble = compute * (p - 1) / max(1.0, self.rows / d / 8)
        spread = 4.0 * _parameters(model) / (p * t) * (d - 1) / d / (1e10 if plan.mesh.size > 8 else 1e11)
        return CallCost.of(compute=compute + wire + bubble + (spread if found.kind == "training" else 0.0))

    def static(self, group: str, plan: CallPlan) -> float:
        model, (p, t, d) = self.graph.models[group], self._sizes(plan)
        each = 6.0 + 12.0 / d if group in self.graph.trained else 2.0
        return each * _parameters(model) / (p * t) if model else 0.0

    def active(self, call: str, plan: CallPlan, home: CallPlan | None = None, kv_budget: float | None = None) -> float:
        found, (p, t, d) = self.graph.call(call), self._sizes(plan)
        model = self.graph.models[found.group]
        if model is None:
            return 0.0
        each = {"training": 16.0, "generation": 8.0}.get(found.kind, 4.0)
        copy = 2.0 * _parameters(model) / (p * t) if home is not None and home != plan else 0.0
        return each * model.hidden * 2048 * max(1.0, self.rows / d / 64) * model.layers / t / 4 + copy

    def kv_budget(self, call: str, plan: CallPlan, beside: float | None = None) -> float:
        p, t, _ = self._sizes(plan)
        model = self.graph.models[self.graph.call(call).group]
        taken = (beside or 0.0) + (2.0 * _parameters(model) / (p * t) if model else 0.0)
        return max(0.0, self.cluster.node.device.memory - taken)

    def reallocation(self, group: str, source: CallPlan, target: CallPlan) -> float:
        model = self.graph.models[group]
        if model is None or source == target:
            return 0.0
        p, t, _ = self._sizes(target)
        held = 0.5 if source.mesh.bits & target.mesh.bits else 0.0
        between = 1e10 if max(*source.mesh.devices, *target.mesh.devices) >= 8 else 1e11
        return 2.0 * _parameters(model) / (p * t) * (1 - held) / between

    def _sizes(self, plan: CallPlan) -> tuple[int, int, int]:
        return plan.parallel.p, plan.parallel.t, plan.parallel.d


def fits(problem: Costs, plan: ExecutionPlan) -> bool:
    """No device is fuller than it may be, with the least KV cache that generation can do with."""
    active = [0.0] * problem.cluster.size
    for call in problem.calls:
        more = problem.added(call.name, plan[call.name], plan[problem.homes[call.group]]).active
        for device in plan[call.name].mesh.devices:
            active[device] = max(active[device], more)
    return all(static + more <= problem.capacity for static, more in zip(problem.kept(plan), active, strict=True))


def obeys(problem: Costs, plan: ExecutionPlan) -> bool:
    """The plan keeps all constraints."""
    for call in problem.calls:
        here = plan[call.name]
        if not problem.rules.allows(call.group, here.mesh, here.parallel, call.kind == "generation"):
            return False
    meshes = {group: [plan[c.name].mesh for c in problem.graph.of_group(group)] for group in problem.graph.groups}
    for pair in problem.rules.apart:
        if any(a.overlaps(b) for a in meshes[pair.first] for b in meshes[pair.second]):
            return False
    if any(len({plan[name] for name in names}) > 1 for names in problem.alike):
        return False
    if not all(plan[name].within(plan[home]) for name, home in problem.hybrid):
        return False
    return all(len({*meshes[pair.first], *meshes[pair.second]}) == 1 for pair in problem.rules.together)


def stage_choices(problem: Costs, members: Sequence[str], mesh: Mesh) -> np.ndarray:
    """[choices, 3] Stage seconds of each combination of layouts that fits."""
    costs, found, each = problem, [], []
    node = math.gcd(*problem.cluster.counts(mesh.devices).values())
    for group in members:
        rules = [c for c in problem.constraints if not isinstance(c, Apart | Together) and c.group == group]
        capped = any(isinstance(c, Cap) and mesh.size > c.devices for c in rules)
        homes = [] if capped else strategies(problem.graph.models[group], mesh.size, node)
        both = len({call.kind == "generation" for call in problem.graph.of_group(group)}) == 2
        each.append([(group, home, own) for home in homes for own in (generation_sizes(home) if both else [home])])
    for chosen in product(*each):
        static = sum(costs.static(group, CallPlan(mesh, home)) for group, home, _ in chosen)
        seconds, active = [0.0, 0.0, 0.0], 0.0
        for group, sizes, generate in chosen:
            home = CallPlan(mesh, sizes)
            for call in problem.graph.of_group(group):
                here = CallPlan(mesh, generate) if call.kind == "generation" else home
                active = max(active, costs.added(call.name, here, home).active)
                if call.kind == "generation":
                    seconds[0] += problem.generation(call, here, static).seconds + costs.reallocation(group, home, here)
                else:
                    seconds[2 if call.kind == "training" else 1] += costs.cost(call.name, here).seconds
        if static + active <= problem.capacity:
            found.append(seconds)
    return np.array(found).reshape(-1, 3)
