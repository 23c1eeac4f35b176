"""Layout of vLLM's parameters in boxes of the canonical tensors. Pure.

vLLM fuses q, k and v into `qkv_proj` and gate and up into `gate_up_proj` (rows one after the other), replicates
kv-heads when there are fewer of them than tensor parallel ranks, pads the vocabulary to a multiple of 64 and splits it
evenly, and has no `lm_head` when embeddings are tied: the last pipeline stage then holds the embeddings once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

from hybridflow.engine3d.layout import Box, Layout, LayoutParts, Region
from hybridflow.errors import ModelError
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import GenerationGrid

VOCAB_PADDING = 64


def vllm_layout(spec: ModelSpec, grid: GenerationGrid) -> Layout:
    """Regions of every rank of the group in vLLM's own parameter tensors; `storage` names are vLLM's.

    vLLM's padding rows of the vocabulary belong to no region: they are never read.

    Errors: ModelError when vLLM cannot split the model so, see `check_sizes`.
    """
    check_sizes(spec, grid.p, grid.t, f"generation sizes p_g={grid.p}, t_g={grid.t}", "t_g")

    def regions(rank: int) -> Sequence[Region]:
        at = grid.coords(rank)
        return _Shard(spec, at.t, grid.t).stage(at.p, grid.p)

    return Layout(spec.tensors(), grid.size, regions, part=lambda rank: grid.coords(rank)[:2])


def check_sizes(spec: ModelSpec, p: int, t: int, asked: str, name: str) -> None:
    """Errors: ModelError when vLLM cannot split the model into p stages by t shards; `asked` and `name` are the
    sizes, and the name of t, as the caller wrote them."""
    if why := _misfit(spec, t, name):
        fitting = [n for n in range(1, spec.heads + 1) if not _misfit(spec, n, name)]
        raise ModelError(f"{asked}: {why}. Use {name} in {fitting}.")
    if p > spec.layers:
        raise ModelError(f"{asked}: the model has {spec.layers} layers. Use at most as many stages.")


def _misfit(spec: ModelSpec, t: int, name: str) -> str:
    """Why vLLM cannot split the model by t; "" when it can."""
    if spec.heads % t or (spec.kv_heads % t and t % spec.kv_heads):
        heads = f"{spec.heads} heads must divide by {name}"
        return f"{heads}, and {spec.kv_heads} kv-heads must divide by {name} or {name} by them"
    counts = {"MLP columns": spec.intermediate, "padded vocabulary rows": padded_vocab(spec.vocab)}
    return next((f"{count} {what} are not divisible by {name}" for what, count in counts.items() if count % t), "")


def padded_vocab(vocab: int) -> int:
    return -(-vocab // VOCAB_PADDING) * VOCAB_PADDING


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """Layers of one pipeline stage: an uneven rest goes to the stages before the last, from the back."""
    counts = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        counts[-i] += 1
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


class _Shard:
    """Regions of tensor parallel rank `t_i` of `t`."""

    def __init__(self, spec: ModelSpec, t_i: int, t: int) -> None:
        self.spec, self.t_i, self.t = spec, t_i, t
        self.shapes = spec.tensors()

    def stage(self, p_i: int, p: int) -> list[Region]:
        spec, first, last = self.spec, p_i == 0, p_i == p - 1
        out: list[Region] = []
        if first or (spec.tied and last):
            out += self.vocabulary("model.embed_tokens.weight")
        for layer in stage_layers(spec.layers, p_i, p):
            out += self.layer(f"model.layers.{layer}.")
        if last:
            out += self.whole("model.norm.weight")
            if not spec.tied:
                out += self.vocabulary("lm_head.weight")
        return out

    def layer(self, at: str) -> list[Region]:
        spec = self.spec
        heads, kv_heads = spec.heads // self.t, max(1, spec.kv_heads // self.t)
        sharing = max(1, self.t // spec.kv_heads)  # ranks that hold the same kv-head
        q_rows = (self.t_i * heads * spec.head_dim, heads * spec.head_dim)
        kv_rows = (self.t_i // sharing * kv_heads * spec.head_dim, kv_heads * spec.head_dim)
        mlp = spec.intermediate // self.t
        out = self.whole(at + "input_layernorm.weight") + self.whole(at + "post_attention_layernorm.weight")
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            parts = {at + f"self_attn.{name}_proj.{kind}": kv_rows for name in "qkv"}
            out += self.rows(parts | {at + f"self_attn.q_proj.{kind}": q_rows}, at + f"self_attn.qkv_proj.{kind}")
        if spec.qk_norm:
            out += self.whole(at + "self_attn.q_norm.weight") + self.whole(at + "self_attn.k_norm.weight")
        out += self.columns(at + "self_attn.o_proj.weight", *q_rows)
        gate_up = {at + f"mlp.{name}_proj.weight": (self.t_i * mlp, mlp) for name in ("gate", "up")}
        out += self.rows(gate_up, at + "mlp.gate_up_proj.weight")
        return out + self.columns(at + "mlp.down_proj.weight", self.t_i * mlp, mlp)

    def whole(self, tensor: str) -> list[Region]:
        return [Region.whole(tensor, self.shapes[tensor])]

    def rows(self, parts: dict[str, tuple[int, int]], storage: str) -> list[Region]:
        """`parts`: tensor -> (first row, rows), stored one after the other."""
        out, offset = [], 0
        for tensor, (first, count) in parts.items():
            out.append(Region.rows(tensor, self.shapes[tensor], storage, first, first + count, offset))
            offset += count
        return out

    def columns(self, tensor: str, first: int, count: int) -> list[Region]:
        return [Region.first(Box(tensor, (0, first), (self.shapes[tensor][0], first + count)), tensor)]

    def vocabulary(self, tensor: str) -> list[Region]:
        share = padded_vocab(self.spec.vocab) // self.t
        first, last = self.t_i * share, min((self.t_i + 1) * share, self.spec.vocab)
        return self.rows({tensor: (first, last - first)}, tensor) if first < last else []


Found = tuple[tuple[Region, ...], str | None]
"""A rank's regions, or why it has none."""


def probed_layout(
    tensors: Mapping[str, tuple[int, ...]], family: str, grid: GenerationGrid, found: Sequence[Found]
) -> Layout:
    """`found` are the results of one replica's ranks, in (p, t) order; all replicas are equal.

    Errors: ModelError when a rank found no layout, or when vLLM holds some of the tensors nowhere.
    """
    for rank, (_, failure) in enumerate(found):
        if failure is not None:
            raise ModelError(failure if len(found) == 1 else f"{failure} (rank {rank} of the replica)")
    # no closures, because the layout is sent to the driver
    regions = partial(_probed, grid, [regions for regions, _ in found])
    layout = Layout(tensors, grid.size, regions, partial(_place, grid))
    parts = LayoutParts.of(layout, grid.size)
    for name, shape in tensors.items():
        if missing := prod(shape) - sum(box.numel for box, _ in parts.atoms.get(name, ())):
            raise ModelError(
                f"vLLM keeps {missing} elements of {name} {tuple(shape)} of this {family} model in no parameter: it "
                "would not follow the training. Generate with another model."
            )
    return layout


def _place(grid: GenerationGrid, rank: int) -> int:
    """The index of a rank in its replica, in (p, t) order."""
    at = grid.coords(rank)
    return at.p * grid.t + at.t


def _probed(grid: GenerationGrid, parts: Sequence[tuple[Region, ...]], rank: int) -> tuple[Region, ...]:
    return parts[_place(grid, rank)]


def unbuilt_layout(tensors: Mapping[str, tuple[int, ...]], grid: GenerationGrid) -> Layout:
    """Such a layout before its engines are built: only tensors are known, so no plan can use it."""
    return Layout(tensors, grid.size, _unknown, complete=False)


def _unknown(rank: int) -> Sequence[Region]:
    raise ModelError(f"where vLLM keeps the weights of rank {rank} is known when its engine is built. Ask the rank.")
