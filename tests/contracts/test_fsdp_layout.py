"""Layouts of FSDP2, HSDP and FSDP x TP: the arithmetic. Engines read every checkpoint through them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.config import FSDP, Megatron, ZeRO
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan import plan
from hybridflow.engines.fsdp.layout import check, fsdp_layout
from hybridflow.engines.train_backends import backend
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.errors import ConfigError, ModelError, PlacementError
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.contracts.family_cases import config

sizes = st.integers(1, 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), sizes, sizes, sizes, st.sampled_from([None, 0, 1]))
def test_boxes_are_torch_chunks_of_chunks(shape, replicate, shard, tp, dim):
    dim = dim if dim is not None and dim < len(shape) else None
    layout = fsdp_layout({"w": tuple(shape)}, shard, replicate=replicate, tp=tp, tp_dim=lambda name: dim)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    assert layout.ranks == replicate * shard * tp
    for rank in range(layout.ranks):
        s, t = rank // tp % shard, rank % tp
        mine = whole if dim is None else _chunk(whole, tp, t, dim)
        mine = _chunk(mine, shard, s, 0)
        regions = layout.regions(rank)
        assert len(regions) == (mine.numel() > 0)
        for region in regions:
            assert torch.equal(region.view(mine), mine)
            index = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
            assert torch.equal(whole[index], mine)


def _chunk(tensor: Tensor, parts: int, index: int, dim: int) -> Tensor:
    chunks = tensor.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


@given(sizes, sizes, sizes)
def test_ranks_of_one_part_hold_equal_boxes_and_others_do_not(replicate, shard, tp):
    layout = fsdp_layout({"w": (24, 24)}, shard, replicate=replicate, tp=tp, tp_dim=lambda name: 1)
    assert layout.part is not None
    for a in range(layout.ranks):
        for b in range(layout.ranks):
            assert (layout.part(a) == layout.part(b)) == (layout.regions(a) == layout.regions(b))


@settings(max_examples=40)
@given(st.sampled_from([(2, 2, 2), (1, 8, 1), (4, 2, 1), (1, 1, 8), (1, 4, 2)]), st.sampled_from([1, 2, 4, 8]))
def test_a_plan_to_vllm_moves_what_is_needed_and_not_held(mesh, t_g):
    replicate, shard, tp = mesh
    spec = ModelSpec(
        family="qwen2", hidden=36, intermediate=40, layers=2, heads=8, kv_heads=2, head_dim=4, vocab=61, qkv_bias=True
    )
    source = fsdp_layout(spec, shard, replicate=replicate, tp=tp)
    destination = vllm_layout(spec, RankGrid(t=8).generation(t=t_g))
    received = [0] * 8
    for move in plan(source, destination).moves:
        if not move.local:
            received[move.destination] += move.box.numel
    for rank in range(8):
        held, needed = (masks(side, rank) for side in (source, destination))
        assert received[rank] == sum(int((needed[name] & ~held[name]).sum()) for name in needed)


MOE = TransformersSpec.of(config("qwen3_moe"))
CUTS = [FSDP(ep=2, dp=12), FSDP(ep=3, dp=12), FSDP(ep=6, dp=12), FSDP(ep=3, dp=12, replicate=2), FSDP(ep=2, cp=4, dp=3)]


def cut(strategy: Any) -> Layout:
    return backend(strategy, "layout").weights_layout(strategy, MOE, strategy.grid(12))


@pytest.mark.parametrize("strategy", CUTS, ids=str)
def test_ranks_that_share_experts_have_whole_ones_once_per_copy(strategy):
    layout, held = cut(strategy), dict.fromkeys(MOE.tensors(), 0)
    assert layout.part is not None
    for rank in range(12):
        at = strategy.grid(12).experts.coords(rank)
        for region in layout.regions(rank):
            held[region.box.tensor] += region.box.numel
            if (found := re.search(r"\.experts\.(\d+)\.", region.box.tensor)) is not None:
                assert region.box.shape == MOE.tensors()[region.box.tensor]
                assert int(found[1]) // (6 // strategy.ep) == at.ep
        for other in range(12):
            assert (layout.part(rank) == layout.part(other)) == (layout.regions(rank) == layout.regions(other))
    assert held == {name: strategy.replicate * math.prod(shape) for name, shape in MOE.tensors().items()}


@st.composite
def strategies(draw: st.DrawFn) -> Megatron | FSDP | ZeRO:
    """Of 12 ranks and 6 experts with 24 columns."""

    def size(*fitting: int) -> int:
        return draw(st.sampled_from(fitting))

    kind = draw(st.sampled_from([Megatron, FSDP, ZeRO]))
    if kind is ZeRO:
        return ZeRO(stage=size(1, 2, 3), cp=(cp := size(1, 2, 4)), dp=12 // cp)
    if kind is FSDP:
        replicate = size(1, 2, 3)
        ep = size(*(n for n in (1, 2, 3, 6) if 12 // replicate % n == 0))
        cp = size(*(n for n in (1, 2, 4) if 12 // replicate % n == 0))
        return FSDP(ep=ep, replicate=replicate, cp=cp if replicate == 1 else 1, dp=12 // (cp if replicate == 1 else 1))
    p = size(1, 2, 3)
    t = size(*(n for n in (1, 2, 4) if 12 // p % n == 0))
    d = 12 // p // t
    ep = size(*(n for n in (1, 2, 3, 6) if t * d % n == 0))
    etp = size(*(n for n in (1, 2, 3, 4) if t * d // ep % n == 0))
    cp = size(*(n for n in (1, 2, 4) if d % n == 0 and 4 // t >= n))
    return Megatron(pp=p, tp=t, dp=d // cp, cp=cp, ep=ep, etp=etp)


def masks(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in layout.tensors.items()}
    for region in layout.regions(rank):
        box = region.box
        found[box.tensor][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = True
    return found


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_plans_between_any_two_ways_to_share_experts(count):
    """Bytes are those that a rank needs and does not hold."""
    models = [MOE, TransformersSpec.of(config("glm4_moe")), TransformersSpec.of(config("mixtral-6"))]

    @settings(max_examples=count, deadline=None, derandomize=True)
    @given(st.sampled_from(models), strategies(), strategies())
    def checks(model: TransformersSpec, one: Any, other: Any) -> None:
        sides = [backend(each, "layout").weights_layout(each, model, each.grid(12)) for each in (one, other)]
        received = [0] * 12
        for move in plan(*sides).moves:
            received[move.destination] += 0 if move.local else move.box.numel
        for rank in range(12):
            held, needed = (masks(side, rank) for side in sides)
            assert received[rank] == sum(int((needed[name] & ~held[name]).sum()) for name in needed)

    checks()


@pytest.mark.parametrize(
    ("family", "strategy", "says"),
    [
        ("qwen3_moe", FSDP(ep=4), "6 experts, not divisible by ep=4. Use ep in .1, 2, 3, 6"),
        ("qwen3_moe", FSDP(ep=12), "6 experts, not divisible by ep=12"),
        ("gemma2", FSDP(ep=2), "gemma2 model without experts: ep=2 has nothing to share"),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(family, strategy, says):
    with pytest.raises(ModelError, match=says):
        check(strategy, TransformersSpec.of(config(family)), strategy.grid(12))


def test_sizes_that_share_no_experts_are_refused():
    with pytest.raises(ConfigError, match=r"FSDP\(tp=2, ep=2\).*hf.Megatron\(tp=2, ep=2\)"):
        FSDP(tp=2, ep=2)
    with pytest.raises(PlacementError, match=r"FSDP\(ep=3\).*make 4. Use ep in \[1, 2, 4\]"):
        FSDP(ep=3).grid(4)
    with pytest.raises(PlacementError, match=r"replicate=2 make 2. Use ep in \[1, 2\]"):
        FSDP(ep=4, replicate=2).grid(4)
    with pytest.raises(PlacementError, match=r"a grid of its own.*ep=2"):
        check(FSDP(ep=2), MOE, RankGrid(d=4))
