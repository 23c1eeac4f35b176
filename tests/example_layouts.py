"""Layouts of a small decoder as plain functions, as different as real engines make them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import torch

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.models.spec import ModelSpec

SPEC = ModelSpec(
    family="qwen2", hidden=8, intermediate=12, layers=3, heads=4, kv_heads=2, head_dim=2, vocab=10, qkv_bias=True
)
TIED = ModelSpec(
    family="llama", hidden=8, intermediate=12, layers=3, heads=4, kv_heads=2, head_dim=2, vocab=10, tied=True
)

SIX = ModelSpec(family="qwen3", hidden=12, intermediate=12, layers=6, heads=6, kv_heads=2, head_dim=2, vocab=7)


def whole(spec: ModelSpec, copies: int = 1) -> Layout:
    """Every rank holds everything."""
    shapes = spec.tensors()
    regions = [Region(Box.whole(name, shape), name, (0,) * len(shape)) for name, shape in shapes.items()]
    return Layout(shapes, copies, lambda rank: regions, part=lambda rank: 0)


def row_shards(spec: ModelSpec, ranks: int) -> Layout:
    """The rows of every tensor over all ranks, ceil-divided as FSDP does: the last ranks may get none."""
    shapes = spec.tensors()

    def regions(rank: int) -> list[Region]:
        out = []
        for name, shape in shapes.items():
            step = -(-shape[0] // ranks)
            a, b = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
            if a < b:
                box = Box(name, (a, *(0 for _ in shape[1:])), (b, *shape[1:]))
                out.append(Region(box, name, (0,) * len(shape)))
        return out

    return Layout(shapes, ranks, regions)


def fused(spec: ModelSpec, p: int, t: int, d: int) -> Layout:
    """Megatron-like (p, t, d): q, k, v interleaved by kv group in one storage, gate over up, padded vocabulary.

    Layers are dealt unevenly when p does not divide them, kv heads are repeated when t exceeds them, and a tied
    embedding is stored twice: on the first stage and, as the output layer, on the last (also when that is the same).
    """
    shapes = spec.tensors()

    def regions(rank: int) -> list[Region]:
        rest, t_i = divmod(rank, t)
        p_i = rest % p
        out = []
        padded = -(-spec.vocab // t)
        a, b = min(t_i * padded, spec.vocab), min((t_i + 1) * padded, spec.vocab)
        embedding = Box("model.embed_tokens.weight", (a, 0), (b, spec.hidden))
        if p_i == 0:
            out.append(Region(embedding, "embedding", (0, 0)))
        for layer in range(spec.layers * p_i // p, spec.layers * (p_i + 1) // p):
            out += _layer(spec, layer, t, t_i)
        if p_i == p - 1:
            out.append(Region(Box("model.norm.weight", (0,), (spec.hidden,)), "norm", (0,)))
            name = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
            out.append(Region(Box(name, embedding.start, embedding.stop), "output", (0, 0)))
        return [region for region in out if region.box.numel]

    return Layout(shapes, p * t * d, regions, part=lambda rank: rank % (p * t))


def _layer(spec: ModelSpec, layer: int, t: int, t_i: int) -> list[Region]:
    at, width, h = f"model.layers.{layer}.", spec.head_dim, spec.hidden
    out = []
    kv = max(1, spec.kv_heads // t)
    first_kv = t_i * spec.kv_heads // t
    queries = spec.heads // t
    row = 0
    for group in range(kv):
        per_group = queries // kv
        q = (t_i * queries + group * per_group) * width
        k = (first_kv + group) * width
        for part, start, size in (("q", q, per_group * width), ("k", k, width), ("v", k, width)):
            name = f"{at}self_attn.{part}_proj"
            out.append(Region(Box(f"{name}.weight", (start, 0), (start + size, h)), f"{layer}.qkv", (row, 0)))
            if spec.qkv_bias:
                out.append(Region(Box(f"{name}.bias", (start,), (start + size,)), f"{layer}.qkv_bias", (row,)))
            row += size
    columns = queries * width
    box = Box(f"{at}self_attn.o_proj.weight", (0, t_i * columns), (h, (t_i + 1) * columns))
    out.append(Region(box, f"{layer}.o", (0, 0)))
    inner = spec.intermediate // t
    for i, part in enumerate(("gate", "up")):
        box = Box(f"{at}mlp.{part}_proj.weight", (t_i * inner, 0), ((t_i + 1) * inner, h))
        out.append(Region(box, f"{layer}.gate_up", (i * inner, 0)))
    box = Box(f"{at}mlp.down_proj.weight", (0, t_i * inner), (h, (t_i + 1) * inner))
    out.append(Region(box, f"{layer}.down", (0, 0)))
    for name in ("input_layernorm", "post_attention_layernorm"):
        out.append(Region(Box(f"{at}{name}.weight", (0,), (h,)), f"{layer}.{name}", (0,)))
    return out


def scattered(spec: ModelSpec, ranks: int, seed: int) -> Layout:
    """Every tensor cut into a random grid whose cells lie, at random offsets, on random sets of ranks."""
    rng = random.Random(seed)
    shapes = spec.tensors()
    held: list[list[Region]] = [[] for _ in range(ranks)]
    for name, shape in shapes.items():
        cuts = [sorted({0, size, *rng.choices(range(size), k=rng.randint(0, 2))}) for size in shape]
        for i, edges in enumerate(itertools.product(*(itertools.pairwise(cut) for cut in cuts))):
            box = Box(name, tuple(a for a, _ in edges), tuple(b for _, b in edges))
            for rank in rng.sample(range(ranks), rng.randint(1, ranks)):
                held[rank].append(Region(box, f"{name}.{i}", tuple(rng.randint(0, 2) for _ in shape)))
    return Layout(shapes, ranks, lambda rank: held[rank])


def flat(layout: Layout, d: int) -> Layout:
    """Each rank's regions flattened and cut into `d` even ranges, whatever the rows: distributed optimizer state."""

    def regions(rank: int) -> list[Region]:
        out = []
        for i, region in enumerate(layout.regions(rank % layout.ranks)):
            numel, part = region.box.numel, rank // layout.ranks
            first, until = numel * part // d, numel * (part + 1) // d
            strides = tuple(math.prod(region.box.shape[axis + 1 :]) for axis in range(len(region.box.shape)))
            for at, box in _range(region.box, first, until):
                out.append(Region(box, f"{region.storage}.{i}", (at - first + 1,), strides))
        return out

    return Layout(layout.tensors, layout.ranks * d, regions)


def _range(box: Box, first: int, until: int) -> list[tuple[int, Box]]:
    """Boxes of the elements `first` to `until` of `box` in index order, each with its first element."""
    if first >= until:
        return []
    if (first, until) == (0, box.numel) or not box.start:
        return [(first, box)]
    length = box.shape[0]
    inner = box.numel // length
    if first % inner == until % inner == 0:
        rows = (box.start[0] + first // inner, box.start[0] + until // inner)
        return [(first, Box(box.tensor, (rows[0], *box.start[1:]), (rows[1], *box.stop[1:])))]
    ends = sorted(
        {first, *(n for n in (-(-first // inner) * inner, until // inner * inner) if first < n < until), until}
    )
    out = []
    for a, b in itertools.pairwise(ends):
        if a % inner == b % inner == 0:
            out += _range(box, a, b)
        else:
            row = a // inner
            inside = Box(box.tensor, box.start[1:], box.stop[1:])
            for at, part in _range(inside, a - row * inner, b - row * inner):
                r = box.start[0] + row
                out.append((at + row * inner, Box(box.tensor, (r, *part.start), (r + 1, *part.stop))))
    return out


def side_by_side(one: Layout, other: Layout) -> Layout:
    """Replicas of one model that are sharded differently: the first ranks hold `one`, the next `other`."""

    def regions(rank: int) -> Sequence[Region]:
        return one.regions(rank) if rank < one.ranks else other.regions(rank - one.ranks)

    return Layout(one.tensors, one.ranks + other.ranks, regions)


def placed(layout: Layout, ranks: Sequence[int]) -> Layout:
    """`layout` on these ranks of a larger group; the others hold nothing."""
    at = {rank: i for i, rank in enumerate(ranks)}
    return Layout(layout.tensors, max(ranks) + 1, lambda rank: layout.regions(at[rank]) if rank in at else ())


MAKERS: tuple[Callable[[ModelSpec, random.Random], Layout], ...] = (
    lambda spec, rng: whole(spec, rng.randint(1, 3)),
    lambda spec, rng: row_shards(spec, rng.randint(1, 4)),
    lambda spec, rng: fused(spec, *rng.choice([(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1)])),
    lambda spec, rng: fused(spec, *rng.choice([(1, 1, 4), (1, 2, 2), (2, 1, 1), (4, 1, 1), (1, 1, 3)])),
    lambda spec, rng: scattered(spec, rng.randint(1, 4), rng.randrange(10**6)),
    lambda spec, rng: side_by_side(whole(spec), fused(spec, 1, 2, 1)),
)


def some_layout(spec: ModelSpec, seed: int, ranks: int = 4) -> Layout:
    """One of the above, on a random choice of `ranks` ranks."""
    rng = random.Random(seed)
    layout = rng.choice(MAKERS)(spec, rng)
    return placed(layout, rng.sample(range(ranks), layout.ranks))


MANY: tuple[Callable[[ModelSpec, random.Random], Layout], ...] = (
    *MAKERS,
    lambda spec, rng: fused(spec, *rng.choice([(3, 2, 1), (2, 3, 1), (6, 1, 1), (1, 6, 1), (1, 3, 2), (1, 2, 3)])),
    lambda spec, rng: fused(spec, *rng.choice([(1, 1, 6), (3, 1, 2), (2, 1, 3), (1, 3, 1)])),
    lambda spec, rng: flat(fused(spec, *rng.choice([(1, 1, 1), (1, 2, 1), (2, 1, 1)])), rng.randint(1, 3)),
)


def any_layout(spec: ModelSpec, seed: int, ranks: int = 6) -> Layout:
    """Any of the above, with pipelines and shards of 3 and 6 and flat ranges too, on a random choice of ranks.

    Sizes that the spec's heads do not divide by are left out.
    """
    rng = random.Random(seed)
    while True:
        layout = rng.choice(MANY)(spec, rng)
        if covers(layout):
            return layout.placed(rng.sample(range(ranks), layout.ranks), ranks)


def covers(layout: Layout) -> bool:
    """Whether the ranks together hold every element."""
    held = [elements(layout, rank) for rank in range(layout.ranks)]
    return all(torch.stack([mine[name] for mine in held]).any(0).all() for name in layout.tensors)


def elements(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """Which elements of each canonical tensor the rank holds: booleans of its shape."""
    out = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in layout.tensors.items()}
    for region in layout.regions(rank) if rank < layout.ranks else ():
        out[region.box.tensor][tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))] = (
            True
        )
    return out


def storage_shapes(layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    """The smallest storages that hold a rank's regions."""
    out: dict[str, tuple[int, ...]] = {}
    for region in layout.regions(rank) if rank < layout.ranks else ():
        if region.strides is None:
            ends = tuple(s.stop for s in region.index())
        else:
            steps = zip(region.box.shape, region.strides, strict=True)
            ends = (region.offset[0] + 1 + sum((n - 1) * step for n, step in steps),)
        out[region.storage] = tuple(map(max, out.get(region.storage, ends), ends))
    return out
