"""OffloadManager: parameters, gradients and optimizer state of one rank, in device memory or in host memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, get_args

from hybridflow.engine3d.offloadable import Memory, Residency
from hybridflow.engines.contract import TrainState
from hybridflow.errors import ConfigError, nearest


class OffloadableGradients(Protocol):
    """Gradients whose memory can go; `zero` ones are not copied."""

    @property
    def resident(self) -> bool: ...

    def offload(self, zero: bool) -> None: ...

    def reload(self, zero: bool) -> None: ...


class OffloadableState(Protocol):
    """Optimizer state whose memory can go."""

    @property
    def resident(self) -> bool: ...

    def offload(self) -> None: ...

    def reload(self) -> None: ...


class GradientBuffers:
    """Gradients that live in permanent buffers, whose memory is `memory`; a subclass says how they become zero."""

    def __init__(self, memory: Residency) -> None:
        self.memory = memory

    @property
    def resident(self) -> bool:
        return _resident(self.memory)

    def drop(self) -> None:
        """Set them to zero."""
        raise NotImplementedError

    def offload(self, zero: bool) -> None:
        self.memory.release() if zero else self.memory.offload()

    def reload(self, zero: bool) -> None:
        if not self.resident:
            self.memory.acquire()
            if zero:
                self.drop()


class OffloadManager:
    """Moves the memory of an engine; without an optimizer that is only the parameters."""

    def __init__(
        self, role: str, parameters: Memory, gradients: OffloadableGradients | None, state: OffloadableState | None
    ) -> None:
        self.role, self.parameters, self.gradients, self.state = role, parameters, gradients, state

    def offload(self, what: Collection[TrainState], zero_gradients: bool) -> None:
        """To host memory. Gradients that are zero are not copied. Errors: ConfigError for an unknown name."""
        self._check(what)
        if "parameters" in what:
            self.parameters.offload()
        if "optimizer" in what and self.state:
            self.state.offload()
        if "gradients" in what and self.gradients:
            self.gradients.offload(zero_gradients)

    def reload(self, what: Collection[TrainState], zero_gradients: bool) -> None:
        """Back to device memory; what is there is left alone. Errors: ConfigError for an unknown name."""
        self._check(what)
        if "parameters" in what:
            self.parameters.acquire()
        if "optimizer" in what and self.state:
            self.state.reload()
        if "gradients" in what and self.gradients:
            self.gradients.reload(zero_gradients)

    def require(self, *what: TrainState) -> None:
        """Errors: ConfigError when one of these is not in device memory."""
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
        names = get_args(TrainState)
        if wrong := [name for name in what if name not in names]:
            raise ConfigError(f"{self.role} holds no {wrong[0]!r}.{nearest(wrong[0], names)}")


def _resident(memory: Memory) -> bool:
    return memory.resident_bytes == memory.total_bytes
