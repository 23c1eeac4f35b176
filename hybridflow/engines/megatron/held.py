"""HeldMemory: parameters, gradients and optimizer state of one rank, in device memory or in host memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

from hybridflow.engine3d.residency import Residency
from hybridflow.engines.contract import Held
from hybridflow.engines.megatron.buckets import Buckets
from hybridflow.engines.megatron.optimizer_state import OptimizerState
from hybridflow.errors import ConfigError, nearest


class HeldMemory:
    """Moves what an engine holds; without an optimizer that is only the parameters."""

    def __init__(self, role: str, parameters: Residency, buckets: Buckets | None, state: OptimizerState | None) -> None:
        self.role, self.parameters, self.buckets, self.state = role, parameters, buckets, state

    def offload(self, what: Collection[Held], zero_gradients: bool) -> None:
        """To host memory. Gradients that are zero are not copied. Errors: ConfigError for an unknown name."""
        self._check(what)
        if "parameters" in what:
            self.parameters.offload()
        if "optimizer" in what and self.state:
            self.state.offload()
        if "gradients" in what and self.buckets:
            gradients = self.buckets.gradients
            gradients.release() if zero_gradients else gradients.offload()

    def reload(self, what: Collection[Held], zero_gradients: bool) -> None:
        """Back to device memory; what is there is left alone. Errors: ConfigError for an unknown name."""
        self._check(what)
        if "parameters" in what:
            self.parameters.acquire()
        if "optimizer" in what and self.state:
            self.state.reload()
        if "gradients" in what and self.buckets and not _resident(self.buckets.gradients):
            self.buckets.gradients.acquire()
            if zero_gradients:
                self.buckets.zero()

    def require(self, *what: Held) -> None:
        """Errors: ConfigError when something that is needed is not in device memory."""
        held = {
            "parameters": _resident(self.parameters),
            "gradients": self.buckets is None or _resident(self.buckets.gradients),
            "optimizer": self.state is None or self.state.resident,
        }
        if missing := [name for name in what if not held[name]]:
            raise ConfigError(
                f"{self.role} was asked to work while its {' and '.join(missing)} are not in device memory. Bring back "
                f"what was offloaded with reload({missing}); fill parameters that were released, or restore() them."
            )

    def _check(self, what: Collection[str]) -> None:
        names = get_args(Held)
        if wrong := [name for name in what if name not in names]:
            raise ConfigError(f"{self.role} holds no {wrong[0]!r}.{nearest(wrong[0], names)}")


def _resident(memory: Residency) -> bool:
    return memory.resident_bytes == memory.total_bytes
