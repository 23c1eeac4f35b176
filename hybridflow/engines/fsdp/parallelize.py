"""A transformers model, cut over the ranks of a group by tensor parallelism and FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridflow.config import FSDP, LoRA
from hybridflow.engines.causal_model import CausalModel
from hybridflow.engines.fsdp.fused_params import views
from hybridflow.engines.fsdp.layout import weights_layout
from hybridflow.engines.fsdp.sharded import Sharded, Views, canonical_name
from hybridflow.engines.lora.targets import adapter_names, trained_tensors
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.token_model import TokenModel
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.models.spec import Decoder


def transformers_model(spec: Decoder, dtype: torch.dtype, *, recompute: bool = False, lora: LoRA | None = None) -> Any:
    """The model of `spec`, its parameters on the meta device."""
    make: Any = CausalModel if isinstance(spec, TransformersSpec) else TokenModel
    return make(spec, dtype, recompute=recompute, lora=lora)


def parallelize(context: RankContext, strategy: FSDP, spec: Decoder, dtype: torch.dtype, trains: bool) -> Sharded:
    """The model, its weights undefined. What is trained is kept in float32, and computes in `dtype`."""
    lora = strategy.lora
    kept = torch.float32 if trains and lora is None else dtype
    model = transformers_model(spec, kept, recompute=strategy.recompute and trains, lora=lora)
    model.requires_grad_(trains)
    renamed = adapter_names(spec, lora) if lora else {}
    if lora is not None:
        trained = trained_tensors(spec, lora)
        for full, parameter in model.named_parameters():
            name = canonical_name(full)
            parameter.requires_grad_(trains and renamed.get(name, name) in trained)
    mixed = dtype != kept or (lora is not None and dtype != torch.float32)  # adapters are float32
    return Sharded(context, strategy, model, dtype if mixed else None, _views(context, strategy, spec, renamed))


def _views(context: RankContext, strategy: FSDP, spec: Decoder, renamed: dict[str, str]) -> Views:
    """The canonical tensors of each parameter on this rank; `renamed` are parameters with another name."""
    parts, tensors = spec.parts, spec.tensors()
    regions = weights_layout(strategy, spec, context.grid).regions(context.rank) if parts else ()
    boxes = {region.box.tensor: region.box for region in regions}

    def of(name: str, local: Tensor) -> dict[str, Tensor]:
        return views(local, boxes, tensors, parts[name]) if name in parts else {renamed.get(name, name): local}

    return of
