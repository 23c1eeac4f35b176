"""MegatronEngine: one rank of a model that computes and trains with Megatron-core's 3D parallelism.

Everything runs through Megatron's own schedules (1F1B with pipeline stages); a forward pass without gradients is the
same schedule with `forward_only`. Losses are shares of a global sum, so gradients are added over micro-batches and
data parallel ranks and never averaged.

Shapes: B rows, R response tokens, N tokens of a micro-batch that are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from hybridflow import config
from hybridflow.algorithms.typed_columns import response_mask, token_column
from hybridflow.batch import Batch
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.residency import Residency
from hybridflow.engines.agreement import agree
from hybridflow.engines.contract import LossFunction, Output
from hybridflow.engines.megatron import device as devices
from hybridflow.engines.megatron.groups import process_group_collection
from hybridflow.engines.megatron.layout import megatron_layout, padded_vocab
from hybridflow.engines.megatron.log_probs import vocab_parallel_log_probs
from hybridflow.engines.megatron.micro_batches import MicroBatch, Split
from hybridflow.engines.megatron.model import build_model, sequence_parallel, transformer_config
from hybridflow.engines.megatron.optimizer import MegatronOptimizer, is_distributed
from hybridflow.engines.megatron.replicas import Replicas
from hybridflow.engines.megatron.weights import initialise, load, load_local
from hybridflow.engines.process_groups import RankContext
from hybridflow.errors import BatchError, ConfigError, ModelError
from hybridflow.model_spec import ModelSpec
from hybridflow.ragged import Ragged

Outputs = dict[str, Ragged]


class MegatronEngine:
    """Fulfils `engines.contract.TrainEngine`. Without an optimizer it only computes and keeps no gradients.

    `checkpoint` is a Hugging Face directory; without one, weights are drawn from a fixed seed, equal for every
    (p, t, d). A value model whose checkpoint has no `score.weight` starts with zeros there.

    Errors: ModelError when the model does not divide by p and t, CheckpointError for a bad checkpoint.
    """

    def __init__(
        self,
        context: RankContext,
        strategy: config.Megatron,
        spec: ModelSpec,
        checkpoint: str | Path | None = None,
        optimizer: config.Optimizer | None = None,
    ) -> None:
        spec.check_parallel(context.grid.p, context.grid.t, context.role)
        self.context, self.strategy, self.spec, self.grid = context, strategy, spec, context.grid
        self.device = context.device
        self._at = context.coords
        self._dtype = _dtype(strategy, context.device)
        self._layout = megatron_layout(spec, self.grid)
        devices.prepare(self.device)
        self._groups = process_group_collection(context)
        self._replicas = Replicas(context)
        self._config = transformer_config(spec, strategy, self.grid, self._dtype, self.device)
        with devices.building(self.device):
            model, self._selection = build_model(spec, self._config, self._at, self._groups, self.device)
            self._gpt: Any = model.requires_grad_(optimizer is not None)
            self._trained = self._data_parallel(optimizer) if optimizer else None
            self._optimizer = (
                MegatronOptimizer(optimizer, self._trained, self._groups, self._dtype)
                if optimizer and self._trained
                else None
            )
        if self._optimizer and self._dtype == torch.float16:
            self._config.grad_scale_func = self._optimizer.scale_loss
        self._pending = False  # gradients that are not yet added up over ranks
        self._storage = {name: parameter.detach() for name, parameter in self._gpt.named_parameters()}
        self._memory = Residency(self._storage)
        if checkpoint is None:
            initialise(self._layout, context.rank, self.storage())
        else:
            load(checkpoint, spec, self._layout, context.rank, self.storage())
        self.weights_loaded()

    def _data_parallel(self, optimizer: config.Optimizer) -> DistributedDataParallel:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=is_distributed(optimizer), overlap_grad_reduce=False
        )
        return DistributedDataParallel(self._config, settings, self._gpt, pg_collection=self._groups)

    @property
    def is_last_stage(self) -> bool:
        return self._at.p == self.grid.p - 1

    # Computing

    def forward(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> Outputs | None:
        """Without gradients: each output ragged [B, R] float32 on the CPU; None off the last stage.

        Errors: those of `check`.
        """
        self.check(batch, outputs, temperature)
        micro_batches = self._micro_batches(batch)
        read = partial(self._outputs, names=outputs, temperature=temperature)
        flat = self._infer(micro_batches, lambda micro, out: {k: v.float() for k, v in read(micro, out).items()})
        if flat is None:
            return None
        order = torch.cat([micro.rows for micro in micro_batches]).argsort()
        lengths = torch.cat([micro.lengths for micro in micro_batches])
        return {
            name: Ragged.from_lengths(torch.cat([part[name].cpu() for part in flat]), lengths).index(order)
            for name in outputs
        }

    def score(self, batch: Batch) -> Tensor | None:
        """[B] float32 on the CPU: the value head at the last token; None off the last stage."""
        self.check(batch, ("values",))
        micro_batches = self._micro_batches(batch, last_tokens=True)
        parts = self._infer(micro_batches, lambda micro, out: out.flatten()[: micro.selected])
        if parts is None:
            return None
        order = torch.cat([micro.rows for micro in micro_batches]).argsort()
        return torch.cat([part.cpu() for part in parts])[order]

    def _infer(self, micro_batches: list[MicroBatch], read: Callable[[MicroBatch, Tensor], Any]) -> list[Any] | None:
        """`read(micro-batch, model output)` of every micro-batch, on the last stage."""
        self._gpt.eval()
        with torch.no_grad():
            found = self._run(micro_batches, lambda micro, out, **_: read(micro, out), forward_only=True)
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
        self.check(batch, outputs, temperature)
        micro_batches = self._micro_batches(batch)
        failures: list[Exception] = []
        totals = self._replicas.totals(batch) if self.is_last_stage else None
        self._gpt.train()

        def share(micro: MicroBatch, out: Tensor):
            values = self._outputs(micro, out, outputs, temperature)
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

        found = self._run(micro_batches, share, forward_only=False)
        try:
            agree(self.context, partial(_raise_first, failures))
        except Exception:
            optimizer.zero_grad()
            self._pending = False
            raise
        self._pending = True
        return self._replicas.summed(found) if self.is_last_stage else {}

    def step(self) -> dict[str, float]:
        """Clip, update, zero the gradients: `grad_norm` (global, unclipped), `lr`, `skipped` (1.0: not finite)."""
        optimizer = self._training()
        self._reduce()
        return optimizer.step()

    def gradients(self) -> Mapping[str, Tensor]:
        """This rank's gradients by parameter name, float32, added up over data parallel ranks; views, valid until
        `step`. No `forward_backward` may follow before the step."""
        self._training()
        self._reduce(everywhere=True)
        return {name: parameter.main_grad for name, parameter in self._gpt.named_parameters()}

    def _reduce(self, everywhere: bool = False) -> None:
        if self._pending and self._trained:
            finalize_model_grads([self._trained], None, pg_collection=self._groups, force_all_reduce=everywhere)
            self._pending = False

    def _training(self) -> MegatronOptimizer:
        if self._optimizer is None:
            raise ConfigError(f"{self.context.role} was built without an optimizer: it cannot train. Give optim=.")
        return self._optimizer

    # The schedule

    def _run(self, micro_batches: list[MicroBatch], read: Callable, forward_only: bool) -> list[Any]:
        """Megatron's schedule over the micro-batches; what `read` returned for each, on the last stage."""
        model: Any = self._gpt if forward_only else self._trained

        def forward_step(batches: Iterator[MicroBatch], model):
            micro = next(batches).to(self.device)
            self._selection.index = micro.index
            out = model(input_ids=micro.ids, position_ids=None, attention_mask=None)
            return out, partial(read, micro)

        pipelined = self.grid.p > 1
        extra: dict[str, Any] = (
            {"p2p_communicator": P2PCommunicator(self._groups.pp, self._config)} if pipelined else {}
        )
        rows, length = micro_batches[0].ids.shape
        return get_forward_backward_func(pp_size=self.grid.p, vp_size=None)(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[model],
            num_microbatches=len(micro_batches),
            seq_length=length,  # of the first: stages tell each other the shapes
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=self._groups,
            **extra,
        )

    def _micro_batches(self, batch: Batch, last_tokens: bool = False) -> list[MicroBatch]:
        prompts, responses = token_column(batch, "prompt_ids"), token_column(batch, "response_ids")
        split = self._split()
        return split.last_tokens(prompts, responses) if last_tokens else split.responses(prompts, responses)

    def _split(self) -> Split:
        multiple = self.grid.t if sequence_parallel(self.strategy, self.grid) else 1
        return Split(self.strategy.micro_tokens, multiple, 2 * self.grid.p if self.grid.p > 1 else 1, self.spec.vocab)

    def _outputs(
        self, micro: MicroBatch, out: Tensor, names: Sequence[Output], temperature: float
    ) -> dict[str, Tensor]:
        """Each asked output [N] float32 of a micro-batch from the output layer's [1, N, columns]."""
        rows = out[0, : micro.selected]
        if self.spec.head == "value":
            return {"values": rows[:, 0]}
        here = padded_vocab(self.spec.vocab, self.grid.t) // self.grid.t
        first = self._at.t * here
        rows = rows[:, : max(0, min(here, self.spec.vocab - first))]
        log_probs, entropy = vocab_parallel_log_probs(
            rows, micro.targets, first, self._groups.tp, temperature, "entropy" in names
        )
        found = {"log_probs": log_probs, "entropy": entropy}
        return {name: found[name] for name in names}  # type: ignore[misc]

    def check(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> None:
        """Without any collective. Errors: ModelError for an output that the model's head does not give, BatchError for
        a temperature of 0, a row without a prompt, an unknown token id, or a mask that does not fit the response."""
        given = ("values",) if self.spec.head == "value" else ("log_probs", "entropy")
        if not outputs or (wrong := [name for name in outputs if name not in given]):
            asked = ", ".join(map(repr, wrong if outputs else outputs)) or "no output"
            raise ModelError(
                f"{self.context.role} was asked for {asked}; a model with head={self.spec.head!r} gives "
                f"{' and '.join(map(repr, given))}."
            )
        if not (temperature > 0 and math.isfinite(temperature)):
            raise BatchError(f"temperature={temperature!r} must be above 0: log-probabilities are divided by it.")
        self._split().check(token_column(batch, "prompt_ids"), token_column(batch, "response_ids"))
        _ = response_mask(batch)

    # Weights

    def layout(self) -> Layout:
        return self._layout

    def storage(self) -> Mapping[str, Tensor]:
        """The parameters themselves: writing into them changes the model; then call `weights_loaded`."""
        return self._storage

    def memory(self) -> Residency:
        """The memory behind `storage()`."""
        return self._memory

    @property
    def restorable(self) -> bool:
        """Whether float32 main parameters exist apart from the parameters."""
        return self._optimizer is not None and self._dtype != torch.float32

    def weights_loaded(self) -> None:
        """Parameters were written from outside: refresh the optimizer's float32 copies of them."""
        if self._optimizer:
            self._optimizer.parameters_changed()

    def state(self) -> dict[str, Any]:
        """What this rank needs to go on: parameters and optimizer state, copied to the CPU."""
        parameters = {name: tensor.to("cpu", copy=True) for name, tensor in self.storage().items()}
        return {"parameters": parameters, "optimizer": self._optimizer.state() if self._optimizer else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()` of the same rank. Errors: CheckpointError for another model or parallelism."""
        load_local(state["parameters"], self.storage())
        self.weights_loaded()
        if self._optimizer and state["optimizer"] is not None:
            self._optimizer.load_state(state["optimizer"])

    def close(self) -> None:
        """Let go of the model, gradients and optimizer; the process groups belong to the context."""
        self._optimizer = self._trained = self._gpt = None


def _raise_first(failures: Sequence[Exception]) -> None:
    if failures:
        raise failures[0]


def _dtype(strategy: config.Megatron, device: torch.device) -> torch.dtype:
    return getattr(torch, strategy.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
