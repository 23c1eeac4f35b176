"""A strategy's model, cut over the ranks of a group as the strategy says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridflow.config import FSDP, ZeRO
from hybridflow.engines.causal_model import CausalModel
from hybridflow.engines.fsdp.dtensors import canonical_name
from hybridflow.engines.fsdp.layout import strategy_layout
from hybridflow.engines.fsdp.parts import views
from hybridflow.engines.fsdp.sharded import Sharded, Views
from hybridflow.engines.lora.adapters import Adapters
from hybridflow.engines.lora.targets import adapter_names, adapter_tensors, trained_tensors
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.shards import Shards
from hybridflow.engines.token_model import TokenModel
from hybridflow.engines.zero.shards import ZeroShards
from hybridflow.model_spec import Decoder
from hybridflow.transformers_spec import TransformersSpec


def cut(context: RankContext, strategy: FSDP | ZeRO, spec: Decoder, dtype: torch.dtype, trains: bool) -> Shards:
    """The model, its weights undefined. FSDP keeps in float32 what is trained, and only what computes is in `dtype`."""
    lora = strategy.lora if isinstance(strategy, FSDP) else None
    whole = isinstance(strategy, ZeRO) and strategy.stage < 3
    kept = torch.float32 if trains and not whole and lora is None else dtype
    make = CausalModel if isinstance(spec, TransformersSpec) else TokenModel
    model: Any = make(spec, kept, recompute=strategy.recompute and trains, lora=lora)  # type: ignore[arg-type]
    model.requires_grad_(trains)
    if lora is not None:
        trained, renamed = trained_tensors(spec, lora), adapter_names(spec, lora)
        for full, parameter in model.named_parameters():
            name = canonical_name(full)
            parameter.requires_grad_(trains and renamed.get(name, name) in trained)
    if isinstance(strategy, ZeRO) and strategy.stage < 3:
        shards = ZeroShards(context, model, spec.tensors(), spec.parts, stage=strategy.stage, offload=strategy.offload)
        model.make_buffers(context.device)
        return shards
    views = _views(strategy, spec, context)
    if isinstance(strategy, ZeRO):
        strategy = FSDP(dp=strategy.dp, reduce_often=True, offload=strategy.offload)
    mixed = dtype != kept or (lora is not None and dtype != torch.float32)  # adapters are float32
    return Sharded(context, strategy, model, dtype if mixed else None, views)


def _views(strategy: FSDP | ZeRO, spec: Decoder, context: RankContext) -> Views:
    """The canonical tensors of each parameter on this rank."""
    parts, tensors = spec.parts, spec.tensors()
    regions = strategy_layout(strategy, spec, context.grid).regions(context.rank) if parts else ()
    boxes = {region.box.tensor: region.box for region in regions}
    lora = strategy.lora if isinstance(strategy, FSDP) else None
    renamed = adapter_names(spec, lora) if lora else {}

    def of(name: str, local: Tensor) -> dict[str, Tensor]:
        return views(local, boxes, tensors, parts[name]) if name in parts else {renamed.get(name, name): local}

    return of


def parameters(strategy: FSDP | ZeRO, spec: Decoder) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of everything that the model has, adapters at the end."""
    lora = strategy.lora if isinstance(strategy, FSDP) else None
    return spec.tensors() | (adapter_tensors(spec, lora) if lora else {})


def adapters_of(context: RankContext, strategy: FSDP | ZeRO, spec: Decoder, shards: Shards) -> Adapters | None:
    """The adapters in a model that was cut; None without LoRA."""
    if not isinstance(strategy, FSDP) or not isinstance(shards, Sharded) or strategy.lora is None:
        return None
    layout = strategy_layout(strategy, spec, context.grid, state=True)
    held = {**shards.storage, **shards.adapters}
    size = context.grid.d // strategy.replicate
    first = context.rank // size * size  # of this copy of the model
    return Adapters(
        context,
        spec,
        strategy.lora,
        layout,
        storage={name: held[name] for name in layout.tensors},
        weights=shards.storage,
        decoder=shards.model.decoder,
        peers=range(first, first + size),
    )
