"""Transitions between plain holders in real layouts: the cases that the tests of transitions are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.designs import WeakerDesign, WeakerTransition
from hybridflow.engine3d.hybrid_engine import HybridEngine
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.process_groups import ProcessGroups
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.contracts.plain_holders import PlainGenerator, PlainTrainer
from tests.contracts.rank_processes import CPU, World

SPEC = ModelSpec(family="llama", hidden=32, intermediate=64, layers=8, heads=8, kv_heads=8, head_dim=8, vocab=128)
TIED = ModelSpec(
    family="qwen3", hidden=32, intermediate=48, layers=4, heads=8, kv_heads=4, head_dim=8, vocab=70, tied=True,
    qk_norm=True,
)  # fmt: skip
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BUCKET = 1 << 14  # bytes


@dataclass(frozen=True)
class Case:
    """A transition from training sizes (p, t, d) to generation sizes (p_g, t_g)."""

    sizes: tuple[int, int, int]
    generation: tuple[int, int]
    design: WeakerDesign | None = None  # of table 2, in place of a HybridEngine
    spec: ModelSpec = SPEC
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16)
    restorable: bool = False

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def grid(self) -> RankGrid:
        return RankGrid(*self.sizes)

    def layouts(self) -> tuple[Layout, Layout]:
        p_g, t_g = self.generation
        divide = self.sizes[0] % p_g == 0 and self.sizes[1] % t_g == 0
        rule = ("vanilla" if self.design else "hybridflow") if divide else "general"
        grid = self.grid
        return megatron_layout(self.spec, grid), vllm_layout(self.spec, grid.generation(p_g, t_g, rule))


def build(world: World, case: Case, groups: ProcessGroups, **options: Any) -> tuple[Any, PlainTrainer, PlainGenerator]:
    train_layout, generate_layout = case.layouts()
    train = PlainTrainer(case.spec, train_layout, case.grid, world.rank, case.dtypes[0], case.restorable)
    generate = PlainGenerator(generate_layout, world.rank, case.dtypes[1])
    group = groups.everyone() if case.ranks > 1 else None
    if options.get("overlap") and "overlap_group" not in options:
        options["overlap_group"] = groups.new("overlap", range(case.ranks))
    options.setdefault("bucket_bytes", BUCKET)
    if case.design:
        return WeakerTransition(case.design, train, generate, group, world.rank, **options), train, generate
    engine = HybridEngine(train, generate, group, world.rank, **options)
    return engine, train, generate


class Scarce(Residency):
    """Memory that runs out at the `fails_at`-th request."""

    fails_at = -1

    def acquire(self, names=None):
        self.fails_at -= 1
        if self.fails_at == 0:
            raise MemoryError("out of memory")
        return super().acquire(names)


def plain(dtype: torch.dtype = BF16, **options: Any) -> tuple[HybridEngine, PlainTrainer, PlainGenerator]:
    """One rank whose memory of either kind can run out; training weights are `dtype`."""
    case = Case((1, 1, 1), (1, 1), spec=TIED)
    layouts = case.layouts()
    train = PlainTrainer(case.spec, layouts[0], case.grid, 0, dtype)
    generate = PlainGenerator(layouts[1], 0, BF16, shares=False)
    train.memory_, generate.memory_ = (Scarce(side.storage(), CPU) for side in (train, generate))
    return HybridEngine(train, generate, None, 0, bucket_bytes=BUCKET, **options), train, generate
