"""Table 2 of the paper on plans: what each device receives in the transition, for every grid of eight ranks."""

from __future__ import annotations

from math import prod

import pytest

from hybridflow.engine3d.plan import plan
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid

SPEC = ModelSpec(
    family="llama", hidden=64, intermediate=128, layers=8, heads=8, kv_heads=8, head_dim=8, vocab=512, context=256
)
LAYERS = {name: shape for name, shape in SPEC.tensors().items() if "_proj" in name}
M = sum(prod(shape) for shape in LAYERS.values())
SIZES = (1, 2, 4, 8)
GRIDS = [RankGrid(p, t, 8 // (p * t)) for p in SIZES for t in SIZES if p * t <= 8]
TRANSITIONS = [(g, p, t) for g in GRIDS for p in SIZES for t in SIZES if g.p % p == 0 and g.t % t == 0]


def name(value: object) -> str:
    return f"{value.p}-{value.t}-{value.d}" if isinstance(value, RankGrid) else str(value)


@pytest.mark.parametrize(("grid", "p_g", "t_g"), TRANSITIONS, ids=name)
def test_hybridflow_grouping_moves_the_least_inside_micro_data_parallel_groups(grid, p_g, t_g):
    generation = grid.generation(p_g, t_g, "hybridflow")
    made = plan(megatron_layout(SPEC, grid), vllm_layout(SPEC, generation), exact=True)
    groups = [set(group) for group in generation.groups("micro")]
    assert all(any({move.source, move.destination} <= group for group in groups) for move in made.moves)
    expected = (generation.micro - 1) * M // (grid.t * grid.p)
    for traffic in made.only(LAYERS).traffic(itemsize=1):
        assert traffic.received_bytes == traffic.sent_bytes == expected
        assert traffic.local_bytes == M // (grid.t * grid.p)
        assert traffic.local_bytes + traffic.received_bytes == M // (p_g * t_g)


@pytest.mark.parametrize(("grid", "p_g", "t_g"), TRANSITIONS, ids=name)
def test_the_way_back_is_local(grid, p_g, t_g):
    generation = grid.generation(p_g, t_g, "hybridflow")
    made = plan(vllm_layout(SPEC, generation), megatron_layout(SPEC, grid), exact=True)
    assert all(move.local for move in made.moves)


def test_all_sizes_of_eight_ranks_are_covered():
    assert len(GRIDS) == 10
    assert len(TRANSITIONS) == sum((g.p.bit_length()) * (g.t.bit_length()) for g in GRIDS)
