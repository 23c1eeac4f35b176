"""The boxes of canonical tensors that each Megatron rank holds. Pure.

Storage names are the local parameter names of Megatron's GPTModel: layers are counted from 0 on every pipeline stage,
query, key and value rows are interleaved per kv-head (`q q k v | q q k v`), gate and up rows follow each other, the
vocabulary is padded to a multiple of t, and with tied embeddings the last of several stages has a copy of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.model_spec import ModelSpec
from hybridflow.topology import Coords, RankGrid

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def megatron_layout(spec: ModelSpec, grid: RankGrid) -> Layout:
    """Layout of `spec` over `grid`; data parallel ranks hold the same boxes.

    Errors: ModelError when heads, kv-heads, MLP columns or layers do not divide by t and p.
    """
    spec.check_parallel(grid.p, grid.t)
    tensors = spec.tensors()
    return Layout(tensors, grid.size, lambda rank: _Stage(spec, grid, grid.coords(rank), tensors).regions())


def padded_vocab(vocab: int, t: int) -> int:
    """Rows of the embedding over all t ranks: the vocabulary rounded up to a multiple of t."""
    return -(-vocab // t) * t


class _Stage:
    """What one rank holds of each tensor."""

    def __init__(self, spec: ModelSpec, grid: RankGrid, at: Coords, tensors: dict[str, tuple[int, ...]]) -> None:
        self.spec, self.grid, self.at, self.tensors = spec, grid, at, tensors

    def regions(self) -> list[Region]:
        spec, first, last = self.spec, self.at.p == 0, self.at.p == self.grid.p - 1
        out: list[Region] = []
        if first:
            out += self._vocabulary("model.embed_tokens.weight", EMBEDDING)
        per_stage = spec.layers // self.grid.p
        for local in range(per_stage):
            out += self._layer(self.at.p * per_stage + local, f"decoder.layers.{local}.")
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
        """For each of this rank's kv-heads: its query heads, its key head, its value head."""
        d, shared = self.spec.head_dim, self.spec.heads // self.spec.kv_heads
        here = self.spec.kv_heads // self.grid.t
        out = []
        for local in range(here):
            head = self.at.t * here + local
            offset = local * (shared + 2) * d
            out += [
                self._rows(f"{name}q_proj.{kind}", to + kind, head * shared * d, (head + 1) * shared * d, offset),
                self._rows(f"{name}k_proj.{kind}", to + kind, head * d, (head + 1) * d, offset + shared * d),
                self._rows(f"{name}v_proj.{kind}", to + kind, head * d, (head + 1) * d, offset + (shared + 1) * d),
            ]
        return out

    def _vocabulary(self, name: str, to: str) -> list[Region]:
        here = padded_vocab(self.spec.vocab, self.grid.t) // self.grid.t
        start = self.at.t * here
        stop = min(self.spec.vocab, start + here)
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
