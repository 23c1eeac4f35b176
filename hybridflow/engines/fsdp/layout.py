"""Which boxes of canonical tensors each rank of an FSDP mesh holds. Pure.

Everything that FSDP2, HSDP and DTensor tensor parallelism do to a parameter is a sequence of cuts: one dimension into
as many chunks as the mesh has ranks along one axis, as `torch.chunk` makes them. Chunks are ceil-divided, so the last
ones are smaller or empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridflow.config import FSDP, ZeRO
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.fsdp.fused_params import boxes_of, parameter_shapes
from hybridflow.engines.lora.targets import trained_tensors
from hybridflow.errors import ModelError, PlacementError
from hybridflow.models.spec import Decoder, ModelSpec, Part
from hybridflow.topology import RankGrid

# the dimension that tensor parallelism cuts: outputs of the first linear layer of a pair, inputs of the second
_OUTPUTS = frozenset({"embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_INPUTS = frozenset({"o_proj", "down_proj"})


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh: of `parts` chunks, rank r takes number `index[r]`."""

    parts: int
    index: tuple[int, ...]


Cut = tuple[Axis, int]  # along this axis of the mesh, this dimension of the tensor


def tensor_parallel_dim(tensor: str) -> int | None:
    """The dimension of a Llama-style decoder's tensor that tensor parallelism cuts; None: every rank holds all."""
    module, _, kind = tensor.rpartition(".")
    layer = module.rpartition(".")[2]
    if layer in _OUTPUTS:
        return 0
    return 1 if layer in _INPUTS and kind == "weight" else None


def fsdp_layout(
    model: Decoder | Mapping[str, tuple[int, ...]],
    shard: int,
    *,
    replicate: int = 1,
    tp: int = 1,
    tp_dim: Callable[[str], int | None] = tensor_parallel_dim,
) -> Layout:
    """Layout of `model` (a spec, or canonical names and shapes) over a mesh (replicate, shard, tp), tp fastest.

    `fully_shard` over `shard` ranks chunks dimension 0; `replicate > 1` is HSDP; with `tp > 1` each tensor is first
    cut along `tp_dim(name)`, and what is left along dimension 0. Storage names are the canonical names. Rank
    `(r * shard + s) * tp + t` is at (r, s, t); replicas hold equal boxes.

    Errors: PlacementError when a size is below one.
    """
    for name, size in (("shard", shard), ("replicate", replicate), ("tp", tp)):
        if type(size) is not int or size < 1:
            raise PlacementError(f"FSDP mesh size {name}={size!r} must be a whole number of at least 1.")
    tensors, parts = (dict(model), {}) if isinstance(model, Mapping) else (model.tensors(), model.parts)
    ranks = range(replicate * shard * tp)
    rows, columns = Axis(shard, tuple(r // tp % shard for r in ranks)), Axis(tp, tuple(r % tp for r in ranks))
    cuts: dict[str, list[Cut]] = {}
    for name in parameter_shapes(tensors, parts):
        dim = tp_dim(name)
        cuts[name] = [(columns, dim), (rows, 0)] if tp > 1 and dim is not None else [(rows, 0)]
    return cut_layout(tensors, len(ranks), cuts, parts)


def check(strategy: FSDP | ZeRO, spec: Decoder, grid: RankGrid, role: str = "the model") -> None:
    """Errors: PlacementError when `grid`, which may be a caller's own, has other sizes than the strategy's: both say
    how a model is cut. ModelError when heads, kv-heads or MLP columns do not divide by its tensor parallel size:
    transformers' attention has no kv-head that several ranks share."""
    fits = strategy.grid(grid.size)
    if (grid.p, grid.t, grid.d) != (fits.p, fits.t, fits.d):
        raise PlacementError(
            f"{role} has a grid of its own, p={grid.p}, t={grid.t}, d={grid.d}, on which {strategy} cannot be laid "
            f"out: its {grid.size} ranks are p={fits.p}, t={fits.t}, d={fits.d}. Leave grid= out, or use hf.Megatron()."
        )
    check_tensor_parallel(spec, grid.t, role)


def weights_layout(strategy: FSDP, spec: Decoder, grid: RankGrid) -> Layout:
    """Which rank of `grid` holds which boxes of `spec`. Errors: those of `check`."""
    check(strategy, spec, grid)
    return fsdp_layout(spec, grid.d // strategy.replicate, replicate=strategy.replicate, tp=grid.t)


def state_layout(strategy: FSDP, spec: Decoder, grid: RankGrid) -> Layout:
    """The same for one kind of optimizer state: with LoRA of the tensors that are trained.

    Errors: those of `check`; ConfigError for a target of LoRA that matches nothing.
    """
    check(strategy, spec, grid)
    trained = trained_tensors(spec, strategy.lora) if strategy.lora else spec
    return fsdp_layout(trained, grid.d // strategy.replicate, replicate=strategy.replicate, tp=grid.t)


def check_tensor_parallel(spec: Decoder, tp: int, role: str = "the model") -> None:
    """Errors: ModelError when heads, kv-heads or MLP columns do not divide by `tp`."""
    spec.check_parallel(1, tp, role)
    if isinstance(spec, ModelSpec) and spec.kv_heads % tp:
        sizes = [n for n in range(1, spec.kv_heads + 1) if not (spec.kv_heads % n or spec.intermediate % n)]
        raise ModelError(
            f"{role} has {spec.kv_heads} kv-heads, which do not divide by tp={tp}. Use FSDP(tp=) in {sizes}, or "
            f"Megatron, where ranks share a kv-head."
        )


def cut_layout(
    tensors: Mapping[str, tuple[int, ...]],
    ranks: int,
    cuts: Mapping[str, Sequence[Cut]],
    parts: Mapping[str, Part] | None = None,
) -> Layout:
    """The layout in which each rank holds what `cuts`, in this order, leave it of each parameter, as a tensor of its
    own; of `parts` (by parameter) each canonical tensor is one.

    A parameter that is never cut is held whole by all. Chunks without elements belong to no region.
    """
    parts = parts or {}
    axes = tuple(dict.fromkeys(axis for several in cuts.values() for axis, _ in several))
    parameters = parameter_shapes(tensors, parts)
    order = {name: at for at, name in enumerate(tensors)}

    def regions(rank: int) -> list[Region]:
        held = (_box(name, shape, cuts.get(name, ()), rank) for name, shape in parameters.items())
        boxes = [box for whole in held if whole.numel for box in boxes_of(whole, tensors, parts.get(whole.tensor))]
        boxes.sort(key=lambda box: order[box.tensor])
        return [Region(box, box.tensor, (0,) * len(box.start)) for box in boxes]

    return Layout(tensors, ranks, regions, lambda rank: tuple(axis.index[rank] for axis in axes))


def _box(name: str, shape: Sequence[int], cuts: Sequence[Cut], rank: int) -> Box:
    start, stop = [0] * len(shape), list(shape)
    for axis, dim in cuts:
        chunk = -(-(stop[dim] - start[dim]) // axis.parts)
        first = min(start[dim] + axis.index[rank] * chunk, stop[dim])
        start[dim], stop[dim] = first, min(first + chunk, stop[dim])
    return Box(name, tuple(start), tuple(stop))
