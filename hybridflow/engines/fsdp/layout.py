"""Layouts of FSDP and ZeRO: the boxes of canonical tensors on each rank of a mesh. Pure.

ZeRO stage 3 is FSDP that reduces the gradients of every micro-batch. In stages 1 and 2 every rank holds every
parameter, and owns the optimizer state of one share of each unit (`units.whole_units`).

FSDP2, HSDP and DTensor tensor parallelism cut a parameter in sequence: each cut divides one dimension into as many
chunks as the mesh has ranks along one axis, like `torch.chunk`. Chunk sizes round up, so the last ones are smaller or
empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from hybridflow.config import FSDP, ZeRO
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.lora.targets import trained_tensors
from hybridflow.engines.units import Tensors, ends_and_layers, optimizer_layout, parameter_layout
from hybridflow.errors import ModelError, PlacementError
from hybridflow.models.families import is_packable
from hybridflow.models.hf_spec import ROUTER_BIAS, Decoder, TransformersSpec, check_shared_heads, frozen_tensors
from hybridflow.models.images import LANGUAGE_MODEL, VISION_FAMILIES, VISION_TOWER
from hybridflow.models.spec import ModelSpec, Part
from hybridflow.topology import RankGrid, divisors

EMBEDDING, PER_HEAD = "embedding", "replicated_with_grad_allreduce"
_WEIGHT_DIM: dict[str, int | None] = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
    EMBEDDING: 0,
    PER_HEAD: None,
}
"""Style of tensor parallelism, as transformers calls it -> the dimension of a weight that it cuts."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh: of `parts` chunks, rank r takes number `index[r]`."""

    parts: int
    index: tuple[int, ...]


Cut = tuple[Axis, int]  # along this axis of the mesh, this dimension of the tensor


@lru_cache(maxsize=16)
def _plan(family: str) -> Mapping[str, str]:
    """transformers' tensor parallel plan of a family, by module name below the (text) decoder; empty without one."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[VISION_FAMILIES.get(family, family)].base_model_tp_plan or {}


def tensor_parallel_styles(spec: Decoder) -> dict[str, str]:
    """Module of transformers' model -> the style that its family's plan has for it. Embedding and output layer are cut
    along the vocabulary, which `vocab_parallel_log_probs` takes so; a value head of one column is everybody's."""
    plan, found = _plan(spec.family), {}
    before, _, behind = ends_and_layers(spec.tensors())
    owners = {part.tensors[0]: name for name, part in spec.parts.items()}
    ends = {owners.get(n, n): style for names, style in ((before, EMBEDDING), (behind, "colwise")) for n in names}
    top = spec.decoder
    if spec.images:  # what encodes images, which every rank computes, lies between the two
        top, embedding = LANGUAGE_MODEL, f"{LANGUAGE_MODEL}.embed_tokens.weight"
        ends = {name: EMBEDDING if name == embedding else "colwise" for name in ends if VISION_TOWER not in name}
    for name, shape in parameter_shapes(spec.tensors(), spec.parts).items():
        module = name.rpartition(".")[0]
        below = re.sub(r"\.\d+(?=\.|$)", ".*", module.removeprefix(f"{top}."))
        if below in plan:
            found[module] = plan[below]
        elif name in ends and len(shape) == 2 and shape[0] == spec.vocab:  # a norm may be of this size
            found[module] = ends[name]
    return found


def tensor_parallel_dim(spec: Decoder) -> Callable[[str], int | None]:
    """The dimension of a parameter that tensor parallelism cuts; None: every rank holds all."""
    styles = tensor_parallel_styles(spec)

    def dim_of(tensor: str) -> int | None:
        module, _, kind = tensor.rpartition(".")
        dim = _WEIGHT_DIM.get(styles.get(module, PER_HEAD))
        return None if dim == 1 and kind == "bias" else dim

    return dim_of


def fsdp_layout(
    model: Decoder | Tensors,
    shard: int,
    *,
    replicate: int = 1,
    tp: int = 1,
    tp_dim: Callable[[str], int | None] | None = None,
    ep: int = 1,
) -> Layout:
    """Layout of `model` (a spec, or canonical names and shapes) over a mesh (replicate, shard, tp), tp fastest.

    `fully_shard` over `shard` ranks chunks dimension 0; `replicate > 1` is HSDP; with `tp > 1` each tensor is first
    cut along `tp_dim(name)` (default: the plan of the spec's family), and what is left along dimension 0. Storage names
    are the canonical names. Rank `(r * shard + s) * tp + t` is at (r, s, t); replicas hold equal boxes. Experts are cut
    over `ep` neighbouring ranks, and those of one over the ranks of its kind.
    """
    tensors, parts = (dict(model), {}) if isinstance(model, Mapping) else (model.tensors(), model.parts)
    ranks = range(replicate * shard * tp)
    rows, columns = Axis(shard, tuple(r // tp % shard for r in ranks)), Axis(tp, tuple(r % tp for r in ranks))
    shares, same = Axis(ep, tuple(r % ep for r in ranks)), Axis(shard // ep, tuple(r % shard // ep for r in ranks))
    experts = model.experts if ep > 1 and isinstance(model, TransformersSpec) else ()
    cuts: dict[str, list[Cut]] = {}
    if tp_dim is None and tp > 1 and not isinstance(model, Mapping):
        tp_dim = tensor_parallel_dim(model)
    for name in parameter_shapes(tensors, parts):
        dim = None if tp_dim is None or tp == 1 else tp_dim(name)
        cuts[name] = [(rows, 0)] if dim is None else [(columns, dim), (rows, 0)]
        if name.endswith(ROUTER_BIAS):  # whole on every rank
            cuts[name] = []
        if name in experts:
            cuts[name] = [(shares, 0), (same, 0)]
    return cut_layout(tensors, len(ranks), cuts, parts)


def check(strategy: FSDP | ZeRO, spec: Decoder, grid: RankGrid, role: str = "the model") -> None:
    """Errors: PlacementError when `grid`, which may be a caller's own, has other sizes than the strategy's: both say
    how a model is cut. ModelError when the model does not divide by its tensor parallel size."""
    fits = strategy.grid(grid.size)
    if (grid.p, grid.t, grid.d, grid.ep) != (fits.p, fits.t, fits.d, fits.ep):
        raise PlacementError(
            f"{role} has a grid of its own, p={grid.p}, t={grid.t}, d={grid.d}, on which {strategy} cannot be laid "
            f"out: its {grid.size} ranks are p={fits.p}, t={fits.t}, d={fits.d}, ep={fits.ep}. Leave grid= out, or use "
            f"hf.Megatron()."
        )
    check_tensor_parallel(spec, grid.t, role)
    check_experts(spec, grid.ep, role)
    if spec.images and strategy.cp > 1:
        raise ModelError(f"{role} reads images, which cp={strategy.cp} ranks cannot share. Use cp=1.")
    packed = strategy.packed and is_packable(spec.config)
    check_shared_heads(spec, strategy.cp, grid.t, packed, role)


def as_fsdp(strategy: FSDP | ZeRO) -> FSDP | None:
    """The settings with which FSDP computes this strategy; None for ZeRO stages 1 and 2."""
    if isinstance(strategy, FSDP):
        return strategy
    shared = {f.name: getattr(strategy, f.name) for f in fields(strategy) if f.name != "stage"}
    return FSDP(reduce_often=True, **shared) if strategy.stage == 3 else None


def weights_layout(strategy: FSDP | ZeRO, spec: Decoder, grid: RankGrid) -> Layout:
    """Which rank of `grid` holds which boxes of `spec`. Errors: those of `check`."""
    check(strategy, spec, grid)
    if (cut := as_fsdp(strategy)) is None:
        return parameter_layout(spec.tensors(), grid.d)
    return fsdp_layout(spec, grid.d // cut.replicate, replicate=cut.replicate, tp=grid.t, ep=grid.ep)


def state_layout(strategy: FSDP | ZeRO, spec: Decoder, grid: RankGrid) -> Layout:
    """The same for one kind of optimizer state: with LoRA of the tensors that are trained.

    Errors: those of `check`; ConfigError for a target of LoRA that matches nothing.
    """
    check(strategy, spec, grid)
    tensors, frozen = spec.tensors(), frozen_tensors(strategy, spec)
    if (cut := as_fsdp(strategy)) is None:
        whole = optimizer_layout(tensors, grid.d, spec.parts, frozen)
    else:
        trained = trained_tensors(spec, cut.lora) if cut.lora else spec
        whole = fsdp_layout(trained, grid.d // cut.replicate, replicate=cut.replicate, tp=grid.t, ep=grid.ep)
    if not frozen:
        return whole

    def regions(rank: int) -> list[Region]:
        return [region for region in whole.regions(rank) if region.box.tensor not in frozen]

    kept = {name: shape for name, shape in tensors.items() if name not in frozen}
    return Layout(kept, whole.ranks, regions, whole.part)


def check_experts(spec: Decoder, ep: int, role: str = "the model") -> None:
    """Errors: ModelError when `ep` ranks cannot share the experts of the model, or it has none."""
    if ep == 1:
        return
    shapes = parameter_shapes(spec.tensors(), spec.parts)
    counts = {shapes[name][0] for name in getattr(spec, "experts", ())}
    if not counts:
        raise ModelError(f"{role} is a {spec.family} model without experts: ep={ep} has nothing to share.")
    if any(count % ep for count in counts):
        most = math.gcd(*counts)
        raise ModelError(f"{role} has {most} experts, not divisible by ep={ep}. Use ep in {divisors(most)}.")


def check_tensor_parallel(spec: Decoder, tp: int, role: str = "the model") -> None:
    """Errors: ModelError when transformers has no plan for the family, or one with styles that are not computed here;
    when heads, kv-heads or what else is cut does not divide by `tp`."""
    if tp == 1:
        return
    if isinstance(spec, ModelSpec):
        spec.check_parallel(1, tp, role)
    plan = _plan(spec.family)
    if not plan or (unknown := sorted({*plan.values()} - _WEIGHT_DIM.keys())):
        why = f"needs the styles {', '.join(unknown)}" if plan else "transformers has no plan for"
        raise ModelError(
            f"{role} is a {spec.family} model, whose tensor parallelism {why}: FSDP(tp={tp}) cannot cut it. Use FSDP() "
            f"without tp, or ZeRO(), whose ranks share any model."
        )
    dim_of = tensor_parallel_dim(spec)
    counts = {
        f"rows or columns of {name}": shape[dim]
        for name, shape in parameter_shapes(spec.tensors(), spec.parts).items()
        if (dim := dim_of(name)) is not None and shape[0] != spec.vocab
    }
    if any(style == "colwise" and "att" in module for module, style in tensor_parallel_styles(spec).items()):
        counts = {"heads": spec.heads, "kv-heads": spec.kv_heads, **counts}
    most = math.gcd(*counts.values())
    for what, count in counts.items():
        if count % tp:
            raise ModelError(
                f"{role} has {count} {what}, which do not divide by tp={tp}. Use FSDP(tp=) in "
                f"{divisors(most)} (ranks of Megatron can share a kv-head)."
            )


def parameter_shapes(tensors: Tensors, parts: Mapping[str, Part]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters that consist of the canonical `tensors`."""
    inside = {name for part in parts.values() for name in part.tensors}
    whole = {name: shape for name, shape in tensors.items() if name not in inside}
    return whole | {name: part.shape for name, part in parts.items() if part.tensors[0] in tensors}


def cut_layout(
    tensors: Tensors,
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
        boxes = [box for whole in held if whole.numel for box in _boxes_of(whole, tensors, parts.get(whole.tensor))]
        boxes.sort(key=lambda box: order[box.tensor])
        return [Region.first(box, box.tensor) for box in boxes]

    return Layout(tensors, ranks, regions, lambda rank: tuple(axis.index[rank] for axis in axes))


def _box(name: str, shape: Sequence[int], cuts: Sequence[Cut], rank: int) -> Box:
    start, stop = [0] * len(shape), list(shape)
    for axis, dim in cuts:
        chunk = -(-(stop[dim] - start[dim]) // axis.parts)
        first = min(start[dim] + axis.index[rank] * chunk, stop[dim])
        start[dim], stop[dim] = first, min(first + chunk, stop[dim])
    return Box(name, tuple(start), tuple(stop))


def _boxes_of(held: Box, tensors: Tensors, part: Part | None) -> list[Box]:
    """The boxes of canonical tensors in `held` rows of a parameter; of one that is canonical itself it alone.

    A rank holds rows of a parameter, so a contiguous range of its memory: of each tensor in it all, none, or rows.
    Errors: ModelError for a tensor of which a rank would hold a part of a row.
    """
    if part is None or part.shape == tensors[part.tensors[0]]:
        return [Box(part.tensors[0] if part else held.tensor, held.start, held.stop)]
    first, last = (row * math.prod(part.shape[1:]) for row in held.rows)
    found, start = [], 0
    for name in part.tensors:
        shape = tensors[name]
        width = math.prod(shape[1:])
        low, high = max(first - start, 0), min(last - start, math.prod(shape))
        start += math.prod(shape)
        if low >= high:
            continue
        if low % width or high % width:
            raise ModelError(f"ranks cannot share {held.tensor}: one of them would hold half a row of {name}.")
        found.append(Box(name, (low // width, *(0 for _ in shape[1:])), (high // width, *shape[1:])))
    return found
