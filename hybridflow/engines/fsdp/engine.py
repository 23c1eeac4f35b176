"""FSDPEngine: one rank of a transformers model that computes and trains, cut over ranks by FSDP2 or as ZeRO does.

Losses are shares of a global sum, so gradients are added over micro-batches and data parallel ranks and never
averaged. Every rank runs the same number of micro-batches, because gathering a layer needs all of them.

Shapes: B rows, R response tokens, N tokens of a micro-batch that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hybridflow import config
from hybridflow.batch import Batch
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.residency import Residency
from hybridflow.engines.agreement import agree
from hybridflow.engines.contract import Held, LossFunction, Output, Unset
from hybridflow.engines.fsdp.cutting import adapters_of, cut, parameters
from hybridflow.engines.fsdp.host_memory import require_host_memory
from hybridflow.engines.fsdp.layout import check_tensor_parallel, strategy_layout
from hybridflow.engines.held import HeldMemory
from hybridflow.engines.lora.adapters import Adapters
from hybridflow.engines.loss_scale import LossScale
from hybridflow.engines.micro_batches import MicroBatch, Split, in_order
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.replicas import Replicas
from hybridflow.engines.shard_optimizer import ShardOptimizer
from hybridflow.engines.step_groups import step_groups
from hybridflow.engines.token_outputs import Positions, TokenOutputs
from hybridflow.engines.weights import initialise, load, load_local
from hybridflow.errors import ConfigError
from hybridflow.model_spec import Decoder
from hybridflow.ragged import Ragged

Outputs = dict[str, Ragged]


class FSDPEngine:
    """Fulfils `engines.contract.TrainEngine`. Without an optimizer it only computes and keeps no gradients.

    `checkpoint` is a Hugging Face directory; without one, weights are drawn from a fixed seed, equal however the model
    is cut, and with `UNSET` they are left undefined. A value model whose checkpoint has no `score.weight` starts with
    zeros there. No rank ever holds the whole model.

    Errors: ModelError when the model does not divide by tp, CheckpointError for a bad checkpoint, ConfigError (with
    several ranks a WorkerError of that cause, on all of them) for `offload` without the host memory for it.
    """

    _shards: Any = None  # these are None before they are built and once they are closed
    _held: Any = None
    _optimizer: ShardOptimizer | None = None
    adapters: Adapters | None = None

    def __init__(
        self,
        context: RankContext,
        strategy: config.FSDP | config.ZeRO,
        spec: Decoder,
        checkpoint: str | Path | Unset | None = None,
        optimizer: config.Optimizer | None = None,
    ) -> None:
        check_tensor_parallel(spec, context.grid.t, context.role)
        self.context, self.strategy, self.spec, self.grid = context, strategy, spec, context.grid
        self.device = context.device
        self._dtype = _dtype(strategy, context.device)
        self._layout = strategy_layout(strategy, spec, self.grid)
        if strategy.offload:  # nobody allocates before all ranks of its node have looked at what is free
            agree(context, partial(require_host_memory, context, strategy, self._layout, self._dtype, optimizer))
        self._step_groups = step_groups(parameters(strategy, spec))
        self._replicas = Replicas(context)
        self._gradients: Literal["zero", "own", "summed"] = "zero"  # "own": to be completed before a step
        try:
            self._build(optimizer)
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

    def _build(self, optimizer: config.Optimizer | None) -> None:
        context, strategy, spec = self.context, self.strategy, self.spec
        shards = self._shards = cut(context, strategy, spec, self._dtype, optimizer is not None)
        self.adapters = adapters_of(context, strategy, spec, shards)
        columns = -(-spec.vocab // self.grid.t)
        first = min(spec.vocab, columns * context.coords.t)
        group = context.groups.new("tp", self.grid.group(context.rank, "t"))
        packing = {"packed": strategy.packed, "single": not shards.model.packable}
        split = Split(strategy.micro_tokens, vocab=spec.vocab, cost=spec.cost, **packing)
        vocabulary = (first, min(spec.vocab, first + columns))
        self._tokens = TokenOutputs(context.role, spec, split, vocabulary, group)
        if optimizer:
            flat = [name for name, shape in spec.tensors().items() if len(shape) == 1]
            scale = LossScale() if self._dtype == torch.float16 else None
            self._optimizer = ShardOptimizer(optimizer, shards, flat, self._step_groups, scale)
        gradients = shards.gradients if optimizer else None
        self._held = HeldMemory(context.role, shards.memory, gradients, self._optimizer)

    # Computing

    def check(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> None:
        """Raise, without any collective, what can be said against these rows. Errors: ModelError, BatchError."""
        self._tokens.check(batch, outputs, temperature)

    def forward(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> Outputs | None:
        """Without gradients: each output ragged [B, R] float32 on the CPU. Errors: those of `check`."""
        self._tokens.check(batch, outputs, temperature)
        read = partial(self._tokens.read, names=outputs, temperature=temperature)
        micro_batches, flat = self._infer(batch, "before", read)
        return {name: in_order(micro_batches, [part[name].float() for part in flat]) for name in outputs}

    def score(self, batch: Batch, tokens: bool = False) -> Tensor | Ragged | None:
        """[B] float32 on the CPU: the value head at the last token.

        With `tokens` ragged [B, R] float32: at each response token's own position.
        """
        self._tokens.check(batch, ("values",))
        micro_batches, parts = self._infer(
            batch, "own" if tokens else "last", lambda micro, out: out[: micro.selected, 0].float()
        )
        scores = in_order(micro_batches, parts)
        return scores if tokens else scores.values

    @torch.no_grad()
    def _infer(
        self, batch: Batch, at: Positions, read: Callable[[MicroBatch, Tensor], Any]
    ) -> tuple[list[MicroBatch], list[Any]]:
        """The batch's micro-batches, and `read(micro-batch, model output)` of each."""
        self._held.require("parameters")
        micro_batches = self._tokens.micro_batches(batch, at)
        self._shards.model.eval()
        found = [read(micro, self._compute(micro)) for micro in self._as_many(micro_batches)]
        self._shards.after_pass()
        return micro_batches, found[: len(micro_batches)]

    def _as_many(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """As many as the replica with the most has, with empty ones at the end."""
        most = self._replicas.most(len(micro_batches))
        return [*micro_batches, *[self._tokens.split.empty()] * (most - len(micro_batches))]

    def _compute(self, micro: MicroBatch) -> Tensor:
        """What the head gives at the positions of a micro-batch, [N or 1, columns]."""
        here = micro.to(self.device)
        return self._shards.model(here.ids, here.index, here.positions, here.sequences).flatten(0, -2)

    # Training

    def forward_backward(
        self, batch: Batch, loss: LossFunction, outputs: Sequence[Output], temperature: float = 1.0
    ) -> dict[str, float]:
        """Add the gradients of one mini-batch; metrics are summed over micro-batches and data parallel ranks.

        Several calls before a `step` add up. A loss that raises does so after the last micro-batch, whose collectives
        need every rank: then all ranks raise and drop their gradients. What its backward pass raises is met by one
        rank alone; its peers wait for their timeout.
        Errors: those of `check`; of `loss` (a WorkerError on more than one rank).
        """
        optimizer = self._training()
        self._held.require("parameters", "gradients")
        self._tokens.check(batch, outputs, temperature)
        micro_batches, totals = self._tokens.micro_batches(batch), self._replicas.totals(batch)
        failures: list[Exception] = []
        found: list[dict[str, Tensor]] = []

        def share(micro: MicroBatch, out: Tensor) -> Tensor:
            nothing = out.flatten()[:0].sum().float()  # keeps the graph when no row or no token takes part
            values = self._tokens.read(micro.to(self.device), out, outputs, temperature)
            if not len(micro.rows):
                return nothing
            rows = batch if len(micro_batches) == 1 else batch.reorder(micro.rows)
            ragged = {name: Ragged.from_lengths(value, micro.lengths) for name, value in values.items()}
            try:
                scalar, metrics = loss(ragged, rows.to(self.device), totals)  # type: ignore[arg-type]
            except Exception as error:  # peers count on this rank in the rest of the pass
                failures.append(error)
                return nothing
            found.append({name: value.detach() for name, value in metrics.items()})
            return scalar + nothing

        self._shards.model.train()
        everything = self._as_many(micro_batches)
        for left, micro in zip(reversed(range(len(everything))), everything, strict=True):
            self._shards.before_backward(last=not left)
            optimizer.scale_loss(share(micro, self._compute(micro))).backward()
        self._shards.after_pass()
        try:
            agree(self.context, partial(_raise_first, failures))
        except Exception:
            optimizer.zero_grad()
            self._gradients = "zero"
            raise
        self._gradients = "own"
        return self._replicas.summed(found)

    def step(self) -> dict[str, float]:
        """Clip, update, zero the gradients: `grad_norm` (global, unclipped), `lr`, `skipped` (1.0: not finite)."""
        result = self._ready_to_step().step()
        self._gradients = "zero"
        return result

    def step_groups(self) -> list[frozenset[str]]:
        """Canonical tensors of each part of a step: the ends of the model, then each layer."""
        return self._step_groups

    def step_parts(self) -> Iterator[int]:
        """`step` in parts: yields k when the parameters of `step_groups()[k]` are final; then see `step_result`."""
        yield from self._ready_to_step().step_parts()
        self._gradients = "zero"

    @property
    def step_result(self) -> dict[str, float]:
        return self._training().result

    def _ready_to_step(self) -> ShardOptimizer:
        optimizer = self._training()
        self._held.require(*get_args(Held))
        self._reduce()
        return optimizer

    def gradients(self) -> Mapping[str, Tensor]:
        """This rank's gradients by the names of `storage()` (with LoRA of `adapters.storage`), float32, added up over
        data parallel ranks; valid until `step`. No `forward_backward` may follow before the step."""
        self._training()
        self._held.require("gradients")
        self._reduce()
        found = self._shards.gradients.tensors
        return {
            name: found[name] if name in found else torch.zeros_like(held, dtype=torch.float32)
            for name, held in self._trained.items()
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

    @property
    def _trained(self) -> Mapping[str, Tensor]:
        """What changes, of the parameters: with LoRA the rest is what the checkpoint says."""
        return self.storage() if self.adapters is None else self.adapters.storage

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
        return strategy_layout(self.strategy, self.spec, self.grid, state=True) if self._optimizer else None

    def optimizer_storage(self) -> dict[str, Mapping[str, Tensor]]:
        """Kind of state -> float32 tensors by the names of `optimizer_layout()`; what does not exist yet is made."""
        self._held.require("optimizer")
        return self._training().storage()

    def optimizer_counters(self) -> dict[str, Any]:
        """Steps made and the state of the loss scale, equal on all ranks."""
        return self._training().counters()

    def optimizer_moved(self, counters: Mapping[str, Any]) -> None:
        """`optimizer_storage()` was written from outside: take the counters, and the parameters from `main`."""
        optimizer = self._training()
        self._held.require("parameters", "optimizer")
        optimizer.moved(counters)

    # Memory

    def memory(self) -> Residency:
        """The memory behind `storage()`."""
        return self._shards.memory

    def offload(self, what: Collection[Held]) -> None:
        """Move these to host memory; the engine does not compute until they are back."""
        self._held.offload(what, self._gradients == "zero")

    def reload(self, what: Collection[Held]) -> None:
        """Bring back what was moved to host memory; what was not is left alone."""
        self._held.reload(what, self._gradients == "zero")

    def state(self) -> dict[str, Any]:
        """What this rank needs to go on: parameters (with LoRA those that are trained) and optimizer state, copied to
        the CPU."""
        self._held.require("parameters", "optimizer")
        parameters = {name: tensor.to("cpu", copy=True) for name, tensor in self._trained.items()}
        return {"parameters": parameters, "optimizer": self._optimizer.state() if self._optimizer else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()` of the same rank. Errors: CheckpointError for another model or parallelism."""
        self._held.require("parameters", "optimizer")
        load_local(state["parameters"], self._trained)
        self.weights_loaded()
        if self._optimizer and state["optimizer"] is not None:
            self._optimizer.load_state(state["optimizer"])

    def close(self) -> None:
        """Free the model, gradients and optimizer; the process groups belong to the context. May be called twice.

        Memory is given back here and now, also of tensors of `storage()` that others still refer to.
        """
        if self._optimizer:
            self._optimizer.close()
        if self._shards:
            self._shards.close()
        self._optimizer = self._shards = self._held = self.adapters = None


def _raise_first(failures: Sequence[Exception]) -> None:
    if failures:
        raise failures[0]


def _dtype(strategy: config.FSDP | config.ZeRO, device: torch.device) -> torch.dtype:
    return getattr(torch, strategy.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
