"""ZeRO of transformers' own model as a `ShardedModel`."""

from __future__ import annotations

from hybridflow.config import Optimizer, ZeRO
from hybridflow.engines.flat_shards import FlatShards
from hybridflow.engines.fsdp import engine as fsdp
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.sharded_model import ShardedModel, compute_dtype
from hybridflow.engines.transformers_model import TransformersModel
from hybridflow.engines.zero.layout import as_fsdp, check, state_layout, weights_layout, whole_units
from hybridflow.models.spec import Decoder


def build_model(context: RankContext, strategy: ZeRO, spec: Decoder, optimizer: Optimizer | None) -> ShardedModel:
    """This rank's part of `spec`, its weights undefined. Errors: those of `check`, ConfigError without the host memory
    for `offload`."""
    if strategy.stage == 3:
        return fsdp.build_model(context, as_fsdp(strategy), spec, optimizer)
    check(strategy, spec, context.grid, context.role)
    dtype = compute_dtype(strategy, context.device)
    weights, state = (found(strategy, spec, context.grid) for found in (weights_layout, state_layout))
    fsdp.check_host_memory(context, strategy, weights, dtype, optimizer)
    model = TransformersModel(spec, dtype, recompute=strategy.recompute and optimizer is not None)
    model.requires_grad_(optimizer is not None)
    cut, everyone = whole_units(spec.tensors(), spec.parts), context.groups.everyone()
    shards = FlatShards(context, model, cut, everyone, stage=strategy.stage, offload=strategy.offload)
    model.make_buffers(context.device)
    return fsdp.assemble(context, strategy, spec, shards, weights, state if optimizer else None)
