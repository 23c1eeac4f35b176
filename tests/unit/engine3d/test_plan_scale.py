"""Plans of sizes that no laptop holds: LLaMA-3-70B on 1,024 ranks, one rank's part at a time."""

from __future__ import annotations

from math import prod

import pytest

from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan import plan
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid

LLAMA_70B = ModelSpec(
    family="llama",
    hidden=8192,
    intermediate=28672,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    context=8192,
)
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
