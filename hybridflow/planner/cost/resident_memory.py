"""Resident memory: bytes that groups placed on one device have there in each phase of an iteration. Pure.

Only what is certain is counted: weights, gradients and optimizer state as `Costs` has them (Adam's moments exist from
the start), and the share of the device that generation takes. Activations, message buffers and CUDA's own memory come
on top, and depend on the batch: a driver that is refused for these figures cannot run, while one that passes may still
run out of memory, which the call's error then explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.config import SGD, VLLM, DType
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.hf_spec import Decoder, TransformersSpec
from hybridflow.models.spec import ModelSpec
from hybridflow.placement import GIB
from hybridflow.planner.cost.backends import Backend
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.device_memory import DeviceMemory
from hybridflow.planner.describe.cluster_spec import ClusterSpec, DeviceSpec, NodeSpec
from hybridflow.planner.describe.graph import Graph, keeps_average
from hybridflow.planner.describe.mesh import CallPlan, Mesh
from hybridflow.planner.describe.workload import Workload
from hybridflow.topology import RankGrid

_DTYPES: dict[DType, float] = {"bfloat16": 1.0, "float16": 1.0, "float32": 1.0}


@dataclass(frozen=True)
class PlacedGroup:
    """A group's settings (`optim`, `generate`, `offload`), its `backend`, and what it keeps on its fullest device."""

    name: str
    settings: Mapping[str, Any]
    backend: Backend
    still: DeviceMemory

    @classmethod
    def of(cls, name: str, model: Decoder, settings: Mapping[str, Any], grid: RankGrid) -> PlacedGroup | None:
        """None for models, strategies and sizes that the planner does not know."""
        if not isinstance(model, ModelSpec | TransformersSpec):
            return None
        node = NodeSpec(DeviceSpec("device", 1.0, _DTYPES, 1.0), grid.size, 1.0)
        trained = frozenset() if settings.get("optim") is None else frozenset((name,))
        averaged = frozenset((name,)) if keeps_average(settings) else frozenset[str]()
        graph = Graph((), (), {name: model}, trained, {name: settings["train"]}, averaged)
        try:
            costs = Costs(ClusterSpec((node,), 1.0), graph, Workload(rows=1, prompt=1, response=1))
            backend = costs.backends[name]
            parallel = backend.parallel(grid.p, grid.t, grid.d, 1, grid.ep)
            plan = None if parallel is None else CallPlan(Mesh.of(0, grid.size), parallel)
            return plan and cls(name, settings, backend, costs.still(name, plan))
        except (ConfigError, ModelError):
            return None

    @property
    def phases(self) -> list[str]:
        """What its calls do on the device."""
        updates = "computes" if self.settings.get("optim") is None else "updates"
        return [updates, *(["generates"] if isinstance(self.settings.get("generate"), VLLM) else [])]

    def resident(self, phase: str, device: float) -> dict[str, float]:
        """Bytes by kind on a device of `device` bytes in one of its `phases`, or between its calls ("")."""
        offload: Any = self.settings.get("offload", False)
        generate: VLLM | None = self.settings.get("generate")
        if offload is True and not phase:
            return {}
        still, known = self.still, not isinstance(self.settings.get("optim"), SGD)  # SGD's state is less than Adam's
        found = {"weights": still.parameters, "gradients": still.gradients, "optimizer": still.optimizer * known}
        found["average"] = still.average
        if self.backend.sharded and phase != "updates":
            found["gradients"] = 0.0  # every step frees them
        if phase == "generates" and generate is not None:
            # the transition frees what it can restore; sharded weights stay where generation's are narrower
            if not self.backend.sharded or generate.dtype == "float32":
                found["weights"] = 0.0
            found |= dict.fromkeys(() if offload is True else offload or (), 0.0)
            found[f"VLLM(memory_fraction={generate.memory_fraction:g})"] = generate.memory_fraction * device
        return {kind: size for kind, size in found.items() if size}


def check_resident(groups: Sequence[PlacedGroup], device: float, leaving: PlacedGroup | None = None) -> str:
    """Why the groups, all on one device of `device` bytes, do not fit, and what to change; "" where they may.

    `leaving` is a group of that name in its old layout, which it has until its state has moved."""
    phases = {
        f"{group.name} {phase}": {one.name: one.resident(phase * (one is group), device) for one in groups}
        for group in groups
        for phase in group.phases
    }
    if leaving is not None:
        moves = {one.name: one.resident("moves" * (one.name == leaving.name), device) for one in groups}
        moves[f"{leaving.name} in its old layout"] = leaving.resident("moves", device)
        phases[f"{leaving.name} moves"] = moves
    sums = {phase: sum(sum(own.values()) for own in found.values()) for phase, found in phases.items()}
    phase = max(sums, key=lambda phase: sums[phase], default="")
    total, most = sums.get(phase, 0.0), phases.get(phase, {})
    if total <= device:
        return ""
    parts = [f"{name} {kind} {size / GIB:.1f} GiB" for name, own in most.items() for kind, size in own.items()]
    shares = [group.settings["generate"].memory_fraction for group in groups if phase == f"{group.name} generates"]
    shares = [share for one in shares if (share := one + 1 - total / device) > 0]
    fits = [f"VLLM(memory_fraction={int(100 * share) / 100:g})" for share in shares]
    cures = [*fits, "offload= of these groups", "larger tp or pp, FSDP() or ZeRO(stage=3)", "more devices"]
    return (
        f"while {phase}, a device of {device / GIB:.1f} GiB would have {total / GIB:.1f} GiB, activations not counted: "
        f"{', '.join(parts)}. Change one of: {'; '.join(cures)}."
    )
