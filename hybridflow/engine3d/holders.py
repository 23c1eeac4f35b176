"""Holders of weights: what a training and a generation engine have to offer to a transition between them.

`engines.contract` asks for more; this is the part that moving weights needs, so that `engine3d` knows no engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.residency import Memory
from hybridflow.topology import RankGrid


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
