"""What a call costs: seconds by cause, and bytes on each device by use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

# The causes of time, and how an explanation names them.
LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "compute": "arithmetic of the devices",
        "memory": "reading weights from device memory",
        "prefill": "reading the prompts (arithmetic)",
        "decode": "reading weights and KV cache for every token (memory bandwidth)",
        "tensor_parallel": "tensor parallel all-reduces",
        "pipeline": "pipeline bubbles and messages between stages",
        "data_parallel": "messages of data parallel ranks: gradients and parameters",
        "optimizer": "the optimizer step (memory bandwidth)",
        "fixed": "fixed costs per launch, step and call",
    }
)
WAITS = ("tensor_parallel", "pipeline", "data_parallel")
"""Causes of time in which a device does nothing itself."""


@dataclass(frozen=True)
class CallCost:
    """`seconds` of one call of one iteration; `parts` are their causes and add up to them.

    `busy` is the share of them in which a device works; in the rest it waits for messages or for other stages.
    """

    seconds: float
    parts: Mapping[str, float]

    @classmethod
    def of(cls, **parts: float) -> CallCost:
        return cls(sum(parts.values()), MappingProxyType({name: value for name, value in parts.items() if value > 0}))

    @property
    def busy(self) -> float:
        waits = sum(self.parts.get(name, 0.0) for name in WAITS)
        return 1.0 - waits / self.seconds if self.seconds else 1.0

    @property
    def limit(self) -> str:
        """The cause that takes longest, as a phrase."""
        if not self.parts:
            return "nothing"
        name = max(self.parts, key=self.parts.__getitem__)
        share = self.parts[name] / self.seconds if self.seconds else 0.0
        return f"{LIMITS.get(name, name)} ({share:.0%})"

    def times(self, factor: float) -> CallCost:
        """Everything takes so many times as long."""
        if factor == 1.0:
            return self
        parts = {name: value * factor for name, value in self.parts.items()}
        return CallCost(self.seconds * factor, MappingProxyType(parts))

    def __reduce__(self):
        return _cost, (self.seconds, dict(self.parts))


def _cost(seconds: float, parts: dict[str, float]) -> CallCost:
    return CallCost(seconds, MappingProxyType(parts))


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the fullest device. `static` stays between calls, `active` is there while the call runs."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    kv_cache: float = 0.0
    logits: float = 0.0
    weights: float = field(default=0.0)  # a second copy of the parameters, in the layout of a call that has its own
    gathered: float = 0.0  # parameters of other ranks, and gradients that are not theirs yet

    @cached_property
    def static(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @cached_property
    def active(self) -> float:
        return self.activations + self.kv_cache + self.logits + self.weights + self.gathered

    @property
    def total(self) -> float:
        return self.static + self.active
