"""Pairs of layouts on eight ranks, and what a rank must hold and receive when weights go from one to the other."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.models.spec import ModelSpec
from tests.example_layouts import SPEC, TIED, fused, some_layout, storage_shapes

RANKS = 8
_SIXES = {"family": "llama", "hidden": 6, "intermediate": 12, "layers": 3, "heads": 6, "head_dim": 2, "vocab": 11}
MHA = ModelSpec(**_SIXES, kv_heads=6)
MQA = ModelSpec(**_SIXES, kv_heads=1, tied=True)
GQA = ModelSpec(
    family="qwen2", hidden=8, intermediate=16, layers=2, heads=8, kv_heads=2, head_dim=2, vocab=13, qkv_bias=True
)
# every (p, t, d) of at most eight ranks that the family's heads allow
_SIZES = [(p, t, d) for p in range(1, 9) for t in range(1, 9) for d in range(1, 9) if p * t * d <= RANKS]
_TENSOR = {MHA: (1, 2, 3, 6), MQA: (1, 2, 3, 6), GQA: (1, 2, 4, 8)}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Pair:
    source: Layout
    destination: Layout
    dtypes: tuple[torch.dtype, torch.dtype]
    node_of: Callable[[int], int] | None
    bucket_bytes: int


@cache
def canonical(spec_tensors: tuple[tuple[str, tuple[int, ...]], ...], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in spec_tensors}


def values_of(layout: Layout, seed: int) -> dict[str, torch.Tensor]:
    """Canonical tensors of random values; the same for the same model and seed."""
    return canonical(tuple((name, tuple(shape)) for name, shape in layout.tensors.items()), seed)


def some_pair(seed: int) -> Pair:
    """Sharded models on equal, overlapping and disjoint meshes, in boxes, flat buffers and random pieces."""
    rng = random.Random(seed)
    if seed % 3:
        spec = rng.choice((MHA, MQA, GQA))
        sizes = [size for size in _SIZES if size[1] in _TENSOR[spec]]
        layouts = [_meshed(spec, rng.choice(sizes), rng) for _ in range(2)]
    else:
        spec = rng.choice((SPEC, TIED))
        layouts = [some_layout(spec, 2 * seed + i, RANKS) for i in range(2)]
        layouts = [layout.placed(range(layout.ranks), RANKS) for layout in layouts]
    layouts = [flat(layout) if rng.random() < 0.25 else layout for layout in layouts]
    node_of = rng.choice((None, lambda rank: rank // 4, lambda rank: rank // 2))
    limit = 256 if seed % 25 == 0 else rng.choice((2000, 20_000, 1 << 20))
    return Pair(layouts[0], layouts[1], (rng.choice(_FLOATS), rng.choice(_FLOATS)), node_of, limit)


def _meshed(spec: ModelSpec, size: tuple[int, int, int], rng: random.Random) -> Layout:
    layout = fused(spec, *size)
    first = rng.randint(0, RANKS - layout.ranks)
    mesh = rng.choice((range(first, first + layout.ranks), rng.sample(range(RANKS), layout.ranks)))
    return layout.placed(list(mesh), RANKS)


def flat(layout: Layout) -> Layout:
    """The same boxes in one flat buffer per rank, as distributed optimizers keep parameters."""

    def regions(rank: int) -> Sequence[Region]:
        start, base = {}, 0
        shapes = storage_shapes(layout, rank)
        for name, shape in shapes.items():
            start[name] = base
            base += math.prod(shape)
        out = []
        for region in layout.regions(rank) if rank < layout.ranks else ():
            shape = shapes[region.storage]
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            first = start[region.storage] + sum(o * s for o, s in zip(region.offset, strides, strict=True))
            out.append(Region(region.box, "flat", (first,), strides))
        return out

    return Layout(layout.tensors, layout.ranks, regions)


def empty(layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The smallest storages that hold a rank's regions, filled with nines."""
    ends = [
        region.offset[0] + sum((n - 1) * step for n, step in zip(region.box.shape, region.strides, strict=True)) + 1
        for region in (layout.regions(rank) if rank < layout.ranks else ())
        if region.strides is not None
    ]
    if ends:
        return {"flat": torch.full((max(ends),), 9.0, dtype=dtype)}
    return {name: torch.full(shape, 9.0, dtype=dtype) for name, shape in storage_shapes(layout, rank).items()}


def fill(storage: dict[str, torch.Tensor], layout: Layout, rank: int, values: dict[str, torch.Tensor]) -> None:
    for region in layout.regions(rank) if rank < layout.ranks else ():
        region.view(storage[region.storage]).copy_(values[region.box.tensor][_index(region.box)])


def filled(layout: Layout, rank: int, values: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    storage = empty(layout, rank, dtype)
    fill(storage, layout, rank, values)
    return storage


def missing(pair: Pair, rank: int) -> int:
    """Elements that `rank` needs and does not hold, counted one by one."""
    need: dict[str, torch.Tensor] = {}
    for layout, wanted in ((pair.destination, True), (pair.source, False)):
        for region in layout.regions(rank) if rank < layout.ranks else ():
            name = region.box.tensor
            if wanted or name in need:
                mask = need.setdefault(name, torch.zeros(layout.tensors[name], dtype=torch.bool))
                mask[_index(region.box)] = wanted
    return sum(int(mask.sum()) for mask in need.values())


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
