"""Shards: what an engine on transformers' model needs of the way in which the model is cut over ranks.

`fsdp.sharded.Sharded` is one way, `zero.partition` another. `Steps` do the rest: see `shard_optimizer`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from torch import Tensor

from hybridflow.engine3d.residency import Residency
from hybridflow.engines.held import HeldGradients


class ShardGradients(HeldGradients, Protocol):
    """This rank's gradients."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By canonical name, of the parameters that have any now; views."""
        ...

    def drop(self) -> None:
        """They are zero from here on."""
        ...


class Shards(Protocol):
    """One rank's part of a model whose gradients are sums over data parallel ranks.

    `model` computes. `storage` are this rank's parameters by canonical name, `memory` what is behind them. `main` are
    the float32 tensors that the optimizer steps here, by the names of the optimizer's layout; `separate` says that
    they are copies of 16-bit parameters.
    """

    model: Any
    storage: Mapping[str, Tensor]
    memory: Residency
    gradients: ShardGradients
    main: Mapping[str, Tensor]
    separate: bool

    def before_backward(self, last: bool) -> None:
        """The next micro-batch is computed with gradients; `last`: it is the last of its mini-batch."""
        ...

    def after_pass(self) -> None:
        """The micro-batches of a pass are done, with gradients or without."""
        ...

    def reduce(self) -> None:
        """Complete the gradients, once before each step. Collective."""
        ...

    def main_gradients(self) -> Mapping[str, Tensor]:
        """Reduced gradients by the names of `main`, float32; none for those that have no gradient."""
        ...

    def square_sum(self) -> Tensor:
        """float64, the same on all ranks: of all reduced gradients, each counted once. Collective."""
        ...

    def updated(self, names: Collection[str]) -> None:
        """`main` of these canonical tensors was updated on the ranks that have it: make the parameters follow.

        Collective over the data parallel ranks, which name the same tensors.
        """
        ...

    def parameters_changed(self) -> None:
        """Parameters were written from outside: `main` follows them."""
        ...

    def close(self) -> None:
        """Free all memory, whoever still refers to it."""
        ...
