"""Holders of weights: what a training and a generation engine have to offer to a transition between them.

`engines.contract` asks for more; this is the part that moving weights needs, so that `engine3d` knows no engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.topology import RankGrid


class Memory(Protocol):
    """The memory of named tensors, as `Residency` manages it."""

    @property
    def resident_bytes(self) -> int: ...

    def resident(self, name: str) -> bool: ...

    def acquire(self, names: Iterable[str] | None = None) -> object: ...

    def release(self, names: Iterable[str] | None = None) -> None: ...

    def offload(self, names: Iterable[str] | None = None) -> None: ...


class Holder(Protocol):
    """Something that holds one rank's part of a model's weights."""

    def layout(self) -> Layout: ...

    def storage(self) -> Mapping[str, Tensor]: ...

    def memory(self) -> Memory: ...


class Trainer(Holder, Protocol):
    """A holder whose weights are trained: `engines.contract.TrainEngine`."""

    grid: RankGrid

    @property
    def restorable(self) -> bool: ...

    @property
    def step_result(self) -> dict[str, float]: ...

    def restore(self) -> None: ...

    def step_groups(self) -> Sequence[frozenset[str]]: ...

    def step_parts(self) -> Iterator[int]: ...

    def offload(self, what: Collection[Any]) -> None: ...

    def reload(self, what: Collection[Any]) -> None: ...


class Generator(Holder, Protocol):
    """A holder that generates: `engines.contract.GenerateEngine`."""

    def share(self, name: str, tensor: Tensor) -> bool: ...

    def weights_changed(self) -> None: ...

    def sleep(self) -> object: ...

    def wake(self) -> None: ...
