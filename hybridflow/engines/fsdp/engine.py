"""FSDP2 and ZeRO of transformers' own model as a `ShardedModel`."""

from __future__ import annotations

from functools import partial

import torch

from hybridflow.config import FSDP, SGD, Adam, Optimizer, ZeRO
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.agreement import agree
from hybridflow.engines.flat_shards import FlatShards
from hybridflow.engines.fsdp.layout import as_fsdp, check, state_layout, weights_layout
from hybridflow.engines.fsdp.sharded import Sharded
from hybridflow.engines.host_memory import available
from hybridflow.engines.lora.adapters import Adapters, adapted_layers
from hybridflow.engines.lora.targets import adapter_tensors
from hybridflow.engines.micro_batches import Split
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.rank_exchanges import ContextParallel
from hybridflow.engines.router_replay import follow
from hybridflow.engines.sharded_model import PlainLoop, ShardedModel, Shards, compute_dtype
from hybridflow.engines.token_outputs import TokenOutputs
from hybridflow.engines.transformers_model import TransformersModel
from hybridflow.engines.units import step_groups, whole_units
from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import Decoder, frozen_tensors

_GIB = 1 << 30


def build_model(
    context: RankContext, strategy: FSDP | ZeRO, spec: Decoder, optimizer: Optimizer | None
) -> ShardedModel:
    """This rank's part of `spec`, its weights undefined. Errors: those of `check`, ConfigError without the host memory
    for `offload`, on all ranks before any of them allocates."""
    grid = context.grid
    check(strategy, spec, grid, context.role)
    dtype = compute_dtype(strategy, context.device)
    weights, state = (found(strategy, spec, grid) for found in (weights_layout, state_layout))
    if strategy.offload:
        agree(context, partial(require_host_memory, context, strategy, weights, dtype, optimizer))
    shards, adapters = _shards(context, strategy, spec, dtype, (weights, state), trains=optimizer is not None)
    tensors = spec.tensors()
    columns = -(-spec.vocab // grid.t)
    first = min(spec.vocab, columns * context.coords.t)
    packing = {"packed": strategy.packed, "single": not shards.model.packable}
    split = Split(strategy.micro_tokens, strategy.cp, vocab=spec.vocab, cost=spec.cost, images=spec.images, **packing)
    group = context.groups.of(grid.group(context.rank, "t"))
    parts = step_groups(tensors | (adapter_tensors(spec, adapters.lora) if adapters else {}))
    tokens = TokenOutputs(context.role, spec, split, (first, min(spec.vocab, first + columns)), group)
    tokens.context = ContextParallel(context, strategy.cp) if strategy.cp > 1 else None
    return ShardedModel(
        shards=shards,
        loop=PlainLoop(context, shards, tokens.empty),
        tokens=tokens,
        layout=weights,
        optimizer_layout=state if optimizer else None,
        step_groups=parts,
        parts=parts,
        no_decay=frozenset(name for name, shape in tensors.items() if len(shape) == 1),
        fp16=dtype == torch.float16,
        replays=partial(follow, shards.model, spec),
        adapters=adapters,
    )


def _shards(
    context: RankContext,
    strategy: FSDP | ZeRO,
    spec: Decoder,
    dtype: torch.dtype,
    layouts: tuple[Layout, Layout],
    trains: bool,
) -> tuple[Shards, Adapters | None]:
    """The parameters on this rank, and with LoRA the adapters; `layouts` of weights, and of what is trained."""
    cut = as_fsdp(strategy)
    if cut is None:
        assert isinstance(strategy, ZeRO)
        model = TransformersModel(spec, dtype, recompute=strategy.recompute and trains)
        model.train_all(trains, frozen := frozen_tensors(strategy, spec))
        units, everyone = whole_units(spec.tensors(), spec.parts, frozen), context.groups.everyone()
        flat = FlatShards(context, model, units, everyone, stage=strategy.stage, offload=strategy.offload)
        model.make_buffers(context.device)
        flat.lockstep = strategy.cp > 1
        return flat, None
    shards = Sharded(context, cut, spec, dtype, trains=trains)
    if cut.lora is None:
        return shards, None
    (weights, trained), peers = layouts, context.grid.d // cut.replicate  # ranks of a copy of the model
    layers = adapted_layers(shards.model.decoder)
    return shards, Adapters(context, spec, cut.lora, trained, weights, shards, layers, peers)


# Host memory


def require_host_memory(
    context: RankContext,
    strategy: FSDP | ZeRO,
    layout: Layout,
    dtype: torch.dtype,
    optimizer: Optimizer | None,
    free: int | None = None,
) -> None:
    """Refuse `offload=True`, before anything is allocated, where the ranks of this rank's node do not fit.

    `layout` are the parameters, which compute in `dtype`; `free` bytes are what the node has (default: what the system
    calls available; where it says nothing, nothing is refused).

    Errors: ConfigError.
    """
    free = available() if free is None else free
    if not strategy.offload or free is None:
        return
    nodes = context.nodes or (0,) * context.grid.size
    neighbours = nodes.count(nodes[context.rank])
    width = bytes_kept(strategy, dtype, optimizer, context.grid.d)
    needed = neighbours * width * sum(region.box.numel for region in layout.regions(context.rank))
    if needed > free:
        raise ConfigError(
            f"{context.role}: offload=True keeps {needed / _GIB:.3g} GiB of {neighbours} ranks in host memory, this "
            f"node has {free / _GIB:.3g} GiB free. Use more devices on more nodes, or offload=False."
        )


def bytes_kept(strategy: FSDP | ZeRO, dtype: torch.dtype, optimizer: Optimizer | None, ranks: int) -> float:
    """Bytes in host memory for each parameter that a rank holds."""
    stage, lora = getattr(strategy, "stage", 3), getattr(strategy, "lora", None)
    partly, frozen = stage < 3, optimizer is None or lora is not None
    if frozen:
        return 0.0 if partly else float(dtype.itemsize)
    momentum = optimizer.momentum if isinstance(optimizer, SGD) else 0.0
    moments = 2 if isinstance(optimizer, Adam) else int(momentum > 0)
    if partly:  # main parameters, moments and, with stage 2, gradients are cut over the ranks
        return 4.0 * (1 + moments + (stage == 2)) / ranks
    return 4.0 * (2 + moments)
