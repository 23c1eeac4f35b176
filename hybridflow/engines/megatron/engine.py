"""Megatron-core's 3D parallelism as a `ShardedModel`: its model and schedules, its buffers of gradients.

Paper, section 5: training runs with 3D parallelism and a distributed optimizer, whose state is split over data
parallel ranks.
"""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from hybridflow import config
from hybridflow.engines.megatron import device as devices
from hybridflow.engines.megatron.buckets import MegatronShards
from hybridflow.engines.megatron.layout import state_layout, weights_layout
from hybridflow.engines.megatron.model import build_gpt, sequence_parallel, transformer_config
from hybridflow.engines.megatron.pipeline import PipelineLoop
from hybridflow.engines.megatron.units import stages, units, vocabulary_rows
from hybridflow.engines.micro_batches import Split
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.sharded_model import ShardedModel, compute_dtype
from hybridflow.engines.step_partition import step_groups
from hybridflow.engines.token_outputs import TokenOutputs
from hybridflow.models.spec import ModelSpec


def build_model(
    context: RankContext, strategy: config.Megatron, spec: ModelSpec, optimizer: config.Optimizer | None
) -> ShardedModel:
    """This rank's part of `spec`, its weights undefined. Errors: ModelError when it does not divide by p and t."""
    grid, at, device, split = context.grid, context.coords, context.device, strategy.stage_layers
    spec.check_parallel(grid.p, grid.t, context.role, split)
    dtype = compute_dtype(strategy, device)
    of_stage, of_stages = units(spec, grid, at, split), stages(spec.layers, grid.p, split)
    devices.prepare(device)
    groups = process_group_collection(context)
    with devices.building(device):
        settings = transformer_config(spec, strategy, grid, dtype, device)
        model, selection = build_gpt(spec, settings, at, len(of_stages[at.p]), groups, device)
        model.requires_grad_(optimizer is not None)
        shards = MegatronShards(context, spec, model, of_stage, groups)
    micro_batches = Split(
        strategy.micro_tokens,
        multiple=grid.t if sequence_parallel(strategy, grid) else 1,
        count=2 * grid.p if grid.p > 1 else 1,
        vocab=spec.vocab,
        packed=strategy.packed,
        cost=spec.cost,
    )
    parts = step_groups(spec.tensors(), of_stages)
    return ShardedModel(
        shards=shards,
        loop=PipelineLoop(model, selection, groups, at.p, grid.p, device),
        tokens=TokenOutputs(context.role, spec, micro_batches, vocabulary_rows(spec.vocab, grid.t, at.t), groups.tp),
        layout=weights_layout(strategy, spec, grid),
        optimizer_layout=state_layout(strategy, spec, grid) if optimizer else None,
        step_groups=parts,
        parts=[
            frozenset(name for unit in of_stage if unit.part == part for name in unit.parameters)
            for part in range(len(parts))
        ],
        no_decay=frozenset(n for unit in of_stage for n, shape in unit.parameters.items() if len(shape) == 1),
        fp16=dtype == torch.float16,
    )


def process_group_collection(context: RankContext) -> ProcessGroupCollection:
    """Every group that Megatron reads, for this rank. Groups with equal members are one group.

    There is neither context nor expert parallelism: those groups hold this rank alone. `embd` joins the two stages
    that have a copy of tied embeddings; without it Megatron would silently not add up their gradients.
    """
    grid, rank, at = context.grid, context.rank, context.coords

    def group(members: list[int]):
        return context.groups.new("megatron", members)

    alone, everyone, model = group([rank]), group(grid.ranks()), group(grid.group(rank, "p", "t"))
    tp, pp, dp = group(grid.group(rank, "t")), group(grid.group(rank, "p")), group(grid.group(rank, "d"))
    ends = [grid.rank(0, at.t, at.d), grid.rank(-1, at.t, at.d)]
    return ProcessGroupCollection(
        tp=tp,
        pp=pp,
        dp=dp,
        mp=model,
        cp=alone,
        dp_cp=dp,
        intra_dp_cp=dp,
        tp_cp=tp,
        tp_dp_cp=group(grid.group(rank, "t", "d")),
        hcp=[alone],
        ep=alone,
        expt_tp=tp,
        expt_dp=dp,
        intra_expt_dp=dp,
        tp_ep=tp,
        tp_ep_pp=model,
        inter_dist_opt=None,
        intra_dist_opt=everyone,
        embd=group(ends) if grid.p > 1 and rank in ends else None,
        pos_embd=None,
    )
