"""TrainStates: parameters, gradients and optimizer state of one rank, in device memory or in host memory; a model whose
parameters are still being copied in computes each layer once its own are there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.agreement import Operations
from hybridflow.engines.contract import TrainState
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.shard_optimizer import ShardOptimizer
from hybridflow.engines.units import LAYER
from hybridflow.errors import ConfigError


class TrainStates:
    """What a `TrainEngine` holds, and where it is. `_gradients` are "own" until they are added up over ranks, and
    "lost" when a call has failed to which others of the same step belong. `_by_layer`: layers wait for parameters that
    come back."""

    context: RankContext
    _operations: Operations
    _shards: Any = None
    _optimizer: ShardOptimizer | None = None
    _by_layer = False
    _written: object = None
    _gradients: Literal["zero", "own", "summed", "lost"] = "zero"

    def memory(self) -> Residency:
        """The memory behind `storage()`, at least every decoder layer on its own. While names are released the engine
        does not compute. `acquire` leaves elements in boxes of `layout()` undefined and restores all others (padding).
        """
        self._arrive()
        return self._shards.memory

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of each `TrainState` now in device memory."""
        return {name: one.resident_bytes for name, one in self._owners().items()}

    def offload(self, what: Collection[TrainState]) -> None:
        """Move these to host memory, or none when it fails; the engine does not compute until they are back."""
        self._move(what, away=True)

    def reload(self, what: Collection[TrainState]) -> None:
        """Begin to bring offloaded state back, or none when it fails; other state is left alone. Of released state,
        parameters are undefined, the rest is zero. A layer computes once its parameters are there, and other methods
        wait for what they use."""
        self._move(what, away=False)

    def away_bytes(self, what: Collection[TrainState]) -> int:
        """What `reload` would allocate."""
        memories = (getattr(one, "memory", one) for name, one in self._owners().items() if name in what)
        return sum(memory.total_bytes - memory.resident_bytes for memory in memories)

    def copied_bytes(self) -> tuple[int, int]:
        """Bytes of parameters, gradients and optimizer state that were copied from and to host memory so far."""
        images = [one.images for one in self._owners().values()]
        return sum(image.copied_in for image in images), sum(image.copied_out for image in images)

    def image_bytes(self) -> int:
        """Bytes of the images of parameters, gradients and optimizer state in host memory."""
        return sum(one.images.nbytes for one in self._owners().values())

    def _owners(self) -> dict[str, Any]:
        """What each `TrainState` lies in: memory, or gradients that have some."""
        trained = self._optimizer
        state = {} if trained is None else {"gradients": self._shards.gradients, "optimizer": trained.memory}
        return {"parameters": self._shards.memory, **state}

    def _memories(self) -> list[Residency]:
        return [self._shards.memory, *([self._optimizer.memory] if self._optimizer else [])]

    def _arrive(self) -> None:
        """What is done on this device from here on comes after the copies of reloaded state."""
        for memory in self._memories():
            memory.arrive()

    def _move(self, what: Collection[TrainState], away: bool) -> None:
        self._operations.check()
        absent = [name for name in self._shards.storage if not self._shards.memory.resident(name)]
        moved = list[TrainState]()
        states = self._resident()
        try:
            # parameters leave last and come first, as they are used: their memory moves as a whole or not
            for name in states if away else reversed(states):
                if name in what and (states[name] == away or name == "parameters"):
                    self._move_one(name, away)
                    moved.append(name)
        except Exception:
            for name in moved:
                self._move_one(name, not away, absent)
            raise

    def _move_one(self, name: TrainState, away: bool, parameters: Sequence[str] | None = None) -> None:
        """`parameters`: those to move, by default all."""
        zero = self._gradients in ("zero", "lost")
        if name == "parameters":
            memory = self._shards.memory
            if away and not self._by_layer:
                wait_by_layer(self._shards.model, memory, self._shards.waited)
                self._by_layer = True
            memory.offload(parameters) if away else memory.fetch(parameters)
        elif name == "optimizer":
            self._training().offload() if away else self._training().reload()
        else:
            gradients = self._shards.gradients
            gradients.offload(zero) if away else gradients.reload(zero)

    def _resident(self) -> dict[TrainState, bool]:
        memory, trained = self._shards.memory, self._optimizer
        state = {} if trained is None else {"optimizer": trained.resident, "gradients": self._shards.gradients.resident}
        return {**state, "parameters": memory.resident_bytes == memory.total_bytes}  # pyright: ignore[reportReturnType]

    def release(self) -> None:
        """Free the memory of all state and drop its content; `reload` allocates it again."""
        self._written = object()
        self._shards.memory.release()
        if self._optimizer:
            self._optimizer.release()
            self._gradients = "zero"
            self._shards.gradients.offload(True)

    def _require(self, *what: TrainState, by_layer: bool = False) -> None:
        """Later work on this device finds these in its memory; `by_layer`: each layer waits for its own parameters.
        Errors: ConfigError when one is not there, or `what` has gradients that are lost."""
        self._operations.check()
        if "gradients" in what and self._gradients == "lost":
            raise ConfigError(
                f"{self.context.role} has lost the gradients of this step in a call that failed. Call zero_grad(), and "
                f"compute the step again from its first mini-batch."
            )
        held = self._resident()
        if missing := [name for name in what if not held.get(name, True)]:
            raise ConfigError(
                f"{self.context.role} was asked to work while its {' and '.join(missing)} are not in device memory. "
                f"Bring back what was offloaded with reload({missing}); fill parameters that were released, or "
                f"restore() them."
            )
        if not by_layer:
            self._arrive()

    def _training(self) -> ShardOptimizer:
        if self._optimizer is None:
            raise ConfigError(f"{self.context.role} was built without an optimizer: it cannot train. Give optim=.")
        return self._optimizer


def wait_by_layer(model: nn.Module, memory: Residency, waited: Callable[[nn.Module, Any], None]) -> None:
    """From now on parameters in `memory` come in the order in which `model` uses them: those outside of layers, for
    which the model itself waits, then layer after layer, each of which waits before it computes, on its device's
    stream. `waited(module, mark)` is called where there was something to wait for.
    """

    def wait(names: set[str], module: nn.Module, *_: Any) -> None:
        if (mark := memory.arrive(names)) is not None:
            waited(module, mark)

    paths = {path: LAYER.match(f"{path}.") for path, _ in model.named_modules()}
    layers = [path for path, found in paths.items() if found is not None and found.end() == len(path) + 1]
    if isinstance(model, FSDPModule):  # which gathers with itself what is no unit of its own, such as image encoders
        layers = [path for path in layers if isinstance(model.get_submodule(path), FSDPModule)]
    named, left = list[str](), memory.names
    hooks: list[tuple[nn.Module, set[str]]] = []
    for layer in map(model.get_submodule, layers):
        own = memory.names_of(map(local_tensor, layer.parameters())) & left
        named, left = [*named, *sorted(own)], left - own
        hooks.append((layer, own))
    memory.sort([*sorted(left), *named])
    for module, names in [(model, left), *hooks]:
        if names:  # first: FSDP gathers a layer's parameters before it computes, too
            module.register_forward_pre_hook(partial(wait, names), prepend=True)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached, sharing its memory."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
