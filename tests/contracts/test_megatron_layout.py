"""Layouts of Megatron, of units and of their optimizer state as pure values: every canonical number has a place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config import Megatron
from hybridflow.engine3d.layout import Region
from hybridflow.engines.megatron.layout import check, megatron_layout, padded_vocab, stages, state_layout, units
from hybridflow.engines.units import ALIGNMENT, optimizer_layout, parameter_layout, step_groups, whole_units
from hybridflow.errors import ModelError, PlacementError
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelSpec, RankGrid]:
    t, p, d = (draw(st.integers(1, 4)) for _ in range(3))
    kv_heads = draw(st.sampled_from([n for n in range(1, 2 * t + 1) if n % t == 0 or t % n == 0]))
    spec = ModelSpec(
        family="qwen3",
        hidden=draw(st.integers(1, 6)),
        intermediate=t * draw(st.integers(1, 3)),
        layers=p + draw(st.integers(0, 3)),
        heads=max(t, kv_heads) * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=12 * draw(st.integers(1, 2)),  # also what 3 and 4 ranks share divides evenly
        vocab=draw(st.integers(1, 11)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        head=draw(st.sampled_from(["lm", "value"])),
    )
    return spec, RankGrid(p, t, d)


def cells(region: Region, of_box: bool) -> set[tuple]:
    """Every index of the region's box, or of the storage behind it."""
    starts = region.box.start if of_box else region.offset
    name = region.box.tensor if of_box else region.storage
    ranges = (range(a, a + n) for a, n in zip(starts, region.box.shape, strict=True))
    return {(name, *index) for index in _product(*ranges)}


def _product(*ranges: range) -> list[tuple]:
    grids = torch.meshgrid(*[torch.tensor(list(r)) for r in ranges], indexing="ij")
    return list(map(tuple, torch.stack([g.flatten() for g in grids], 1).tolist()))


@settings(max_examples=60, deadline=None)
@given(models())
def test_every_replica_holds_the_whole_model_and_no_storage_twice(case):
    spec, grid = case
    layout = megatron_layout(spec, grid)
    size = sum(math.prod(shape) for shape in layout.tensors.values())
    for d in range(grid.d):
        held: set[tuple] = set()
        for rank in grid.ranks(d=d):
            regions = layout.regions(rank)
            assert regions == layout.regions(grid.rank(grid.coords(rank).p, grid.coords(rank).t, 0))
            stored = [cells(region, of_box=False) for region in regions]
            assert len(set().union(*stored)) == sum(map(len, stored)), "two regions overlap in storage"
            for region in regions:
                held |= cells(region, of_box=True)
        assert len(held) == size


@settings(max_examples=60, deadline=None)
@given(models())
def test_split_tensors_are_held_once_and_copies_are_the_known_ones(case):
    spec, grid = case
    layout = megatron_layout(spec, grid)
    copied = {"norm", "layernorm", "score"}
    for name in layout.tensors:
        holders = [r for rank in grid.ranks(d=0) for r in layout.regions(rank) if r.box.tensor == name]
        volume = sum(region.box.numel for region in holders)
        if any(word in name for word in copied):
            assert volume == grid.t * math.prod(layout.tensors[name])
        elif name == "model.embed_tokens.weight" and spec.tied and spec.head == "lm" and grid.p > 1:
            assert volume == 2 * math.prod(layout.tensors[name])
        else:
            assert volume == math.prod(layout.tensors[name])


def test_query_key_and_value_are_interleaved_per_kv_head():
    spec = ModelSpec(
        family="llama", hidden=3, intermediate=4, layers=1, heads=8, kv_heads=4, head_dim=2, vocab=5, norm_eps=1e-6
    )
    regions = [r for r in megatron_layout(spec, RankGrid(t=2)).regions(1) if "linear_qkv" in r.storage]
    rows = {(r.box.tensor.split(".")[-2], r.box.start[0], r.box.stop[0]): r.offset[0] for r in regions}
    assert rows == {
        ("q_proj", 8, 12): 0,
        ("k_proj", 4, 6): 4,
        ("v_proj", 4, 6): 6,
        ("q_proj", 12, 16): 8,
        ("k_proj", 6, 8): 12,
        ("v_proj", 6, 8): 14,
    }


def test_the_vocabulary_is_padded_and_padding_has_no_box():
    spec = ModelSpec(family="llama", hidden=2, intermediate=4, layers=1, heads=4, kv_heads=4, head_dim=2, vocab=9)
    layout = megatron_layout(spec, RankGrid(t=4))
    assert padded_vocab(9, 4) == 12
    held = [[r.box for r in layout.regions(rank) if r.box.tensor == "lm_head.weight"] for rank in range(4)]
    assert [(b[0].start[0], b[0].stop[0]) if b else None for b in held] == [(0, 3), (3, 6), (6, 9), None]


def test_sizes_that_do_not_divide_are_refused():
    spec = ModelSpec(family="llama", hidden=2, intermediate=4, layers=3, heads=4, kv_heads=2, head_dim=2, vocab=9)
    with pytest.raises(ModelError, match="4 heads, not divisible by t=3"):
        megatron_layout(spec, RankGrid(t=3))
    with pytest.raises(ModelError, match="3 layers"):
        megatron_layout(spec, RankGrid(p=4))
    with pytest.raises(ModelError, match="3 layers"):
        megatron_layout(spec, RankGrid(p=2), (2, 2))


def test_stages_are_as_even_as_can_be_and_larger_ones_come_first():
    assert stages(7, 3) == (range(3), range(3, 5), range(5, 7))
    assert stages(4, 4) == tuple(range(i, i + 1) for i in range(4))
    assert stages(5, 2, (1, 4)) == (range(1), range(1, 5))


MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 21,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}


@st.composite
def shares(draw: st.DrawFn) -> RankGrid:
    p, t, d = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3, 4]))
    ep = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 12) if t * d % n == 0]))
    etp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if t * d // ep % n == 0]))
    return RankGrid(p, t, d, ep=ep, etp=etp)


@settings(max_examples=40, deadline=None)
@given(shares())
def test_every_rank_has_its_share_of_experts_and_replicas_have_the_same(grid):
    spec, experts = TransformersSpec.of(MOE), grid.experts
    layout, held = megatron_layout(spec, grid), dict.fromkeys(spec.tensors(), 0)
    for rank in range(grid.size):
        at, regions = experts.coords(rank), layout.regions(rank)
        own = [region.box for region in regions if ".experts." in region.storage]
        same = [r for r in range(grid.size) if (c := experts.coords(r)).p == at.p and (c.ep, c.etp) == (at.ep, at.etp)]
        assert len(same) == experts.edp
        for other in same:
            assert own == [region.box for region in layout.regions(other) if ".experts." in region.storage]
        for region in regions:
            held[region.box.tensor] += region.box.numel
        parameters = [unit.parameters for unit in units(spec, grid, rank) if unit.experts]
        assert sum(math.prod(shape) for unit in parameters for shape in unit.values()) == sum(box.numel for box in own)
    for name, shape in spec.tensors().items():
        if ".experts." in name:
            assert held[name] == experts.edp * math.prod(shape)


@settings(max_examples=40, deadline=None)
@given(shares())
def test_state_of_experts_is_owned_once(grid):
    spec = TransformersSpec.of(MOE)
    state = state_layout(Megatron(ep=grid.ep, etp=grid.etp), spec, grid)
    owned = dict.fromkeys(spec.tensors(), 0)
    for rank in range(grid.size):
        for region in state.regions(rank):
            owned[region.box.tensor] += region.box.numel
    for name, shape in spec.tensors().items():
        if ".experts." in name or "linear" in name or "proj" in name:
            assert owned[name] == math.prod(shape), name


@pytest.mark.parametrize(
    ("changes", "strategy", "says"),
    [
        ({}, Megatron(ep=8, dp=8), "12 experts, not divisible by ep=8. Use ep in"),
        ({"moe_intermediate_size": 25}, Megatron(etp=2, dp=2), "25 columns per expert, not divisible by etp=2"),
        ({"hidden_act": "relu"}, Megatron(), "does not compute qwen3_moe with hidden_act='relu'"),
        ({"attention_bias": True}, Megatron(), "has no place for .*o_proj.bias"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            Megatron(),
            "rope type 'dynamic', which depends on the row",
        ),
        ({}, Megatron(cp=3, dp=1), "cp=3 ranks cannot share. Use cp in"),
        ({}, Megatron(cp=2, packed=False), "cp=2 cuts packed rows"),
    ],
)
def test_models_that_are_not_computed_are_refused(changes, strategy, says):
    spec = TransformersSpec.of({**MOE, **changes})
    with pytest.raises(ModelError, match=says):
        check(strategy, spec, strategy.grid((strategy.dp or 1) * strategy.cp))


def test_experts_need_a_model_that_has_some():
    spec = ModelSpec(family="llama", hidden=2, intermediate=4, layers=3, heads=4, kv_heads=2, head_dim=2, vocab=9)
    with pytest.raises(ModelError, match="without experts: ep=2 has nothing to share"):
        check(Megatron(ep=2, dp=2), spec, Megatron(ep=2, dp=2).grid(2))
    with pytest.raises(PlacementError, match=r"ep\*etp = 3\*1 does not divide the t\*d = 1\*2 ranks"):
        Megatron(ep=3, dp=2).grid(2)
    with pytest.raises(PlacementError, match="a grid of its own with ep=1"):
        check(Megatron(ep=2, dp=2), TransformersSpec.of(MOE), RankGrid(d=2))


# Units and their state


def _index(region: Any) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))


@settings(max_examples=60, deadline=None)
@given(models())
def test_ranks_own_every_element_once_and_equally_much(case):
    spec, grid = case
    ranks, tensors = grid.t * grid.d, spec.tensors()
    owners = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in tensors.items()}
    layout, cut = optimizer_layout(tensors, ranks), whole_units(tensors)
    for rank in range(ranks):
        owned = {name: span for unit in cut for name, span in unit.owned(ranks, rank).items()}
        stored = {name: torch.zeros(stop - start, dtype=torch.int8) for name, (start, stop) in owned.items()}
        for region in layout.regions(rank):
            owners[region.box.tensor][_index(region)] += 1
            region.view(stored[region.storage]).add_(1)
        assert all(bool((flat == 1).all()) for flat in stored.values()), "regions overlap or leave gaps in storage"
    assert all(bool((tensor == 1).all()) for tensor in owners.values())
    padding = sum(ranks * unit.share(ranks) for unit in cut) - spec.num_parameters
    assert 0 <= padding <= len(tensors) * ALIGNMENT + len(cut) * ranks * ALIGNMENT


@settings(max_examples=60, deadline=None)
@given(models())
def test_data_parallel_ranks_share_the_state_of_what_they_hold_together(case):
    """Every element of a rank's parameters has state on exactly one of its data parallel ranks, stored once."""
    spec, grid = case
    parameters, state = megatron_layout(spec, grid), state_layout(Megatron(), spec, grid)
    for first in grid.ranks(d=0):
        held = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in spec.tensors().items()}
        for region in parameters.regions(first):
            held[region.box.tensor][_index(region)] -= 1
        for rank in grid.group(first, "d"):
            stored: dict[str, Any] = {}
            for region in state.regions(rank):
                held[region.box.tensor][_index(region)] += 1
                flat = stored.setdefault(region.storage, torch.zeros(1 << 16, dtype=torch.int8))
                region.view(flat).add_(1)
            assert all(int(flat.max()) == 1 for flat in stored.values()), "two regions overlap in storage"
        assert all(not tensor.any() for tensor in held.values())


@settings(max_examples=60, deadline=None)
@given(models())
def test_parts_of_a_step_cover_the_model_once_and_are_units_of_every_stage(case):
    spec, grid = case
    tensors = spec.tensors()
    assert [name for unit in whole_units(tensors) for name in unit.parameters] == list(tensors)
    for parts in (step_groups(tensors), step_groups(tensors, stages(spec.layers, grid.p))):
        assert sorted(name for part in parts for name in part) == sorted(tensors)
    assert all(any(unit.parameters.keys() <= part for part in step_groups(tensors)) for unit in whole_units(tensors))
    layout = megatron_layout(spec, grid)
    for rank in range(grid.size):
        part_of = {n: unit.part for unit in units(spec, grid, rank) for n in unit.parameters}
        assert all(region.box.tensor in parts[part_of[region.storage]] for region in layout.regions(rank))


def test_a_layout_of_parameters_holds_everything_everywhere():
    layout = parameter_layout({"w": (3, 4), "b": (3,)}, 5)
    assert all([r.box.numel for r in layout.regions(rank)] == [12, 3] for rank in range(5))
    assert layout.part is not None
    assert len({layout.part(rank) for rank in range(5)}) == 1
