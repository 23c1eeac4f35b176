"""NodeProbes: a process on every machine of a Ray cluster, for what can only be seen there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray._private.state as state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.cluster.connection import connect


@dataclass(frozen=True)
class Machine:
    """A machine that Ray counts as alive."""

    name: str
    address: str
    devices: Mapping[str, tuple[int, int]]
    """Free ones and all, of each kind: "GPU", "CPU"."""


@dataclass(frozen=True)
class Unanswered:
    """What came in place of a probe's answer."""

    why: str


class NodeProbes:
    """Probes of the class `kind` on all machines of the cluster at `address`; they end, and this process leaves the
    cluster, with the `with` block. Errors of `connect`."""

    def __init__(self, address: str, kind: type, seconds: float = 60.0) -> None:
        self._address, self._kind, self._seconds = address, kind, seconds
        self._probes: list[Any] = []
        self.machines: list[Machine] = []

    def __enter__(self) -> NodeProbes:
        connect("doctor", self._address, None)
        free = state.available_resources_per_node()
        for node in sorted((one for one in ray.nodes() if one["Alive"]), key=lambda one: one["NodeManagerAddress"]):
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            self._probes.append(ray.remote(self._kind).options(num_cpus=0, scheduling_strategy=here).remote())
            left, there = free.get(node["NodeID"], {}), node["Resources"]
            devices = {kind: (int(left.get(kind, 0)), int(there[kind])) for kind in ("GPU", "CPU") if kind in there}
            self.machines.append(Machine(node["NodeManagerHostname"], node["NodeManagerAddress"], devices))
        return self

    def __exit__(self, *exc: object) -> None:
        ray.shutdown()

    def ask(self, method: str, *given: Any, each: str = "") -> list[Any]:
        """What `method` returns on each machine, or Unanswered. `each` names a field of the Machine that stands before
        the arguments."""
        own = [(getattr(machine, each),) if each else () for machine in self.machines]
        asked = [getattr(probe, method).remote(*before, *given) for probe, before in zip(self._probes, own)]
        ready = set(ray.wait(asked, num_returns=len(asked), timeout=self._seconds)[0])
        return [
            self._answer(one) if one in ready else Unanswered(f"no answer within {self._seconds:g} s") for one in asked
        ]

    @staticmethod
    def _answer(ready: Any) -> Any:
        try:
            return ray.get(ready)
        except Exception as error:  # whatever keeps a probe from running there is what was asked for
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            return Unanswered(f"{type(error).__name__}: {said[-1] if said else 'no reason'}")
