"""Plans of sizes that no laptop holds: LLaMA-3-70B on 1,024 ranks, one rank's part at a time."""

from __future__ import annotations

from math import prod

import pytest

from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan import plan
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.models.spec import PUBLISHED, ModelSpec
from hybridflow.topology import RankGrid

LLAMA_70B = PUBLISHED["llama3-70b"]
NORMS = sum(prod(shape) for name, shape in LLAMA_70B.tensors().items() if "norm" in name)
SHARDED = LLAMA_70B.num_parameters - NORMS


def held(layout: Layout, rank: int) -> int:
    return sum(region.box.numel for region in layout.regions(rank))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("node", [None, 8])
@pytest.mark.parametrize("rank", [0, 517, 1023])
def test_training_16_8_8_to_generation_1_8(rank, node):
    """A rank keeps its stage's eighth and receives the eighths of the 15 other stages: (d_g - 1) / (t p) M."""
    grid = RankGrid(p=16, t=8, d=8)
    source, destination = megatron_layout(LLAMA_70B, grid), vllm_layout(LLAMA_70B, grid.generation(1, 8))
    made = plan(source, destination, (lambda rank: rank // node) if node else None, rank=rank)
    received = sum(move.box.numel for move in made.receives(rank))
    kept = sum(move.box.numel for move in made.local(rank))
    assert kept == held(source, rank)
    assert received == SHARDED // 8 + NORMS - held(source, rank)
    (traffic,) = made.traffic(itemsize=2)
    assert (traffic.rank, traffic.received_bytes, traffic.local_bytes) == (rank, 2 * received, 2 * kept)
    assert traffic.sent_bytes == pytest.approx(15 * 2 * held(source, rank), rel=0.01)
    assert traffic.peak_bytes <= 64 << 20
    if node:  # p > 1: no other rank of the node holds what it lacks; norms enter the node once, not eight times
        norms = received - (SHARDED // 8 - sum(m.box.numel for m in made.local(rank) if "norm" not in m.box.tensor))
        assert 2 * (received - norms) <= traffic.received_between_nodes < 2 * received


def test_a_generation_pool_beside_the_training_pool():
    """512 ranks give to 512 that have nothing: 64 copies come from the 4 holders of each piece."""
    train, rollout = RankGrid(p=16, t=8, d=4), RankGrid(p=1, t=8, d=64)
    source = megatron_layout(LLAMA_70B, train).placed(range(512), 1024)
    destination = vllm_layout(LLAMA_70B, rollout.generation(1, 8)).placed(range(512, 1024), 1024)
    for rank in (0, 300):
        (traffic,) = plan(source, destination, rank=rank).traffic(itemsize=2)
        assert traffic.received_bytes == traffic.local_bytes == 0
        assert 0 < traffic.sent_bytes <= 2 * held(source, rank) * 64 // 4
    for rank in (512, 777, 1023):
        (traffic,) = plan(source, destination, rank=rank).traffic(itemsize=2)
        assert traffic.received_bytes == 2 * (SHARDED // 8 + NORMS)
        assert traffic.sent_bytes == 0
        assert traffic.peak_bytes <= 64 << 20


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
