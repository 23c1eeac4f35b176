"""HeldMemory: parameters, gradients and optimizer state of one rank, in device memory or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol, get_args

from hybridflow.engine3d.residency import Memory, Residency
from hybridflow.engines.contract import Held
from hybridflow.errors import ConfigError, nearest


class HeldGradients(Protocol):
    """Gradients whose memory can go; `zero` ones are not copied."""

    @property
    def resident(self) -> bool: ...

    def offload(self, zero: bool) -> None: ...

    def reload(self, zero: bool) -> None: ...


class HeldState(Protocol):
    """Optimizer state whose memory can go."""

    @property
    def resident(self) -> bool: ...

    def offload(self) -> None: ...

    def reload(self) -> None: ...


class GradientBuffers:
    """Gradients that have buffers for good, `memory`, which `clear` sets to zero."""

    def __init__(self, memory: Residency, clear: Callable[[], None]) -> None:
        self.memory, self.clear = memory, clear

    @property
    def resident(self) -> bool:
        return _resident(self.memory)

    def offload(self, zero: bool) -> None:
        self.memory.release() if zero else self.memory.offload()

    def reload(self, zero: bool) -> None:
        if not self.resident:
            self.memory.acquire()
            if zero:
                self.clear()


class HeldMemory:
    """Moves what an engine holds; without an optimizer that is only the parameters."""

    def __init__(self, role: str, parameters: Memory, gradients: HeldGradients | None, state: HeldState | None) -> None:
        self.role, self.parameters, self.gradients, self.state = role, parameters, gradients, state

    def offload(self, what: Collection[Held], zero_gradients: bool) -> None:
        """To host memory. Gradients that are zero are not copied. Errors: ConfigError for an unknown name."""
        self._check(what)
        if "parameters" in what:
            self.parameters.offload()
        if "optimizer" in what and self.state:
            self.state.offload()
        if "gradients" in what and self.gradients:
            self.gradients.offload(zero_gradients)

    def reload(self, what: Collection[Held], zero_gradients: bool) -> None:
        """Back to device memory; what is there is left alone. Errors: ConfigError for an unknown name."""
        self._check(what)
        if "parameters" in what:
            self.parameters.acquire()
        if "optimizer" in what and self.state:
            self.state.reload()
        if "gradients" in what and self.gradients:
            self.gradients.reload(zero_gradients)

    def require(self, *what: Held) -> None:
        """Errors: ConfigError when something that is needed is not in device memory."""
        held = {
            "parameters": _resident(self.parameters),
            "gradients": self.gradients is None or self.gradients.resident,
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


def _resident(memory: Memory) -> bool:
    return memory.resident_bytes == memory.total_bytes
