"""Device meshes of some of the processes, and transformers models sharded over them as a user of torch would do it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hybridflow.engines.fsdp.layout import tensor_parallel_dim
from hybridflow.engines.process_groups import RankContext

AXES = ("replicate", "shard", "tp")


def make_mesh(context: RankContext, sizes: Sequence[int]) -> DeviceMesh:
    """A mesh (replicate, shard, tp) of the ranks of a model group, from groups that only its members build."""
    ranks = torch.arange(math.prod(sizes)).reshape(*sizes)
    at = (ranks == context.rank).nonzero()[0].tolist()
    groups = []
    for axis, name in enumerate(AXES):
        line = ranks[tuple(slice(None) if i == axis else at[i] for i in range(len(AXES)))]
        groups.append(context.groups.new(name, line.tolist()))
    world_ranks = torch.tensor(context.groups.ranks)[ranks]
    return DeviceMesh.from_group(groups, context.device.type, mesh=world_ranks, mesh_dim_names=AXES)


def wrap(model: Any, mesh: DeviceMesh, *, root_stays_gathered: bool = False) -> Any:
    """Tensor parallelism over "tp", then FSDP2 over "shard" (HSDP with "replicate"); returns the same model."""
    replicate, shard, tp = mesh.mesh.shape
    if tp > 1:
        parallelize_module(model, mesh["tp"], _parallel_styles(model), src_data_rank=None)  # pyright: ignore
        if model.config.tie_word_embeddings:
            model.tie_weights()
    if shard > 1:
        over = mesh["replicate", "shard"] if replicate > 1 else mesh["shard"]
        for layer in model.model.layers:
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over, reshard_after_forward=not root_stays_gathered)
    return model


def _parallel_styles(model: Any) -> dict[str, Any]:
    styles: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            styles[name] = RowwiseParallel() if tensor_parallel_dim(f"{name}.weight") == 1 else ColwiseParallel()
    styles["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    styles["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return styles
