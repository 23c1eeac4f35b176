"""The boxes of canonical tensors that each Megatron rank holds, and the units of its pipeline stage. Pure.

Storage names are the local parameter names of Megatron's GPTModel: layers are counted from 0 on every pipeline stage,
query, key and value rows are interleaved per kv-head (`q q k v | q q k v`), gate and up rows follow each other, the
vocabulary is padded to a multiple of t, and with tied embeddings the last of several stages has a copy of its own.
The interleaved rows are cut into t equal parts, also where that cuts through a kv-head because there are fewer of them
than ranks (Megatron then gathers activations, not weights; see `layers.SharedHeadAttention`).

The units of a stage are the embedding, the fused query, key and value of each decoder layer, the rest of that layer,
the final norm and the output layer. So their memory can be released alone, or shared with generation, which stores the
rest of a layer alike but seldom the fused rows; and an optimizer step can update and gather each alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import add

from hybridflow.config import Megatron
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.lora.targets import modules
from hybridflow.engines.megatron.adapter_layout import adapter_layout, adapter_units
from hybridflow.engines.units import Unit, owned_layout
from hybridflow.models.spec import ModelSpec
from hybridflow.settings import require
from hybridflow.topology import Coords, RankGrid

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(self_attention\.linear_qkv\.)?")


def check(strategy: Megatron, spec: ModelSpec, grid: RankGrid, role: str = "the model") -> None:
    """Errors: ModelError when the model cannot be split by t, p and the stages' layers; ConfigError for a target of
    LoRA that matches nothing, and for dropout with tensor parallel ranks."""
    spec.check_parallel(grid.p, grid.t, role, strategy.stage_layers)
    if (lora := strategy.lora) is not None:
        modules(spec, lora)
        require(
            grid.t == 1 or not lora.dropout,
            f"{role}: LoRA(dropout={lora.dropout}) with t={grid.t}: tensor parallel ranks would drop different inputs "
            f"of one layer. Use dropout=0 or tp=1.",
        )


def weights_layout(strategy: Megatron, spec: ModelSpec, grid: RankGrid) -> Layout:
    """Which rank of `grid` holds which boxes of `spec`. Errors: those of `megatron_layout`."""
    return megatron_layout(spec, grid, strategy.stage_layers)


def state_layout(strategy: Megatron, spec: ModelSpec, grid: RankGrid) -> Layout:
    """Layout of one kind of optimizer state (main parameters, or a moment); all kinds have the same.

    As in Megatron's distributed optimizer, of every unit's buffer each data parallel rank owns one contiguous range.
    Padding of the vocabulary has state too, which is zero and in no box. With LoRA it is that of the tensors that are
    trained. Errors: those of `check`.
    """
    held = trained_layout(strategy, spec, grid)

    def of_rank(rank: int) -> tuple[list[Unit], int, int]:
        at = grid.coords(rank)
        of_stage = units(spec, grid, at, strategy.stage_layers)
        if strategy.lora is not None:
            of_stage += adapter_units(held, rank, of_stage)
        return of_stage, grid.d, at.d

    return owned_layout(held, of_rank)


def trained_layout(strategy: Megatron, spec: ModelSpec, grid: RankGrid) -> Layout:
    """Layout of the parameters, with LoRA of those that are trained. Errors: those of `check`."""
    weights = weights_layout(strategy, spec, grid)
    return weights if strategy.lora is None else adapter_layout(weights, spec, strategy.lora, grid)


def megatron_layout(spec: ModelSpec, grid: RankGrid, stage_layers: Sequence[int] | None = None) -> Layout:
    """Layout of `spec` over `grid`; data parallel ranks hold the same boxes.

    `stage_layers` are the decoder layers of each pipeline stage (default: as even as can be, larger stages first).
    Errors: ModelError when the model cannot be split by t and p (`ModelSpec.check_parallel`).
    """
    spec.check_parallel(grid.p, grid.t, stage_layers=stage_layers)
    tensors, split = spec.tensors(), stages(spec.layers, grid.p, stage_layers)

    def regions(rank: int) -> list[Region]:
        at = grid.coords(rank)
        return _Stage(spec, grid, at, split[at.p], tensors).regions()

    return Layout(tensors, grid.size, regions, part=lambda rank: grid.coords(rank)[:2])


class _Stage:
    """One rank's regions of each tensor; `layers` are its stage's decoder layers."""

    def __init__(
        self, spec: ModelSpec, grid: RankGrid, at: Coords, layers: range, tensors: dict[str, tuple[int, ...]]
    ) -> None:
        self.spec, self.grid, self.at, self.layers, self.tensors = spec, grid, at, layers, tensors

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
        name = f"model.layers.{layer}."
        out = [
            *self._whole(f"{name}input_layernorm.weight", f"{to}input_layernorm.weight"),
            *self._qkv(f"{name}self_attn.", f"{to}self_attention.linear_qkv.", "weight"),
            *self._shard(f"{name}self_attn.o_proj.weight", f"{to}self_attention.linear_proj.weight", dim=1),
            *self._whole(f"{name}post_attention_layernorm.weight", f"{to}pre_mlp_layernorm.weight"),
            *self._shard(f"{name}mlp.gate_proj.weight", f"{to}mlp.linear_fc1.weight", dim=0),
            *self._shard(
                f"{name}mlp.up_proj.weight", f"{to}mlp.linear_fc1.weight", 0, self.spec.intermediate // self.grid.t
            ),
            *self._shard(f"{name}mlp.down_proj.weight", f"{to}mlp.linear_fc2.weight", dim=1),
        ]
        if self.spec.qkv_bias:
            out += self._qkv(f"{name}self_attn.", f"{to}self_attention.linear_qkv.", "bias")
        if self.spec.qk_norm:
            out += self._whole(f"{name}self_attn.q_norm.weight", f"{to}self_attention.q_layernorm.weight")
            out += self._whole(f"{name}self_attn.k_norm.weight", f"{to}self_attention.k_layernorm.weight")
        return out

    def _qkv(self, name: str, to: str, kind: str) -> list[Region]:
        """This rank's part of the rows of every kv-head's query heads, key head and value head, one after the other."""
        d, shared = self.spec.head_dim, self.spec.heads // self.spec.kv_heads
        here = (shared + 2) * d * self.spec.kv_heads // self.grid.t
        first, out = self.at.t * here, []
        for head in range(self.spec.kv_heads):
            at = head * (shared + 2) * d
            for which, heads in (("q", shared), ("k", 1), ("v", 1)):
                start, stop = max(at, first), min(at + heads * d, first + here)
                if start < stop:
                    row = head * heads * d + start - at
                    tensor = f"{name}{which}_proj.{kind}"
                    out.append(self._rows(tensor, to + kind, row, row + stop - start, start - first))
                at += heads * d
        return out

    def _vocabulary(self, name: str, to: str) -> list[Region]:
        start, stop = vocabulary_rows(self.spec.vocab, self.grid.t, self.at.t)
        return [self._rows(name, to, start, stop, 0)] if start < stop else []

    def _rows(self, name: str, to: str, start: int, stop: int, offset: int) -> Region:
        rest = self.tensors[name][1:]
        zeros = (0,) * len(rest)
        return Region(Box(name, (start, *zeros), (stop, *rest)), to, (offset, *zeros))

    def _shard(self, name: str, to: str, dim: int, offset: int = 0) -> list[Region]:
        """The t-th part along `dim`, stored at `offset` along dimension 0."""
        shape = self.tensors[name]
        size = shape[dim] // self.grid.t
        start, stop = [0] * len(shape), list(shape)
        start[dim], stop[dim] = self.at.t * size, (self.at.t + 1) * size
        return [Region(Box(name, tuple(start), tuple(stop)), to, (offset, *[0] * (len(shape) - 1)))]

    def _whole(self, name: str, to: str) -> Sequence[Region]:
        shape = self.tensors[name]
        return [Region(Box.whole(name, shape), to, (0,) * len(shape))]


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


def units(spec: ModelSpec, grid: RankGrid, at: Coords, stage_layers: Sequence[int] | None = None) -> list[Unit]:
    here, first, last = stages(spec.layers, grid.p, stage_layers)[at.p], at.p == 0, at.p == grid.p - 1
    vocabulary = (padded_vocab(spec.vocab, grid.t) // grid.t, spec.hidden)
    own_output = spec.head == "value" or not spec.tied
    behind = int(own_output)  # the part of the final norm: it is too small for one, without an output layer of its own
    fused: list[dict[str, tuple[int, ...]]] = [{} for _ in here]
    rest: list[dict[str, tuple[int, ...]]] = [{} for _ in here]
    for region in _Stage(spec, grid, at, here, spec.tensors()).regions():
        if (found := _LAYER.match(region.storage)) is not None:
            shapes = (fused if found[2] else rest)[int(found[1])]
            end = tuple(map(add, region.offset, region.box.shape))
            shapes[region.storage] = tuple(map(max, end, shapes.get(region.storage, end)))
    out = [Unit({EMBEDDING: vocabulary}, part=0)] if first else []
    for part, layer in enumerate(zip(fused, rest, strict=True), start=behind + 1):
        out += [Unit(shapes, part=part) for shapes in layer]
    if last:
        out.append(Unit({"decoder.final_layernorm.weight": (spec.hidden,)}, part=behind))
    if last and not (first and not own_output):
        # a copy of tied embeddings steps with the original, and is cut over data parallel ranks like it
        out.append(Unit({OUTPUT: (1, spec.hidden) if spec.head == "value" else vocabulary}, part=behind))
    return out
