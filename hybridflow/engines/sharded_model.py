"""ShardedModel: the interface of a training backend to `train_engine.TrainEngine`.

`fsdp.sharded.Sharded` or `flat_shards.FlatShards` (ZeRO, Megatron) shard a model; micro-batches run in a `PlainLoop` or
`megatron.engine.PipelineLoop`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.agreement import Replicas
from hybridflow.engines.lora.adapters import Adapters
from hybridflow.engines.micro_batches import MicroBatch
from hybridflow.engines.process_groups import RankContext, is_communication_error
from hybridflow.engines.router_replay import Replays
from hybridflow.engines.token_outputs import TokenOutputs

T = TypeVar("T")
Read = Callable[[MicroBatch, Tensor], Any]
"""What is computed of a micro-batch and its head, [N or more, C]."""
Failed = Callable[[Exception], None]
"""Is given the error of a computation without which a pass can continue."""


def compute_dtype(strategy: Any, device: torch.device) -> torch.dtype:
    """The dtype that a training strategy computes in on this device."""
    return getattr(torch, strategy.dtype or ("bfloat16" if device.type == "cuda" else "float32"))


class Shards(Protocol):
    """One rank's part of a model whose gradients are sums over data parallel ranks.

    `storage` are this rank's parameters by the names of its layout, `memory` the memory behind them. With `adapters`,
    which stay on the device, only these and a value head are trained. `main` are the float32 tensors that the optimizer
    steps here, by the names of the optimizer's layout; `separate`: they are copies of 16-bit parameters (the same on
    all ranks, also where `main` is empty).

    `gradients` has `tensors` (float32, by the names of `storage`, of the parameters that have any now; may be
    collective), `drop()` to set them to zero, and `memory`, `images`, `resident`, `resident_bytes`, `offload(zero)`,
    `reload(zero)` for their memory: what is `zero` is not copied.
    """

    model: Any
    storage: Mapping[str, Tensor]
    adapters: Mapping[str, Tensor]
    memory: Residency
    gradients: Any
    main: Mapping[str, Tensor]
    separate: bool
    lockstep: bool
    """Whether ranks compute a micro-batch together, in collectives of the model."""

    def reset(self) -> None:
        """Nothing is under way any more after a pass that has failed, of which all ranks have begun equally many
        collectives. Gradients are left alone."""
        ...

    def before_backward(self, last: bool) -> None:
        """The next micro-batch of a `PlainLoop` is computed with gradients; `last`: the last of its mini-batch."""
        ...

    def after_pass(self) -> None:
        """Called after the micro-batches of a pass, with gradients or without."""
        ...

    def waited(self, layer: Any, mark: Any) -> None:
        """The device's stream has waited for `mark`, behind which parameters of `layer` are there: others that read
        them wait, too."""
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
        """`main` of these tensors was updated on the ranks that have it: copy it to the parameters.

        Collective over the data parallel ranks, which name the same tensors.
        """
        ...

    def parameters_changed(self) -> None:
        """Parameters were written from outside: copy them to `main`."""
        ...

    def close(self) -> None:
        """Free all memory, also of tensors that others still refer to."""
        ...


class MicroBatchLoop(Protocol):
    """Runs micro-batches through this rank's part of a model. `last_stage`: the head is on this rank.

    A loop that can continue without a failed computation gives its error to `failed`, and its peers what they wait for;
    others raise, and with `lockstep` their peers may be inside a collective then. With `replays` tokens go to the
    experts of `MicroBatch.routing`.
    """

    last_stage: bool
    lockstep: bool
    replays: Replays | None

    def infer(self, micro_batches: Sequence[MicroBatch], read: Read, failed: Failed, hidden: bool = False) -> list[Any]:
        """`read(micro-batch, head [N or more, C])` of each, without gradients; on the last stage.

        With `hidden` it reads the hidden states [N or more, H] that the output layer takes, and that is not computed.
        """
        ...

    def train(self, micro_batches: Sequence[MicroBatch], loss: Read, failed: Failed) -> None:
        """Add the gradients of `loss(micro-batch, head [N or more, C])` of each, called on the last stage."""
        ...


@dataclass(frozen=True)
class ShardedModel:
    """One rank of a sharded model. `optimizer_layout` is None without an optimizer.

    `step_groups` are the canonical tensors of each part of an optimizer step, `parts` the same as names of
    `shards.storage`; `no_decay` are those names that weight decay leaves out. `fp16`: losses are scaled. `replays` are
    the routers of a mixture of experts, for `loop.replays`.
    """

    shards: Shards
    loop: MicroBatchLoop
    tokens: TokenOutputs
    layout: Layout
    optimizer_layout: Layout | None
    step_groups: list[frozenset[str]]
    parts: Sequence[frozenset[str]]
    no_decay: Collection[str]
    fp16: bool
    replays: Callable[[], Replays]
    adapters: Adapters | None = None


class PlainLoop:
    """Micro-batch after micro-batch. Every rank runs equally many, because gathering a layer needs all of them.

    Without `lockstep` a rank whose computation fails leaves out the rest, and sends the gradients that its peers wait
    for; in lockstep only what is computed from the head may fail, where all columns of it are on this rank.
    """

    last_stage = True
    replays: Replays | None = None

    def __init__(self, context: RankContext, shards: Shards, empty: Callable[[], MicroBatch]) -> None:
        self._shards, self._replicas, self._empty, self._device = shards, Replicas(context), empty, context.device
        self.lockstep, self._cut = shards.lockstep, context.grid.t > 1

    @torch.no_grad()
    def infer(self, micro_batches: Sequence[MicroBatch], read: Read, failed: Failed, hidden: bool = False) -> list[Any]:
        self._shards.model.eval()

        def compute(micro: MicroBatch) -> Any:  # one head at a time
            moved = micro.to(self._device)
            return self._attempt(failed, not self._cut, partial(read, moved, self._head(moved, hidden)))

        found = [compute(micro) for micro in self._padded(micro_batches)]
        self._shards.after_pass()
        return found[: len(micro_batches)]

    def train(self, micro_batches: Sequence[MicroBatch], loss: Read, failed: Failed) -> None:
        self._shards.model.train()
        if self.replays is not None:
            self.replays.clear()
        everything, good = self._padded(micro_batches), True

        def compute(micro: MicroBatch) -> bool:
            moved = micro.to(self._device)
            head_NC = self._head(moved)
            scalar = self._attempt(failed, not self._cut, partial(loss, moved, head_NC))
            root = head_NC.flatten()[:0].sum() if scalar is None else scalar
            del head_NC  # its memory is free once the backward pass is behind it
            root.backward()
            return scalar is not None

        for left, micro in zip(reversed(range(len(everything))), everything, strict=True):
            self._shards.before_backward(last=not left)
            if good or self.lockstep:
                good = self._attempt(failed, not self.lockstep, partial(compute, micro)) or False
        self._shards.after_pass()

    def _attempt(self, failed: Failed, continues: bool, compute: Callable[[], T]) -> T | None:
        """The result of a computation; None after an error without which the pass continues."""
        try:
            return compute()
        except Exception as error:
            if not continues or is_communication_error(error):
                raise
            failed(error)
            return None

    def _padded(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """With empty ones at the end: as many as the replica with the most has."""
        return [*micro_batches, *[self._empty()] * (self._replicas.most(len(micro_batches)) - len(micro_batches))]

    def _head(self, micro: MicroBatch, hidden: bool = False) -> Tensor:
        """The output of the head at the positions of a micro-batch, [N or 1, C], or its input."""
        if self.replays is not None:
            self.replays.set(None if micro.routing is None else micro.routing.flatten(0, 1))
        given = micro.ids, micro.index, micro.positions, micro.sequences, hidden, micro.images
        return self._shards.model(*given).flatten(0, -2)
