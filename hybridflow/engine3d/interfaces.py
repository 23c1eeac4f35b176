"""Interfaces of weight holders: the part of a training and a generation engine that a transition uses.

The engines' contracts extend these protocols, so `engine3d` imports no engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.offloadable import Memory
from hybridflow.topology import RankGrid


class Holder(Protocol):
    """Holds one rank's part of a model's weights."""

    def layout(self) -> Layout:
        """Boxes of every rank of the group."""
        ...

    def storage(self) -> Mapping[str, Tensor]:
        """This rank's weights by the names that `layout().regions(rank)` uses; the same memory on every call."""
        ...

    def memory(self) -> Memory:
        """The memory behind `storage()`; while names are released the holder does not compute."""
        ...


class Trainer(Holder, Protocol):
    """A holder whose weights are trained. `step_result` is what an optimizer step returned last."""

    grid: RankGrid

    @property
    def restorable(self) -> bool:
        """Whether the optimizer has float32 main parameters apart from the parameters, which `restore` reads."""
        ...

    @property
    def step_result(self) -> dict[str, float]: ...

    def restore(self) -> None:
        """Parameters := main parameters, all of them resident again. Collective over the data parallel ranks. Errors:
        ConfigError when the trainer is not `restorable`."""
        ...

    def step_groups(self) -> Sequence[frozenset[str]]:
        """Canonical tensors that each part of a step updates, disjoint, all of them, the same on every rank.

        Every pipeline stage steps its k-th decoder layer in the same part, so that all stages are busy in all parts."""
        ...

    def step_parts(self) -> Iterator[int]:
        """An optimizer step part by part, bitwise equal to the step as a whole (PUZZLE, section 5.2).

        The gradient norm of all ranks and clipping come first. k is yielded when the parameters of `step_groups()[k]`
        are final on this rank, gathered from its data parallel ranks; every rank must continue at the same pace. A
        skipped step yields every part too. When exhausted, gradients are zero and `step_result` is set; an iterator
        that is dropped half-way leaves the step unfinished."""
        ...

    def offload(self, what: Collection[Any]) -> None:
        """Move parameters, optimizer or gradients to host memory. The trainer cannot compute without them."""
        ...

    def reload(self, what: Collection[Any]) -> None:
        """Bring offloaded state back; other state is left alone."""
        ...


class Generator(Holder, Protocol):
    """A holder that generates."""

    def share(self, name: str, tensor: Tensor) -> bool:
        """Make weight `name` use the memory of `tensor` (of equal shape, dtype, device): False where impossible.

        `memory()` has to be requested again afterwards; it leaves `name` alone."""
        ...

    def weights_changed(self, version: int | None = None) -> None:
        """Drop caches of the old weights (prefix cache). `version`: of the new ones, by default the next number."""
        ...

    def sleep(self) -> None:
        """Release the KV cache, and with it generation, until `wake()`. May be called twice."""
        ...

    def wake(self) -> None:
        """Allocate the KV cache again."""
        ...
