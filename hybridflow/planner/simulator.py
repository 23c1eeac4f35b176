"""Simulator: seconds and bytes of every call of a graph, for any plan of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hybridflow.planner.cluster_spec import ClusterSpec
from hybridflow.planner.coefficients import DEFAULT, Coefficients
from hybridflow.planner.cost import CallCost, DeviceMemory
from hybridflow.planner.graph import Graph
from hybridflow.planner.plans import CallPlan
from hybridflow.planner.workload import Workload

__all__ = ["CallCost", "DeviceMemory", "Profile", "Simulator"]


class Profile(Protocol):
    """Measured seconds, where there are some: asked before the formulas are."""

    def seconds(self, call: str, plan: CallPlan) -> float | None: ...


class Simulator:
    """Prices the calls of `graph` on `cluster` under `workload`."""

    def __init__(
        self,
        cluster: ClusterSpec,
        graph: Graph,
        workload: Workload,
        coefficients: Coefficients = DEFAULT,
        profile: Profile | None = None,
    ) -> None:
        self.cluster, self.graph, self.workload = cluster, graph, workload
        self.coefficients, self.profile = coefficients, profile
        self._costs: dict[tuple[str, CallPlan], CallCost] = {}

    def cost(self, call: str, plan: CallPlan) -> CallCost:
        """Seconds of the call on `plan`."""
        found = self._costs.get((call, plan))
        return found if found is not None else self._costs.setdefault((call, plan), self._cost(call, plan))

    def _cost(self, name: str, plan: CallPlan) -> CallCost:
        call = self.graph.call(name)
        model = self.graph.models[call.group]
        if model is None:
            return CallCost.of(fixed=self.coefficients.call_seconds)
        tokens = self.workload.rows * call.rows * self.workload.tokens
        passes = 3.0 * call.epochs if call.kind == "training" else 1.0
        peak = self.cluster.device(plan.mesh.devices[0]).peak(self.workload.dtype) * self.coefficients.compute
        return CallCost.of(compute=passes * 2 * model.num_parameters * tokens / plan.mesh.size / peak)

    def memory(self, call: str, plan: CallPlan) -> DeviceMemory:
        """Bytes on the fullest device while the call runs."""
        return DeviceMemory(parameters=self.static(self.graph.call(call).group, plan))

    def static(self, group: str, plan: CallPlan) -> float:
        """Bytes per device that stay between calls: parameters, and gradients and optimizer state if trained."""
        model = self.graph.models[group]
        if model is None:
            return 0.0
        each = 18.0 if group in self.graph.trained else 2.0
        return each * model.num_parameters / (plan.parallel.p * plan.parallel.t)

    def active(self, call: str, plan: CallPlan) -> float:
        """Bytes per device on top while the call runs: activations, logits, one wave of KV cache at least."""
        return self.memory(call, plan).active

    def reallocation(self, group: str, source: CallPlan, target: CallPlan) -> float:
        """Seconds until the weights of `group` have gone from the layout of `source` to that of `target`."""
        model = self.graph.models[group]
        if model is None or source == target:
            return 0.0
        node = self.cluster.nodes[0]
        return 2.0 * model.num_parameters / (target.parallel.p * target.parallel.t) / node.bandwidth

    def seconds(self, plans: Mapping[str, CallPlan]) -> dict[str, float]:
        """Seconds of every planned call."""
        return {name: self.cost(name, plan).seconds for name, plan in plans.items()}
