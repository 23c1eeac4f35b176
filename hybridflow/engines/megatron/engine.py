"""MegatronEngine: one rank of a model that computes and trains with Megatron-core's 3D parallelism.

Everything runs through Megatron's own schedules (1F1B with pipeline stages); a forward pass without gradients is the
same schedule with `forward_only`. Losses are shares of a global sum, so gradients are added over micro-batches and
data parallel ranks and never averaged.

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
from hybridflow.engines.held import GradientBuffers, HeldMemory
from hybridflow.engines.megatron import device as devices
from hybridflow.engines.megatron.buckets import Buckets
from hybridflow.engines.megatron.groups import process_group_collection
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.megatron.model import build_model, sequence_parallel, transformer_config
from hybridflow.engines.megatron.optimizer import MegatronOptimizer
from hybridflow.engines.megatron.optimizer_layout import is_distributed, optimizer_layout
from hybridflow.engines.megatron.parameters import Parameters
from hybridflow.engines.megatron.schedule import Schedule
from hybridflow.engines.megatron.units import stages, units, vocabulary_rows
from hybridflow.engines.micro_batches import MicroBatch, Split, in_order
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.replicas import Replicas
from hybridflow.engines.step_groups import step_groups
from hybridflow.engines.token_outputs import TokenOutputs
from hybridflow.engines.weights import initialise, load, load_local
from hybridflow.errors import ConfigError
from hybridflow.model_spec import ModelSpec
from hybridflow.ragged import Ragged

Outputs = dict[str, Ragged]


class MegatronEngine:
    """Fulfils `engines.contract.TrainEngine`. Without an optimizer it only computes and keeps no gradients.

    `checkpoint` is a Hugging Face directory; without one, weights are drawn from a fixed seed, equal for every
    (p, t, d), and with `UNSET` they are left undefined. A value model whose checkpoint has no `score.weight` starts
    with zeros there.

    Errors: ModelError when the model does not divide by p and t, CheckpointError for a bad checkpoint.
    """

    adapters = None  # it trains all parameters
    _config: Any = None  # these are None before they are built and once they are closed
    _gpt: Any = None
    _schedule: Any = None
    _parameters: Any = None
    _held: Any = None
    _buckets: Buckets | None = None
    _optimizer: MegatronOptimizer | None = None

    def __init__(
        self,
        context: RankContext,
        strategy: config.Megatron,
        spec: ModelSpec,
        checkpoint: str | Path | Unset | None = None,
        optimizer: config.Optimizer | None = None,
    ) -> None:
        split = strategy.stage_layers
        spec.check_parallel(context.grid.p, context.grid.t, context.role, split)
        self.context, self.strategy, self.spec, self.grid = context, strategy, spec, context.grid
        self.device = context.device
        self._at = context.coords
        self._dtype = _dtype(strategy, context.device)
        self._layout = megatron_layout(spec, self.grid, split)
        self._optimizer_layout = optimizer_layout(spec, self.grid, optimizer, split) if optimizer else None
        self._step_groups = step_groups(spec.tensors(), stages(spec.layers, self.grid.p, split))
        devices.prepare(self.device)
        self._groups = process_group_collection(context)
        self._replicas = Replicas(context)
        self._tokens = self._token_outputs()
        self._config = transformer_config(spec, strategy, self.grid, self._dtype, self.device)
        self._gradients: Literal["zero", "own", "summed"] = "zero"  # "own": not yet added up over ranks
        try:
            with devices.building(self.device):
                self._build(optimizer)
            if checkpoint is None:
                initialise(self._layout, context.rank, self.storage())
            elif not isinstance(checkpoint, Unset):
                load(checkpoint, spec, self._layout, context.rank, self.storage())
            self.weights_loaded()
        except Exception:
            self.close()
            raise

    def _token_outputs(self) -> TokenOutputs:
        grid, spec, strategy = self.grid, self.spec, self.strategy
        split = Split(
            strategy.micro_tokens,
            multiple=grid.t if sequence_parallel(strategy, grid) else 1,
            count=2 * grid.p if grid.p > 1 else 1,
            vocab=spec.vocab,
            packed=strategy.packed,
            cost=spec.cost,
        )
        vocabulary = vocabulary_rows(spec.vocab, grid.t, self._at.t)
        return TokenOutputs(self.context.role, spec, split, vocabulary, self._groups.tp)

    def _build(self, optimizer: config.Optimizer | None) -> None:
        spec, at, split = self.spec, self._at, self.strategy.stage_layers
        layers = len(stages(spec.layers, self.grid.p, split)[at.p])
        model, selection = build_model(spec, self._config, at, layers, self._groups, self.device)
        self._gpt = model.requires_grad_(optimizer is not None)
        self._schedule = Schedule(model, selection, self._groups, self.grid.p, self.device)
        of_stage = units(spec, self.grid, at, split)
        if optimizer:
            self._buckets = Buckets(self._config, model, of_stage, self._groups, is_distributed(optimizer))
        self._parameters = Parameters(model, of_stage, spec, self.grid.t, at.t)
        if optimizer and self._buckets:
            parts = len(self._step_groups)
            self._optimizer = MegatronOptimizer(optimizer, self._buckets, self._groups, self._dtype, parts)
            if self._dtype == torch.float16:
                self._config.grad_scale_func = self._optimizer.scale_loss
        tensors = self._optimizer.tensors if self._optimizer else None
        gradients = GradientBuffers(self._buckets.gradients, self._buckets.zero) if self._buckets else None
        self._held = HeldMemory(self.context.role, self._parameters.memory, gradients, tensors)

    @property
    def is_last_stage(self) -> bool:
        return self._at.p == self.grid.p - 1

    # Computing

    def check(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> None:
        """Raise, without any collective, what can be said against these rows. Errors: ModelError, BatchError."""
        self._tokens.check(batch, outputs, temperature)

    def forward(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> Outputs | None:
        """Without gradients: each output ragged [B, R] float32 on the CPU; None off the last stage.

        Errors: those of `check`.
        """
        self._tokens.check(batch, outputs, temperature)
        micro_batches = self._tokens.micro_batches(batch)
        read = partial(self._tokens.read, names=outputs, temperature=temperature)
        flat = self._infer(micro_batches, lambda micro, out: {k: v.float() for k, v in read(micro, out[0]).items()})
        if flat is None:
            return None
        return {name: in_order(micro_batches, [part[name] for part in flat]) for name in outputs}

    def score(self, batch: Batch, tokens: bool = False) -> Tensor | Ragged | None:
        """[B] float32 on the CPU: the value head at the last token; None off the last stage.

        With `tokens` ragged [B, R] float32: at each response token's own position.
        """
        self._tokens.check(batch, ("values",))
        micro_batches = self._tokens.micro_batches(batch, "own" if tokens else "last")
        parts = self._infer(micro_batches, lambda micro, out: out[0, : micro.selected, 0].float())
        if parts is None:
            return None
        scores = in_order(micro_batches, parts)
        return scores if tokens else scores.values

    def _infer(self, micro_batches: list[MicroBatch], read: Callable[[MicroBatch, Tensor], Any]) -> list[Any] | None:
        """`read(micro-batch, model output)` of every micro-batch, on the last stage."""
        self._held.require("parameters")
        found = self._schedule.run(micro_batches, lambda micro, out, **_: read(micro, out), forward_only=True)
        return found if self.is_last_stage else None

    # Training

    def forward_backward(
        self, batch: Batch, loss: LossFunction, outputs: Sequence[Output], temperature: float = 1.0
    ) -> dict[str, float]:
        """Add the gradients of one mini-batch; metrics are summed over micro-batches and data parallel ranks.

        Several calls before a `step` add up. Gradients meet those of other ranks in `step` (or `gradients`). Metrics
        are returned on the last pipeline stage (equal on its ranks), {} on the others.

        A loss that raises does so after the schedule, whose collectives need every rank: then all ranks raise and
        drop their gradients. What its backward pass raises is met by one rank alone; its peers wait for their timeout.
        Errors: those of `check`; of `loss` (a WorkerError on more than one rank).
        """
        optimizer = self._training()
        self._held.require("parameters", "gradients")
        self._tokens.check(batch, outputs, temperature)
        micro_batches = self._tokens.micro_batches(batch)
        failures: list[Exception] = []
        totals = self._replicas.totals(batch) if self.is_last_stage else None

        def share(micro: MicroBatch, out: Tensor):
            values = self._tokens.read(micro, out[0], outputs, temperature)
            nothing = out.flatten()[:0].sum().float()  # keeps the graph when no row or no token takes part
            if not len(micro.rows):
                return nothing, 0, {}
            rows = batch if len(micro_batches) == 1 else batch.reorder(micro.rows)
            ragged = {name: Ragged.from_lengths(value, micro.lengths) for name, value in values.items()}
            try:
                scalar, metrics = loss(ragged, rows.to(self.device), totals)  # type: ignore[arg-type]
                return scalar + nothing, 0, {name: value.detach() for name, value in metrics.items()}
            except Exception as error:  # peers count on this rank in the rest of the schedule
                failures.append(error)
                return nothing, 0, {}

        found = self._schedule.run(micro_batches, share, forward_only=False)
        try:
            agree(self.context, partial(_raise_first, failures))
        except Exception:
            optimizer.zero_grad()
            self._gradients = "zero"
            raise
        self._gradients = "own"
        return self._replicas.summed(found) if self.is_last_stage else {}

    def step(self) -> dict[str, float]:
        """Clip, update, zero the gradients: `grad_norm` (global, unclipped), `lr`, `skipped` (1.0: not finite)."""
        optimizer = self._ready_to_step()
        result = optimizer.step()
        self._gradients = "zero"
        return result

    def step_groups(self) -> list[frozenset[str]]:
        """Canonical tensors of each part of a step: the ends of the model, then the k-th layer of every stage."""
        return self._step_groups

    def step_parts(self) -> Iterator[int]:
        """`step` in parts: yields k when the parameters of `step_groups()[k]` are final; then see `step_result`."""
        optimizer = self._ready_to_step()
        yield from optimizer.step_parts()
        self._gradients = "zero"

    @property
    def step_result(self) -> dict[str, float]:
        return self._training().result

    def _ready_to_step(self) -> MegatronOptimizer:
        optimizer = self._training()
        self._held.require(*get_args(Held))
        self._reduce()
        return optimizer

    def gradients(self) -> Mapping[str, Tensor]:
        """This rank's gradients by parameter name, float32, added up over data parallel ranks; views, valid until
        `step`. No `forward_backward` may follow before the step."""
        self._training()
        self._held.require("gradients")
        self._reduce(everywhere=True)
        return {name: parameter.main_grad for name, parameter in self._gpt.named_parameters()}

    def _reduce(self, everywhere: bool = False) -> None:
        if self._gradients == "own" and self._buckets:
            self._buckets.reduce(everywhere)
            self._gradients = "summed"

    def _training(self) -> MegatronOptimizer:
        if self._optimizer is None:
            raise ConfigError(f"{self.context.role} was built without an optimizer: it cannot train. Give optim=.")
        return self._optimizer

    # Weights

    def layout(self) -> Layout:
        return self._layout

    def storage(self) -> Mapping[str, Tensor]:
        """The parameters themselves: writing into them changes the model; then call `weights_loaded`."""
        return self._parameters.storage

    def weights_loaded(self) -> None:
        """Parameters were written from outside: refresh the optimizer's float32 copies of them."""
        if self._optimizer:
            self._optimizer.parameters_changed()

    @property
    def restorable(self) -> bool:
        """Whether float32 main parameters exist apart from the parameters."""
        return self._optimizer is not None and self._optimizer.tensors.separate

    def restore(self) -> None:
        """Parameters := main parameters, all of them resident again. Collective over the data parallel ranks.

        Errors: ConfigError where parameters are float32 (or there is no optimizer): nothing else has their values.
        """
        if not self.restorable:
            raise ConfigError(f"{self.context.role} has no main parameters apart from its {self._dtype} parameters.")
        self.reload(("parameters", "optimizer"))
        self._training().restore()

    def optimizer_layout(self) -> Layout | None:
        """Boxes of every rank's optimizer state, alike for each kind of it; None without an optimizer."""
        return self._optimizer_layout

    def optimizer_storage(self) -> dict[str, Mapping[str, Tensor]]:
        """Kind of state -> float32 tensors by the names of `optimizer_layout()`; what does not exist yet is made."""
        self._held.require("optimizer")
        return self._training().tensors.storage()

    def optimizer_counters(self) -> dict[str, Any]:
        """Steps made and the state of the loss scale, equal on all ranks."""
        return self._training().counters()

    def optimizer_moved(self, counters: Mapping[str, Any]) -> None:
        """`optimizer_storage()` was written from outside: take the counters, and the parameters from `main`."""
        optimizer = self._training()
        self._held.require("parameters", "optimizer")
        with devices.building(self.device):
            optimizer.moved(counters)

    # Memory

    def memory(self) -> Residency:
        """The memory behind `storage()`: per decoder layer with Adam, else per parameter."""
        return self._parameters.memory

    def offload(self, what: Collection[Held]) -> None:
        """Move these to host memory; the engine does not compute until they are back."""
        self._held.offload(what, self._gradients == "zero")

    def reload(self, what: Collection[Held]) -> None:
        """Bring back what was moved to host memory; what was not is left alone."""
        self._held.reload(what, self._gradients == "zero")

    def state(self) -> dict[str, Any]:
        """What this rank needs to go on: parameters and optimizer state, copied to the CPU."""
        self._held.require("parameters", "optimizer")
        parameters = {name: tensor.to("cpu", copy=True) for name, tensor in self.storage().items()}
        return {"parameters": parameters, "optimizer": self._optimizer.state() if self._optimizer else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()` of the same rank. Errors: CheckpointError for another model or parallelism."""
        self._held.require("parameters", "optimizer")
        load_local(state["parameters"], self.storage())
        self.weights_loaded()
        if self._optimizer and state["optimizer"] is not None:
            with devices.building(self.device):
                self._optimizer.load_state(state["optimizer"])

    def close(self) -> None:
        """Free the model, gradients and optimizer; the process groups belong to the context. May be called twice.

        Memory is given back here and now, also of tensors of `storage()` that others still refer to: Megatron's objects
        form cycles, and the collector never looks at what vLLM froze (`gc.freeze`).
        """
        if self._config:
            self._config.grad_scale_func = None
        if self._optimizer:
            self._optimizer.close()
        if self._buckets:
            self._buckets.close()
        if self._parameters:
            self._parameters.memory.release()
        self._optimizer = self._buckets = self._gpt = self._schedule = self._parameters = self._held = None
        self._config = None


def _raise_first(failures: Sequence[Exception]) -> None:
    if failures:
        raise failures[0]


def _dtype(strategy: config.Megatron, device: torch.device) -> torch.dtype:
    return getattr(torch, strategy.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
