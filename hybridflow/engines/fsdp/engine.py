"""FSDP2 of transformers' own model as a `ShardedModel`; `assemble` serves ZeRO too."""

from __future__ import annotations

from functools import partial

import torch

from hybridflow.config import FSDP, Optimizer, ZeRO
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.agreement import agree
from hybridflow.engines.fsdp.host_memory import require_host_memory
from hybridflow.engines.fsdp.layout import check, state_layout, weights_layout
from hybridflow.engines.fsdp.parallelize import parallelize
from hybridflow.engines.lora.adapters import Adapters
from hybridflow.engines.lora.targets import adapter_tensors
from hybridflow.engines.micro_batches import Split
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.replicas import Replicas
from hybridflow.engines.sharded_model import DataParallelShards, PlainLoop, ShardedModel, compute_dtype
from hybridflow.engines.step_partition import step_groups
from hybridflow.engines.token_outputs import TokenOutputs
from hybridflow.models.spec import Decoder


def build_model(context: RankContext, strategy: FSDP, spec: Decoder, optimizer: Optimizer | None) -> ShardedModel:
    """This rank's part of `spec`, its weights undefined. Errors: those of `check`, ConfigError without the host memory
    for `offload`."""
    check(strategy, spec, context.grid, context.role)
    dtype, lora = compute_dtype(strategy, context.device), strategy.lora
    weights, state = (found(strategy, spec, context.grid) for found in (weights_layout, state_layout))
    check_host_memory(context, strategy, weights, dtype, optimizer)
    shards = parallelize(context, strategy, spec, dtype, optimizer is not None)
    adapters = None
    if lora is not None:
        local = {**shards.storage, **shards.adapters}
        size = context.grid.d // strategy.replicate
        first = context.rank // size * size  # of this copy of the model
        adapters = Adapters(
            context,
            spec,
            lora,
            state,
            storage={name: local[name] for name in state.tensors},
            weights=shards.storage,
            decoder=shards.model.decoder,
            peers=range(first, first + size),
        )
    return assemble(context, strategy, spec, shards, weights, state if optimizer else None, adapters)


def check_host_memory(
    context: RankContext, strategy: FSDP | ZeRO, weights: Layout, dtype: torch.dtype, optimizer: Optimizer | None
) -> None:
    """Errors: ConfigError without the host memory for `offload`, on all ranks before any of them allocates."""
    if strategy.offload:
        agree(context, partial(require_host_memory, context, strategy, weights, dtype, optimizer))


def assemble(
    context: RankContext,
    strategy: FSDP | ZeRO,
    spec: Decoder,
    shards: DataParallelShards,
    weights: Layout,
    state: Layout | None,
    adapters: Adapters | None = None,
) -> ShardedModel:
    """The model in `shards` with what runs micro-batches through it."""
    grid, tensors = context.grid, spec.tensors()
    columns = -(-spec.vocab // grid.t)
    first = min(spec.vocab, columns * context.coords.t)
    packing = {"packed": strategy.packed, "single": not shards.model.packable}
    split = Split(strategy.micro_tokens, vocab=spec.vocab, cost=spec.cost, **packing)
    group = context.groups.new("tp", grid.group(context.rank, "t"))
    parts = step_groups(tensors | (adapter_tensors(spec, adapters.lora) if adapters else {}))
    return ShardedModel(
        shards=shards,
        loop=PlainLoop(shards, Replicas(context), split.empty, context.device),
        tokens=TokenOutputs(context.role, spec, split, (first, min(spec.vocab, first + columns)), group),
        layout=weights,
        optimizer_layout=state,
        step_groups=parts,
        parts=parts,
        no_decay=frozenset(name for name, shape in tensors.items() if len(shape) == 1),
        fp16=compute_dtype(strategy, context.device) == torch.float16,
        adapters=adapters,
    )
