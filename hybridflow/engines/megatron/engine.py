"""Megatron-core's 3D parallelism as a `ShardedModel`: its model and schedules, our flat shards.

Paper, section 5: training runs with 3D parallelism and a distributed optimizer, whose state is split over data
parallel ranks.
"""

from __future__ import annotations

import importlib
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridflow import config
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.agreement import FAIL_SECONDS, Replicas
from hybridflow.engines.flat_shards import FlatShards
from hybridflow.engines.lora.adapters import Adapters
from hybridflow.engines.megatron.experts import Router
from hybridflow.engines.megatron.layers import PackedRow, SelectedPositions
from hybridflow.engines.megatron.layout import (
    EMBEDDING,
    OUTPUT,
    adapter_units,
    check,
    stages,
    state_layout,
    trained_layout,
    units,
    vocabulary_rows,
    weights_layout,
)
from hybridflow.engines.megatron.model import build_gpt, sequence_parallel, transformer_config, without_output_layer
from hybridflow.engines.megatron.parallel_adapters import add_adapters
from hybridflow.engines.megatron.stage_pass import StageMessages, StagePass
from hybridflow.engines.micro_batches import MicroBatch, Split
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.rank_exchanges import ContextParallel
from hybridflow.engines.router_replay import Replays
from hybridflow.engines.sharded_model import Failed, Read, ShardedModel, compute_dtype
from hybridflow.engines.time_sharing import PipelineTurn
from hybridflow.engines.token_outputs import TokenOutputs
from hybridflow.engines.units import Unit, step_groups
from hybridflow.errors import WaitTimeoutError
from hybridflow.models.architecture import architecture
from hybridflow.models.hf_spec import Decoder
from hybridflow.planner.pipeline.schedule import Work, one_f_one_b


def build_model(
    context: RankContext, strategy: config.Megatron, spec: Decoder, optimizer: config.Optimizer | None
) -> ShardedModel:
    """This rank's part of `spec`, its weights undefined. Errors: those of `layout.check`."""
    grid, at, device, split = context.grid, context.coords, context.device, strategy.stage_layers
    check(strategy, spec, grid, context.role)
    arch, dtype = architecture(spec), compute_dtype(strategy, device)
    of_stage, of_stages = units(spec, grid, context.rank, split), stages(spec.layers, grid.p, split)
    prepare(device)
    groups = process_group_collection(context)
    with building(device):
        settings = transformer_config(arch, strategy, grid, dtype, device)
        model, selection = build_gpt(arch, settings, at, of_stages[at.p], groups, device)
    model.requires_grad_(optimizer is not None)
    weights, layers = weights_layout(strategy, spec, grid), list[Any]()
    trained, lora = trained_layout(strategy, spec, grid), strategy.lora
    if lora is not None:
        layers = add_adapters(model, weights, trained, context.rank, lora, optimizer is not None, groups.tp)
        of_stage += adapter_units(trained, context.rank, of_stage)
    shards = MegatronShards(context, spec, model, of_stage, groups)
    micro_batches = Split(
        strategy.micro_tokens,
        multiple=(grid.t if sequence_parallel(strategy, grid, arch) else 1) * strategy.cp,
        count=2 * grid.p if grid.p > 1 else 1,
        vocab=spec.vocab,
        packed=strategy.packed,
        cost=spec.cost,
    )
    parts = step_groups({**spec.tensors(), **trained.tensors}, of_stages)
    tokens = TokenOutputs(context.role, spec, micro_batches, vocabulary_rows(spec.vocab, grid.t, at.t), groups.tp)
    tokens.context = ContextParallel(context, strategy.cp) if strategy.cp > 1 else None
    together = arch.experts is not None or strategy.cp > 1
    return ShardedModel(
        shards=shards,
        loop=PipelineLoop(context, model, selection, lockstep=together, tokens=tokens),
        tokens=tokens,
        layout=weights,
        optimizer_layout=state_layout(strategy, spec, grid) if optimizer else None,
        step_groups=parts,
        parts=[
            frozenset(name for unit in of_stage if unit.part == part for name in unit.parameters)
            for part in range(len(parts))
        ],
        no_decay=frozenset(n for unit in of_stage for n, shape in unit.parameters.items() if len(shape) == 1),
        fp16=dtype == torch.float16,
        replays=lambda: Replays(
            [module.replay for module in model.modules() if isinstance(module, Router)],
            sum(arch.sparse[: of_stages[at.p].start]),
            groups.tp,
        ),
        adapters=lora and Adapters(context, spec, lora, trained, weights, shards, layers),
    )


def process_group_collection(context: RankContext) -> ProcessGroupCollection:
    """Every group that Megatron reads, for this rank.

    There is no context parallelism: its groups hold this rank alone. `tp_ep` are the ranks that share experts and their
    columns, `expt_dp` those that hold the same. `embd` joins the two stages
    that have a copy of tied embeddings; without it Megatron would silently not add up their gradients.
    """
    grid, rank, at, group = context.grid, context.rank, context.coords, context.groups.of
    alone, everyone, model = group([rank]), group(grid.ranks()), group(grid.group(rank, "p", "t"))
    tp, pp, dp = group(grid.group(rank, "t")), group(grid.group(rank, "p")), group(grid.group(rank, "d"))
    ep, expt_tp, tp_ep, expt_dp = (
        group(grid.experts.group(rank, *axes)) for axes in (("ep",), ("etp",), ("ep", "etp"), ("edp",))
    )
    ends = [grid.rank(0, at.t, at.d), grid.rank(-1, at.t, at.d)]
    return ProcessGroupCollection(
        **dict.fromkeys(("tp", "tp_cp"), tp),
        **dict.fromkeys(("dp", "dp_cp", "intra_dp_cp"), dp),
        **dict.fromkeys(("expt_dp", "intra_expt_dp"), expt_dp),
        **dict.fromkeys(("mp", "tp_ep_pp"), model),
        ep=ep,
        expt_tp=expt_tp,
        tp_ep=tp_ep,
        cp=alone,
        hcp=[alone],
        pp=pp,
        tp_dp_cp=group(grid.group(rank, "t", "d")),
        inter_dist_opt=None,
        intra_dist_opt=everyone,
        embd=group(ends) if grid.p > 1 and rank in ends else None,
        pos_embd=None,
    )


class MegatronShards(FlatShards):
    """The flat shards of a GPTModel, by the names of its parameters.

    Gradients are also summed over ranks that share a parameter, by Megatron, to which this looks like a wrapped model
    (`module`, `config`, `ddp_config`, `finish_grad_sync`, and `main_grad` of its parameters). Rows that pad the
    vocabulary must be finite, or they would spoil what they are multiplied with by zero: they are zero from the start,
    and again whenever memory comes back.
    """

    def __init__(
        self,
        context: RankContext,
        spec: Decoder,
        model: GPTModel,
        of_stage: Sequence[Unit],
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(context, model, of_stage, groups.dp, expert_group=groups.expt_dp)
        self.module, self.config, self.ddp_config = model, model.config, DistributedDataParallelConfig()
        self._collection, self._first = groups, context.coords.t == 0
        self._named: dict[str, Any] = dict(model.named_parameters())
        for name, gradient in self.gradients.buffers.items():
            if name in self._named:  # what Megatron adds up; parts of experts are of no interest to it
                self._named[name].main_grad = gradient
        start, stop = vocabulary_rows(spec.vocab, context.grid.t, context.coords.t)
        padded = (EMBEDDING,) if spec.head == "value" else (EMBEDDING, OUTPUT)
        padding = {name: self.storage[name][stop - start :] for name in padded if name in self.storage}
        for rows in padding.values():
            rows.zero_()
        self.memory: Residency = _PaddedMemory(self.storage, padding, self.memory)

    def reduce(self) -> None:
        finalize_model_grads([self], None, pg_collection=self._collection)  # type: ignore[list-item]

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Called by Megatron for the sum over data parallel ranks."""
        self.gradients.reduce()

    def counts(self, name: str) -> bool:
        """Each parameter once: not its tensor parallel copies, not the second of tied embeddings. Of experts every
        rank has a share of its own."""
        if name not in self._named:
            return True
        cut = self._first or getattr(self._named[name], "tensor_model_parallel", False)
        return cut and not getattr(self._named[name], "shared", False)

    def close(self) -> None:
        super().close()
        self.model = self.module = None
        self._named = {}


class _PaddedMemory(Residency):
    """Zeroes the padding whose memory it gives back."""

    def __init__(self, tensors: Mapping[str, Tensor], padding: Mapping[str, Tensor], plain: Residency) -> None:
        super().__init__(tensors, plain.device, images=plain.images)
        self._padding = padding

    def fetch(self, names: Iterable[str] | None = None) -> set[str]:
        fresh = super().fetch(names)
        for name in fresh & self._padding.keys():
            self._padding[name].zero_()
        return fresh


class PipelineLoop:
    """Fulfils `sharded_model.MicroBatchLoop` for stage `at` of `stages`.

    `selection` receives the positions that the output layer computes for each micro-batch. While `turn` is set, several
    models train on these stages, and it says when a pass of this one may run what (`time_sharing`). Stages get zeros in
    place of what a failed computation would have sent. In `lockstep` (experts, context parallelism) data parallel ranks
    compute every micro-batch together, and empty ones of `tokens` where their replica has fewer.
    """

    turn: PipelineTurn | None
    replays: Replays | None = None

    def __init__(
        self,
        context: RankContext,
        model: GPTModel,
        selection: SelectedPositions,
        *,
        lockstep: bool,
        tokens: TokenOutputs,
    ) -> None:
        self.model, self.selection, self.device = model, selection, context.device
        self.lockstep, self._tokens = lockstep and context.grid.size > 1, tokens
        self._replicas = Replicas(context) if self.lockstep else None
        self.at, self.stages, self.turn = context.coords.p, context.grid.p, None
        self.last_stage = self.at == self.stages - 1
        self._messages, self._context, self._passes = StageMessages(context), context, 0

    @torch.no_grad()
    def infer(self, micro_batches: Sequence[MicroBatch], read: Read, failed: Failed, hidden: bool = False) -> list[Any]:
        self.model.eval()
        found, given = list[Any](), len(micro_batches)
        micro_batches = self._padded(micro_batches)
        mine = self._pass(micro_batches, lambda micro, out: found.append(read(micro, out)), failed, trains=False)
        with without_output_layer(self.model) if hidden and self.last_stage else nullcontext():
            if self.turn is not None and self.turn.takes_forwards():
                self.turn.take(mine)
            else:
                work = Work(micro_batches=(len(micro_batches),), trains=False)
                mine.run_all(one_f_one_b(self.stages, work).stages[self.at])
        return found[:given]

    def train(self, micro_batches: Sequence[MicroBatch], loss: Read, failed: Failed) -> None:
        self.model.train()
        if self.replays is not None:
            self.replays.clear()
        micro_batches = self._padded(micro_batches)
        mine = self._pass(micro_batches, loss, failed, trains=True)
        if self.turn is not None:
            self.turn.take(mine)
        else:
            mine.run_all(one_f_one_b(self.stages, Work(micro_batches=(len(micro_batches),))).stages[self.at])

    def _padded(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """With empty ones at the end, where ranks compute together."""
        if self._replicas is None:
            return list(micro_batches)
        missing = self._replicas.most(len(micro_batches)) - len(micro_batches)
        return [*micro_batches, *[self._tokens.empty()] * missing]

    def _pass(self, micro_batches: Sequence[MicroBatch], read: Read, failed: Failed, trains: bool) -> StagePass:
        self._passes += 1

        def continues(error: Exception) -> None:
            failed(error)
            if not self._all_failed():
                raise error from WaitTimeoutError("the tensor parallel ranks of this stage did not fail as well.")

        own = read if self.last_stage else None
        args = self.model, self._messages, micro_batches, self.device, self._forward, own, continues, trains
        return StagePass(*args, self.lockstep, self._replay)

    def _all_failed(self) -> bool:
        """Whether the ranks of this stage that compute the same rows have all failed in this pass, as for an error in
        their data; if not, the others are in a collective that this rank cannot continue."""
        at, groups = self._context.coords, self._context.groups
        cp = 1 if (shared := self._tokens.context) is None else shared.size
        size, key = self._context.grid.t * cp, f"{groups.name}/failed/{self._passes}/{at.p}-{at.d // cp}"
        end, found = time.monotonic() + FAIL_SECONDS, groups.store.add(key, 1)
        while found < size and time.monotonic() < end:
            time.sleep(0.02)
            found = groups.store.add(key, 0)
        return found >= size

    def _replay(self, micro: MicroBatch) -> None:
        """Before a computation of a micro-batch: Megatron's order of tokens is position-major, and those of a rank."""
        if self.replays is None:
            return
        routing = micro.routing_on(self.device)
        if routing is not None:
            routing = routing.transpose(0, 1)
            if self.model.config.sequence_parallel:
                routing = routing.chunk(self._context.grid.t)[self._context.coords.t]
            routing = routing.flatten(0, 1)
        self.replays.set(routing)

    def _forward(self, micro: MicroBatch) -> Tensor:
        self._replay(micro)
        self.selection.index = micro.position_major
        packed = PackedRow(sequences=micro.sequences) if micro.sequences is not None else None
        return self.model(input_ids=micro.ids, position_ids=None, attention_mask=None, packed_seq_params=packed)  # type: ignore[arg-type]


# Running Megatron-core where there is no CUDA: inert when the device is a CUDA one. Megatron writes `device="cuda"` and
# `torch.cuda.current_device()` into its code. On a CPU its modules are given a namespace of their own in the place of
# `torch`, so nothing that other libraries see is patched.

_MODULES = (
    "models.gpt.gpt_model",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "transformer.transformer_layer",
    "utils",
)


def prepare(device: torch.device) -> None:
    """Make Megatron use `device` in this process; may be called any number of times."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return
    for name in _MODULES:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        if not isinstance(module.torch, _CpuTorch):
            module.torch = _CpuTorch()
    rng: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def building(device: torch.device) -> AbstractContextManager:
    """For the construction of models, which call `Tensor.cuda()`."""
    return nullcontext() if device.type == "cuda" else _StayOnCpu()


class _CpuCuda(types.ModuleType):
    """Megatron's part of `torch.cuda`, for the CPU."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.current_device = lambda: torch.device("cpu")
        self.get_rng_state, self.set_rng_state = torch.get_rng_state, torch.set_rng_state
        self.manual_seed = torch.manual_seed
        self.synchronize = self.empty_cache = lambda *args: None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _CpuTorch(types.ModuleType):
    """`torch`, but tensors asked for on "cuda" are made on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuCuda()
        for name in ("empty", "zeros", "ones", "full", "tensor"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable) -> Callable:
    def make(*args, device: Any = None, **kwargs):
        return factory(*args, device="cpu" if device in ("cuda", 0) else device, **kwargs)

    return make


class _StayOnCpu(TorchFunctionMode):
    """Tensors that are sent to CUDA stay where they are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is torch.Tensor.cuda else func(*args, **(kwargs or {}))
