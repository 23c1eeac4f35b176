"""ShardedEngine: one rank of a sharded model that computes and trains, for every training backend.

A backend supplies a `ShardedModel`: how parameters are cut and gradients reduced (`Shards`), how micro-batches run
(`MicroBatchLoop`), and the layouts of both. Losses are shares of a global sum, so gradients are added over
micro-batches and data parallel ranks and never averaged.

Shapes: B rows, R response tokens, N tokens of a micro-batch that are read, C columns of the head on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hybridflow import config
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.contract import LossFunction, Output, TrainState, Unset
from hybridflow.engines.lora.adapters import Adapters
from hybridflow.engines.micro_batches import MicroBatch, in_order
from hybridflow.engines.offload_manager import OffloadManager
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.replicas import Replicas
from hybridflow.engines.shard_optimizer import ShardOptimizer
from hybridflow.engines.sharded_model import ShardedModel
from hybridflow.engines.step_check import StepCheck
from hybridflow.engines.token_outputs import Positions
from hybridflow.engines.weights import initialise, load
from hybridflow.errors import ConfigError
from hybridflow.models.spec import Decoder

BuildModel = Callable[[RankContext, Any, Any, config.Optimizer | None], ShardedModel]


class ShardedEngine:
    """Fulfils `engines.contract.TrainEngine`. Without an optimizer it only computes and keeps no gradients.

    `build` makes the model of `strategy`, its weights undefined. `checkpoint` is a Hugging Face directory; without one,
    weights are drawn from a fixed seed, equal however the model is cut, and with `UNSET` they are left undefined. A
    value model whose checkpoint has no `score.weight` starts with zeros there. No rank ever holds more than its part.

    Errors: ModelError when the model cannot be cut by the strategy's sizes, CheckpointError for a bad checkpoint,
    ConfigError (with several ranks a WorkerError of that cause, on all of them) for `offload` without host memory.
    """

    _model: Any = None  # these are None before they are built and after `close`
    _shards: Any = None
    _offload: Any = None
    _optimizer: ShardOptimizer | None = None
    adapters: Adapters | None = None

    def __init__(
        self,
        build: BuildModel,
        context: RankContext,
        strategy: config.TrainStrategy,
        spec: Decoder,
        checkpoint: str | Path | Unset | None = None,
        optimizer: config.Optimizer | None = None,
    ) -> None:
        self.context, self.strategy, self.spec, self.grid = context, strategy, spec, context.grid
        self.device = context.device
        self._replicas, self._check = Replicas(context), StepCheck(context)
        self._gradients: Literal["zero", "own", "summed"] = "zero"  # "own": not yet added up over ranks
        try:
            model: ShardedModel = build(context, strategy, spec, optimizer)
            self._model, self._shards, self._tokens, self.adapters = model, model.shards, model.tokens, model.adapters
            self._layout, self._optimizer_layout = model.layout, model.optimizer_layout
            if optimizer:
                self._optimizer = ShardOptimizer(optimizer, model.shards, model.no_decay, model.parts, model.fp16)
            gradients = model.shards.gradients if optimizer else None
            self._offload = OffloadManager(context.role, model.shards.memory, gradients, self._optimizer)
            if checkpoint is None:
                initialise(self._layout, context.rank, self.storage(), spec.zeros)
            elif not isinstance(checkpoint, Unset):
                load(checkpoint, spec, self._layout, context.rank, self.storage())
            if self.adapters is not None:
                self.adapters.start()
            self.weights_loaded()
        except Exception:
            self.close()
            raise

    # Computing

    def check(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> None:
        """Raise, without any collective, what can be said against these rows. Errors: ModelError, BatchError."""
        self._tokens.check(batch, outputs, temperature)

    def forward(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> dict[str, Ragged] | None:
        """Without gradients: each output ragged [B, R] float32 on the CPU; None off the last stage.

        Errors: those of `check`.
        """
        self._tokens.check(batch, outputs, temperature)
        read = partial(self._tokens.read, names=outputs, temperature=temperature)
        micro_batches, flat = self._infer(batch, "before", read)
        if flat is None:
            return None
        return {name: in_order(micro_batches, [part[name].float() for part in flat]) for name in outputs}

    def score(self, batch: Batch, tokens: bool = False) -> Tensor | Ragged | None:
        """[B] float32 on the CPU: the value head at the last token; None off the last stage.

        With `tokens` ragged [B, R] float32: at each response token's own position.
        """
        self._tokens.check(batch, ("values",))
        micro_batches, parts = self._infer(
            batch, "own" if tokens else "last", lambda micro, rows: rows[: micro.selected, 0].float()
        )
        if parts is None:
            return None
        scores = in_order(micro_batches, parts)
        return scores if tokens else scores.values

    def _infer(
        self, batch: Batch, at: Positions, read: Callable[[MicroBatch, Tensor], Any]
    ) -> tuple[list[MicroBatch], list[Any] | None]:
        """The batch's micro-batches, and `read(micro-batch, rows)` of each; None off the last stage."""
        self._offload.require("parameters")
        micro_batches = self._tokens.micro_batches(batch, at)
        found = self._model.loop.infer(micro_batches, read)
        return micro_batches, found if self._model.loop.last_stage else None

    # Training

    def forward_backward(
        self, batch: Batch, loss: LossFunction, outputs: Sequence[Output], temperature: float = 1.0
    ) -> dict[str, float]:
        """Add the gradients of one mini-batch; metrics are summed over micro-batches and data parallel ranks.

        Several calls before a `step` add up. Gradients are reduced over ranks in `step` (or `gradients`). Metrics are
        returned on the last pipeline stage (equal on its ranks), {} on the others.

        A loss that raises does so after the last micro-batch, whose collectives need every rank: then all ranks raise
        and drop their gradients. An error in its backward pass is raised on one rank alone; its peers wait for their
        timeout. Errors: those of `check`; of `loss` (a WorkerError on more than one rank).
        """
        optimizer, last_stage = self._training(), self._model.loop.last_stage
        self._offload.require("parameters", "gradients")
        self._tokens.check(batch, outputs, temperature)
        micro_batches = self._tokens.micro_batches(batch)
        self._check.begin(batch, loss)
        totals = self._replicas.totals(batch) if last_stage else None
        metrics: list[dict[str, Tensor]] = []

        def share(micro: MicroBatch, head_NC: Tensor) -> Tensor:
            nothing = head_NC.flatten()[:0].sum().float()  # keeps the graph when no row or no token takes part
            values = self._tokens.read(micro, head_NC, outputs, temperature)
            if not len(micro.rows):
                return nothing
            rows = batch if len(micro_batches) == 1 else batch.reorder(micro.rows)
            ragged = {name: Ragged.from_lengths(value, micro.lengths) for name, value in values.items()}
            given = self._check.share(loss, ragged, rows.to(self.device), totals)  # type: ignore[arg-type]
            if given is None:
                return nothing
            metrics.append(given[1])
            return optimizer.scale_loss(given[0] + nothing)

        self._model.loop.train(micro_batches, share)
        try:
            self._check.agree()
        except Exception:
            optimizer.zero_grad()
            self._gradients = "zero"
            raise
        self._gradients = "own"
        return self._replicas.summed(metrics) if last_stage else {}

    def step(self) -> dict[str, float]:
        """Clip, update, zero the gradients: `grad_norm` (global, unclipped), `lr`, `skipped` (1.0: not finite)."""
        result = self._ready_to_step().step(self._check.take())
        self._gradients = "zero"
        return result

    def step_groups(self) -> list[frozenset[str]]:
        """Canonical tensors of each part of a step: the ends of the model, then the k-th layer of every stage."""
        return self._model.step_groups

    def step_parts(self) -> Iterator[int]:
        """`step` in parts: yields k when the parameters of `step_groups()[k]` are final; then see `step_result`."""
        yield from self._ready_to_step().step_parts(self._check.take())
        self._gradients = "zero"

    @property
    def step_result(self) -> dict[str, float]:
        return self._training().result

    @property
    def skip_reason(self) -> str:
        """Why the last step was skipped; "" when it was made."""
        return self._check.reason(self.step_result)

    def _ready_to_step(self) -> ShardOptimizer:
        optimizer = self._training()
        self._offload.require(*get_args(TrainState))
        self._reduce()
        return optimizer

    def gradients(self) -> Mapping[str, Tensor]:
        """This rank's gradients by the names of `storage()` (with LoRA of `adapters.storage`), float32, added up over
        data parallel ranks; valid until `step`. Collective. No `forward_backward` may follow before the step."""
        self._training()
        self._offload.require("gradients")
        self._reduce()
        found = self._shards.gradients.tensors
        trained = self.storage() if self.adapters is None else self.adapters.storage
        return {
            name: found[name] if name in found else torch.zeros_like(parameter, dtype=torch.float32)
            for name, parameter in trained.items()
        }

    def _reduce(self) -> None:
        if self._gradients == "own":
            self._shards.reduce()
            self._gradients = "summed"

    def _training(self) -> ShardOptimizer:
        if self._optimizer is None:
            raise ConfigError(f"{self.context.role} was built without an optimizer: it cannot train. Give optim=.")
        return self._optimizer

    # Weights

    def layout(self) -> Layout:
        return self._layout

    def storage(self) -> Mapping[str, Tensor]:
        """The parameters themselves: writing into them changes the model; then call `weights_loaded`."""
        return self._shards.storage

    def weights_loaded(self) -> None:
        """Parameters were written from outside: the optimizer's main parameters follow them."""
        self._shards.parameters_changed()

    @property
    def restorable(self) -> bool:
        """Whether float32 main parameters exist apart from the parameters."""
        return self._optimizer is not None and self._shards.separate

    def restore(self) -> None:
        """Parameters := main parameters, all of them resident again. Collective over the data parallel ranks.

        Errors: ConfigError where parameters are their own main parameters: nothing else has their values.
        """
        if not self.restorable:
            raise ConfigError(f"{self.context.role} has no main parameters apart from its parameters.")
        self.reload(("parameters", "optimizer"))
        self._training().restore()

    def optimizer_layout(self) -> Layout | None:
        """Boxes of every rank's optimizer state, alike for each kind of it; None without an optimizer."""
        return self._optimizer_layout

    def optimizer_storage(self) -> dict[str, Mapping[str, Tensor]]:
        """Kind of state -> float32 tensors by the names of `optimizer_layout()`; missing state is created."""
        self._offload.require("optimizer")
        return self._training().storage()

    def optimizer_counters(self) -> dict[str, Any]:
        """Steps made and the state of the loss scale, equal on all ranks."""
        return self._training().counters()

    def optimizer_moved(self, counters: Mapping[str, Any]) -> None:
        """`optimizer_storage()` was written from outside: take the counters, and the parameters from `main`."""
        optimizer = self._training()
        self._offload.require("parameters", "optimizer")
        optimizer.moved(counters)

    # Memory

    def memory(self) -> Residency:
        """The memory behind `storage()`."""
        return self._shards.memory

    def offload(self, what: Collection[TrainState]) -> None:
        """Move these to host memory; the engine does not compute until they are back."""
        self._offload.offload(what, self._gradients == "zero")

    def reload(self, what: Collection[TrainState]) -> None:
        """Bring back what was moved to host memory; the rest is left alone."""
        self._offload.reload(what, self._gradients == "zero")

    def close(self) -> None:
        """Free the model, gradients and optimizer; the process groups belong to the context. May be called twice.

        Memory is given back immediately, also of tensors of `storage()` that others still refer to: models form
        reference cycles, and the collector never visits objects that vLLM froze (`gc.freeze`).
        """
        if self._optimizer:
            self._optimizer.close()
        if self._model:
            self._model.shards.close()
        self._optimizer = self._model = self._shards = self._offload = self.adapters = None
