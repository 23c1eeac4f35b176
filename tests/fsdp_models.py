"""Device meshes of some of the processes, and transformers models sharded over them as a user of torch would do it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hybridflow.engines.fsdp.layout import tensor_parallel_dim
from hybridflow.models.spec import ModelSpec


def wrap(model: Any, mesh: DeviceMesh, *, root_stays_gathered: bool = False) -> Any:
    """Tensor parallelism over the last axis, then FSDP2 over the second (HSDP with the first); the same model."""
    replicate, shard, tp = mesh.mesh.shape
    copies, rows, columns = mesh.mesh_dim_names or ()
    if tp > 1:
        parallelize_module(model, mesh[columns], _parallel_styles(model), src_data_rank=None)  # pyright: ignore
        if model.config.tie_word_embeddings:
            model.tie_weights()
    if shard > 1:
        over = mesh[copies, rows] if replicate > 1 else mesh[rows]
        for layer in model.model.layers:
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over, reshard_after_forward=not root_stays_gathered)
    return model


def _parallel_styles(model: Any) -> dict[str, Any]:
    styles: dict[str, Any] = {}
    dim_of = tensor_parallel_dim(ModelSpec.from_hf_config(model.config))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            styles[name] = RowwiseParallel() if dim_of(f"{name}.weight") == 1 else ColwiseParallel()
    styles["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    styles["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return styles
