"""The boxes of canonical tensors that each Megatron rank holds, and the units of its pipeline stage. Pure.

Storage names are the local parameter names of Megatron's GPTModel: layers are counted from 0 on every pipeline stage,
query, key and value rows are interleaved per kv-head (`q q k v | q q k v`), gate and up rows follow each other, the
vocabulary is padded to a multiple of t, and with tied embeddings the last of several stages has a copy of its own.
The interleaved rows are cut into t equal parts, also where that cuts through a kv-head because there are fewer of them
than ranks (Megatron then gathers activations, not weights; see `layers.SharedHeadAttention`). A rank holds whole
experts, or columns of them, one behind the other: storage of each is a part of one parameter.

Adapters: a rank holds the columns of A [rank, in] and the rows of B [out, rank] that its part of the weight has. So of
a column parallel layer A is whole on all tensor parallel ranks, of a row parallel one B. Adapters of tensors that share
a storage, such as query, key and value, stay apart, as in peft's format; rows of one tensor that lie apart on a rank
lie in its B one behind the other.

The units of a stage are the embedding, the fused query, key and value of each decoder layer, its experts, the rest of
that layer, the final norm and the output layer. So their memory can be released alone, or shared with generation, which
stores the rest of a layer alike but seldom the fused rows; and an optimizer step can update and gather each alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from math import prod
from operator import add

from hybridflow.config import LoRA, Megatron
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.lora.targets import adapter_tensors, modules, parts, trained_tensors
from hybridflow.engines.units import Unit, owned_layout
from hybridflow.errors import ModelError, PlacementError
from hybridflow.models.architecture import Experts, architecture
from hybridflow.models.hf_spec import Decoder, check_shared_heads
from hybridflow.models.spec import Part
from hybridflow.settings import require
from hybridflow.topology import RankGrid

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(?:(self_attention\.linear_qkv\.)|(mlp\.experts\.\d+\.))?")
CONSTANT = ".mlp.router.bias"
_EXPERT = re.compile(r"\.experts\.\d+\.")


def check(strategy: Megatron, spec: Decoder, grid: RankGrid, role: str = "the model") -> None:
    """Errors: ModelError when the model is not computed here, or cannot be split by t, p, the stages' layers and the
    shares of experts; PlacementError for a grid with other shares than the strategy's; ConfigError for a target of LoRA
    that matches nothing, and for dropout with tensor parallel ranks."""
    if (grid.ep, grid.etp) != (strategy.ep, strategy.etp):
        raise PlacementError(
            f"{role} has a grid of its own with ep={grid.ep}, etp={grid.etp}, {strategy} asks for ep={strategy.ep}, "
            f"etp={strategy.etp}. Give both the same, or leave grid= out."
        )
    if grid.d % strategy.cp:
        raise PlacementError(
            f"{role} has a grid of its own with d={grid.d}, which does not divide by cp={strategy.cp}."
        )
    found = architecture(spec)
    found.check_parallel(grid.p, grid.t, role, strategy.stage_layers)
    found.check_experts(grid.experts.ep, grid.experts.etp, role)
    check_shared_heads(spec, strategy.cp, grid.t, strategy.packed, role)
    _check_tensors(spec)
    if (lora := strategy.lora) is None:
        return
    modules(spec, lora)
    require(
        grid.t == 1 or not lora.dropout,
        f"{role}: LoRA(dropout={lora.dropout}) with t={grid.t}: tensor parallel ranks would drop different inputs "
        f"of one layer. Use dropout=0 or tp=1.",
    )


@lru_cache(maxsize=64)
def _check_tensors(spec: Decoder) -> None:
    """Errors: ModelError for a tensor of the model that has no place here, or of which a part is left out."""
    held = dict.fromkeys(spec.tensors(), 0)
    try:
        for region in _Stage(spec, RankGrid(), 0, range(spec.layers)).regions():
            held[region.box.tensor] += region.box.numel
    except KeyError as missing:
        raise ModelError(f"this {spec.family} model lacks {missing}, which Megatron computes with.") from None
    for name, shape in spec.tensors().items():
        if held[name] != prod(shape):
            raise ModelError(
                f"Megatron has no place for {name} {shape} of this {spec.family} model. Use FSDP() or ZeRO(), which "
                f"take any decoder."
            )


def weights_layout(strategy: Megatron, spec: Decoder, grid: RankGrid) -> Layout:
    """Which rank of `grid` holds which boxes of `spec`. Errors: those of `megatron_layout`."""
    return megatron_layout(spec, grid, strategy.stage_layers)


def state_layout(strategy: Megatron, spec: Decoder, grid: RankGrid) -> Layout:
    """Layout of one kind of optimizer state (main parameters, or a moment); all kinds have the same.

    As in Megatron's distributed optimizer, of every unit's buffer each data parallel rank owns one contiguous range.
    Padding of the vocabulary has state too, which is zero and in no box. With LoRA it is that of the tensors that are
    trained. Errors: those of `check`.
    """
    held = trained_layout(strategy, spec, grid)

    def of_rank(rank: int) -> list[tuple[Unit, int, int]]:
        dense, experts = (grid.d, grid.coords(rank).d), (grid.experts.edp, grid.experts.coords(rank).edp)
        of_stage = units(spec, grid, rank, strategy.stage_layers)
        if strategy.lora is not None:
            of_stage += adapter_units(held, rank, of_stage)
        return [(unit, *(experts if unit.experts else dense)) for unit in of_stage]

    return owned_layout(held, of_rank)


def trained_layout(strategy: Megatron, spec: Decoder, grid: RankGrid) -> Layout:
    """Layout of the parameters, with LoRA of those that are trained. Errors: those of `check`."""
    weights = weights_layout(strategy, spec, grid)
    if strategy.lora is None:
        return weights
    return adapter_layout(weights, spec, strategy.lora, grid)


def megatron_layout(spec: Decoder, grid: RankGrid, stage_layers: Sequence[int] | None = None) -> Layout:
    """Layout of `spec` over `grid`; data parallel ranks hold the same boxes, except of experts.

    `stage_layers` are the decoder layers of each pipeline stage (default: as even as can be, larger stages first).
    Errors: ModelError when the model cannot be split so (`Architecture.check_parallel`, `check_experts`).
    """
    found = architecture(spec)
    found.check_parallel(grid.p, grid.t, stage_layers=stage_layers)
    found.check_experts(grid.experts.ep, grid.experts.etp)
    split = stages(spec.layers, grid.p, stage_layers)

    def regions(rank: int) -> list[Region]:
        return _Stage(spec, grid, rank, split[grid.coords(rank).p]).regions()

    def part(rank: int) -> tuple[int, ...]:
        own = grid.coords(rank)[:2]
        return own if found.experts is None else (*own, grid.experts.coords(rank).ep, grid.experts.coords(rank).etp)

    return Layout(spec.tensors(), grid.size, regions, part=part)


class _Stage:
    """One rank's regions of each tensor; `layers` are its stage's decoder layers."""

    def __init__(self, spec: Decoder, grid: RankGrid, rank: int, layers: range) -> None:
        self.spec, self.arch, self.grid, self.layers = spec, architecture(spec), grid, layers
        self.at, self.tensors = grid.coords(rank), spec.tensors()
        self.share = grid.experts.coords(rank)

    def regions(self) -> list[Region]:
        spec, first, last = self.spec, self.at.p == 0, self.at.p == self.grid.p - 1
        out: list[Region] = []
        if first:
            out += self._vocabulary("model.embed_tokens.weight", EMBEDDING)
        for local, layer in enumerate(self.layers):
            out += self._layer(layer, f"decoder.layers.{local}.")
        if not last:
            return out
        out += self._whole("model.norm.weight", "decoder.final_layernorm.weight")
        if spec.head == "value":
            out += self._whole("score.weight", OUTPUT)
        elif not spec.tied:
            out += self._vocabulary("lm_head.weight", OUTPUT)
        elif not first:
            out += self._vocabulary("model.embed_tokens.weight", OUTPUT)
        return out

    def _layer(self, layer: int, to: str) -> list[Region]:
        name, arch, out = f"model.layers.{layer}.", self.arch, list[Region]()
        for norm, place in (
            (arch.norms.before_attention, "input_layernorm"),
            (arch.norms.after_attention, "self_attention.linear_proj.post_layernorm"),
            (arch.norms.before_mlp, "pre_mlp_layernorm"),
            (arch.norms.after_mlp, "mlp.post_layernorm" if arch.sparse[layer] else "mlp.linear_fc2.post_layernorm"),
        ):
            out += self._whole(f"{name}{norm}.weight", f"{to}{place}.weight") if norm else []
        attention, to_attention = f"{name}self_attn.", f"{to}self_attention."
        if arch.latent is not None:
            out += self._latent(attention, to_attention)
        else:
            for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
                out += self._qkv(attention, f"{to_attention}linear_qkv.", kind)
        out += self._shard(f"{attention}o_proj.weight", f"{to_attention}linear_proj.weight", dim=1)
        for norm in "qk" if arch.qk_norm else "":
            cut = self._whole if arch.qk_norm == "head" else self._shard
            out += cut(f"{attention}{norm}_norm.weight", f"{to_attention}{norm}_layernorm.weight")
        if arch.experts is not None and arch.sparse[layer]:
            return out + self._experts(arch.experts, name, f"{to}mlp.")
        return out + self._mlp([f"{name}mlp.{part}" for part in arch.gate_up], f"{name}mlp.down_proj", f"{to}mlp.")

    def _mlp(self, gate_up: Sequence[str], down: str, to: str) -> list[Region]:
        """Gate and up may be the halves of one tensor."""
        fused, out = len(gate_up) == 1, list[Region]()
        for half in range(2):
            tensor = f"{gate_up[0 if fused else half]}.weight"
            columns = self.tensors[tensor][0] // (1 + fused)
            here = columns // self.grid.t
            row = half * columns * fused + self.at.t * here
            out.append(self._rows(tensor, f"{to}linear_fc1.weight", row, row + here, half * here))
        return out + self._shard(f"{down}.weight", f"{to}linear_fc2.weight", dim=1)

    def _experts(self, experts: Experts, name: str, to: str) -> list[Region]:
        router, gate, up, down, shared, shared_gate = (f"{name}{part}" for part in experts.names)
        out = list(self._whole(f"{router}.weight", f"{to}router.weight"))
        if experts.bias:
            out += self._whole(f"{name}{experts.bias}", f"{to}router.bias")
        if experts.shared_columns:
            parts = [f"{shared}.{part}_proj" for part in ("gate", "up", "down")]
            out += self._mlp(parts[:2], parts[2], f"{to}shared.")
        if experts.shared_gate:
            out += self._whole(f"{shared_gate}.weight", f"{to}shared_gate.weight")
        here = experts.count // self.grid.experts.ep
        mine = [(e, f"{to}experts.{e}.") for e in range(here)]  # all first matrices, then all second ones: see `units`
        first, width = self.share.ep * here, experts.columns // self.grid.experts.etp
        start = self.share.etp * width
        for e, place in mine:
            for half, part in enumerate((gate, up)):
                tensor = f"{part.format(first + e)}.weight"
                out.append(self._rows(tensor, f"{place}fc1", start, start + width, half * width))
        for e, place in mine:
            tensor = f"{down.format(first + e)}.weight"
            rows = self.tensors[tensor][0]
            out.append(Region.first(Box(tensor, (0, start), (rows, start + width)), f"{place}fc2"))
        return out

    def _latent(self, name: str, to: str) -> list[Region]:
        """What queries, keys and values come from is whole, the matrices that make heads of it are cut by heads."""
        assert self.arch.latent is not None
        out, query = list[Region](), "q_b_proj" if self.arch.latent.query_rank else "q_proj"
        if self.arch.latent.query_rank:
            out += self._whole(f"{name}q_a_proj.weight", f"{to}linear_q_down.weight")
            out += self._whole(f"{name}q_a_layernorm.weight", f"{to}q_layernorm.weight")
        out += self._shard(f"{name}{query}.weight", f"{to}linear_q_up.weight")
        out += self._whole(f"{name}kv_a_proj_with_mqa.weight", f"{to}linear_kv_down.weight")
        out += self._whole(f"{name}kv_a_layernorm.weight", f"{to}kv_layernorm.weight")
        return out + self._shard(f"{name}kv_b_proj.weight", f"{to}linear_kv_up.weight")

    def _qkv(self, name: str, to: str, kind: str) -> list[Region]:
        """This rank's part of the rows of every kv-head's query heads, key head and value head, one after the other.

        The model's rows may be one tensor, all queries before all keys before all values."""
        d, heads, kv_heads = self.arch.head_dim, self.arch.heads, self.arch.kv_heads
        shared, fused = heads // kv_heads, len(self.arch.qkv) == 1
        here = (shared + 2) * d * kv_heads // self.grid.t
        first, out = self.at.t * here, []
        begins = (0, heads * d, (heads + kv_heads) * d) if fused else (0, 0, 0)
        for head in range(kv_heads):
            at = head * (shared + 2) * d
            for which, count in enumerate((shared, 1, 1)):
                start, stop = max(at, first), min(at + count * d, first + here)
                if start < stop:
                    row = begins[which] + head * count * d + start - at
                    tensor = f"{name}{self.arch.qkv[0 if fused else which]}.{kind}"
                    out.append(self._rows(tensor, to + kind, row, row + stop - start, start - first))
                at += count * d
        return out

    def _vocabulary(self, name: str, to: str) -> list[Region]:
        start, stop = vocabulary_rows(self.spec.vocab, self.grid.t, self.at.t)
        return [self._rows(name, to, start, stop, 0)] if start < stop else []

    def _rows(self, name: str, to: str, start: int, stop: int, offset: int) -> Region:
        return Region.rows(name, self.tensors[name], to, start, stop, offset)

    def _shard(self, name: str, to: str, dim: int = 0) -> list[Region]:
        """The t-th part along `dim`."""
        shape = self.tensors[name]
        size = shape[dim] // self.grid.t
        start, stop = [0] * len(shape), list(shape)
        start[dim], stop[dim] = self.at.t * size, (self.at.t + 1) * size
        return [Region.first(Box(name, tuple(start), tuple(stop)), to)]

    def _whole(self, name: str, to: str) -> list[Region]:
        return [Region.whole(name, self.tensors[name], to)]


# Units


def stages(layers: int, p: int, stage_layers: Sequence[int] | None = None) -> tuple[range, ...]:
    """Decoder layers of each pipeline stage; by default as even as can be, larger stages first."""
    counts = stage_layers or [layers // p + (stage < layers % p) for stage in range(p)]
    starts = [sum(counts[:stage]) for stage in range(p)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def padded_vocab(vocab: int, t: int) -> int:
    """Rows of the embedding over all t ranks: the vocabulary rounded up to a multiple of t."""
    return -(-vocab // t) * t


def vocabulary_rows(vocab: int, t: int, at: int) -> tuple[int, int]:
    """The token ids whose rows tensor parallel rank `at` holds; the rest of its rows are padding."""
    here = padded_vocab(vocab, t) // t
    return min(vocab, at * here), min(vocab, (at + 1) * here)


def units(spec: Decoder, grid: RankGrid, rank: int, stage_layers: Sequence[int] | None = None) -> list[Unit]:
    at = grid.coords(rank)
    here, first, last = stages(spec.layers, grid.p, stage_layers)[at.p], at.p == 0, at.p == grid.p - 1
    vocabulary = (padded_vocab(spec.vocab, grid.t) // grid.t, spec.hidden)
    own_output = spec.head == "value" or not spec.tied
    behind = int(own_output)  # the part of the final norm: it is too small for one, without an output layer of its own
    fused, experts, rest, bias = ([dict[str, tuple[int, ...]]() for _ in here] for _ in range(4))
    for region in _Stage(spec, grid, rank, here).regions():
        if (found := _LAYER.match(region.storage)) is not None:
            kind = bias if region.storage.endswith(CONSTANT) else fused if found[2] else experts if found[3] else rest
            shapes = kind[int(found[1])]
            end = tuple(map(add, region.offset, region.box.shape))
            shapes[region.storage] = tuple(map(max, end, shapes.get(region.storage, end)))
    out = [Unit({EMBEDDING: vocabulary}, part=0)] if first else []
    for part, layer in enumerate(zip(fused, rest, bias, experts, strict=True), start=behind + 1):
        out += [Unit(shapes, part=part) for shapes in layer[:3] if shapes]  # a bias is float32, whatever the others are
        if layer[3]:
            out.append(Unit(layer[3], _stacked(layer[3]), part, experts=True))
    if last:
        out.append(Unit({"decoder.final_layernorm.weight": (spec.hidden,)}, part=behind))
    if last and not (first and not own_output):
        # a copy of tied embeddings steps with the original, and is cut over data parallel ranks like it
        out.append(Unit({OUTPUT: (1, spec.hidden) if spec.head == "value" else vocabulary}, part=behind))
    return out


def _stacked(matrices: dict[str, tuple[int, ...]]) -> dict[str, Part]:
    """The parameters in which a rank's experts lie one behind the other."""
    found: dict[str, list[str]] = {}
    for name in matrices:
        found.setdefault(_EXPERT.sub(".experts.", name), []).append(name)
    return {name: Part((len(own), *matrices[own[0]]), tuple(own)) for name, own in found.items()}


CHILD = "adapters"  # the module of a linear layer that has its adapters
Extent = tuple[tuple[int, int], list[tuple[int, int]]]
"""Columns of a tensor, and rows that do not touch each other, that a storage holds."""


def adapter_layout(weights: Layout, spec: Decoder, lora: LoRA, grid: RankGrid) -> Layout:
    """Layout of what is trained beside `weights`, those of `spec` on `grid`: adapters, and a value head.

    Errors: ConfigError for a target of LoRA that matches nothing.
    """
    targets = {f"{module}.weight": module for module in modules(spec, lora)}
    tensors, shapes = trained_tensors(spec, lora), spec.tensors()
    heads = tensors.keys() - adapter_tensors(spec, lora).keys()

    @cache
    def extents(rank: int) -> dict[tuple[str, str], Extent]:
        return _extents(region for region in weights.regions(rank) if region.box.tensor in targets)

    def regions(rank: int) -> list[Region]:
        here, found = extents(rank), list[Region]()
        for storage, tensor in dict.fromkeys(key for peer in grid.group(rank, "t") for key in extents(peer)):
            # of a layer of which it holds no rows a rank has A alone: all compute the columns that they exchange
            (left, right), rows = here.get((storage, tensor), ((0, shapes[tensor][1]), []))
            (a, b), at = parts(targets[tensor]), 0
            found.append(_region(Box(a, (0, left), (lora.rank, right)), storage))
            for first, last in rows:
                found.append(_region(Box(b, (first, 0), (last, lora.rank)), storage, at))
                at += last - first
        return found + [region for region in weights.regions(rank) if region.box.tensor in heads]

    return Layout(tensors, weights.ranks, regions, weights.part)


def _extents(regions: Iterable[Region]) -> dict[tuple[str, str], Extent]:
    """Of each (storage, tensor), in the order of the model."""
    found: dict[tuple[str, str], list[Box]] = {}
    for region in regions:
        found.setdefault((region.storage, region.box.tensor), []).append(region.box)
    return {
        key: ((own[0].start[1], own[0].stop[1]), _joined(sorted(box.rows for box in own))) for key, own in found.items()
    }


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, last in ranges:
        found.append((found.pop()[0], last) if found and found[-1][1] == first else (first, last))
    return found


def _region(box: Box, weight: str, row: int = 0) -> Region:
    layer, _, name = box.tensor.rpartition(".lora_")
    storage = f"{weight.removesuffix('.weight')}.{CHILD}.{layer.rpartition('.')[2]}.lora_{name}"
    return Region(box, storage, (row, 0))


def shape_of(regions: Iterable[Region]) -> tuple[int, ...]:
    """The shape of a storage of which these are all regions."""
    ends = [map(add, region.offset, region.box.shape) for region in regions]
    return tuple(map(max, zip(*ends, strict=True)))


def adapter_units(layout: Layout, rank: int, of_stage: Sequence[Unit]) -> list[Unit]:
    """The adapters of each decoder layer, which are stepped with its weights; `of_stage` are the units of these."""
    part_of = {name: unit.part for unit in of_stage for name in unit.parameters}
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for storage, regions in layout.storages(rank).items():
        if storage not in part_of:
            weight = f"{storage.partition(f'.{CHILD}.')[0]}.weight"
            found.setdefault(part_of[weight], {})[storage] = shape_of(regions)
    return [Unit(shapes, part=part) for part, shapes in found.items()]
