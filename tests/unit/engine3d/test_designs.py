"""The three designs of table 2 as layouts: who holds what before, who has to receive what."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.designs import plans, whole_layout, zero_layout
from hybridflow.engine3d.layout import Box, Layout, Region, equal_storages
from hybridflow.engine3d.plan import WeightPlan, plan
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid

SPEC = ModelSpec(
    family="llama", hidden=16, intermediate=16, layers=8, heads=8, kv_heads=8, head_dim=8, vocab=64, tied=False
)
GRIDS = [(p, t, 8 // (p * t)) for p in (1, 2, 4, 8) for t in (1, 2, 4, 8) if p * t <= 8]
SHARDED = sum(math.prod(shape) for shape in SPEC.tensors().values() if len(shape) == 2)


def divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


def received(weights: WeightPlan, rank: int) -> int:
    """Elements of tensors with two dimensions: norms are on all tensor parallel ranks."""
    return sum(move.box.numel for move in weights.receives(rank) if len(move.box.start) == 2)


@pytest.mark.parametrize(("p", "t", "d"), GRIDS)
def test_bytes_received_are_those_of_table_2(p, t, d):
    grid = RankGrid(p, t, d)
    train = megatron_layout(SPEC, grid)
    for name, expected in (
        ("vanilla", lambda *_: (p * t - 1) / (p * t)),
        ("gather_all", lambda *_: (p * t * d - 1) / (p * t * d)),
        ("hybridflow", lambda p_g, t_g: (p * t // (p_g * t_g) - 1) / (p * t)),
    ):
        for p_g in divisors(p):
            for t_g in divisors(t):
                rule = "hybridflow" if name == "hybridflow" else "vanilla"
                generation = vllm_layout(SPEC, grid.generation(p_g, t_g, rule))
                weights = plan(train, generation) if name == "hybridflow" else plans(name, train, generation, grid)[0]
                # the vocabulary is on the first and the last stage: what a device receives differs, their mean does not
                total = sum(received(weights, rank) for rank in range(8))
                assert total == 8 * SHARDED * expected(p_g, t_g)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 13), st.booleans())
@settings(max_examples=150, deadline=None)
def test_zero_parts_are_disjoint_and_whole(p, t, d, rows, flat):
    """Each rank's part lies within what it trains; over the replicas the parts cover it once, whatever the rest."""
    grid = RankGrid(p, t, d)
    tensors = {"w": (rows * p * t, 3), "scalar": ()}

    def regions(rank: int) -> list[Region]:
        at = grid.coords(rank)
        first = (at.p * t + at.t) * rows
        box = Box("w", (first, 0), (first + rows, 3))
        own = Region(box, "w", (5,), (4, 1)) if flat else Region(box, "w", (2, 0))
        return [own, Region(Box("scalar", (), ()), "s", ())]

    layout = Layout(tensors, grid.size, regions)
    cut = zero_layout(layout, grid)
    seen: Counter[int] = Counter()
    for rank in range(grid.size):
        whole = layout.regions(rank)[0]
        for part in cut.regions(rank):
            if part.box.tensor == "w":
                assert part.box.intersect(whole.box) == part.box
                below = part.box.start[0] - whole.box.start[0]
                assert part.offset == ((5 + 4 * below,) if flat else (2 + below, 0))
                assert part.strides == whole.strides
                seen.update(range(*part.box.rows))
            else:
                assert grid.coords(rank).d == 0
    assert seen == Counter(range(rows * p * t))
    assert cut.part is not None
    assert len({cut.part(rank) for rank in range(grid.size)}) == grid.size


def test_the_whole_model_on_every_rank():
    layout = whole_layout({"a": (2, 3), "b": ()}, 4)
    assert layout.ranks == 4
    assert layout.regions(3) == [Region(Box("a", (0, 0), (2, 3)), "a", (0, 0)), Region(Box("b", (), ()), "b", ())]


def test_storages_that_hold_the_same_are_found():
    """With equal sizes everything but the interleaved qkv is kept alike; with smaller generation TP only norms are."""
    spec = ModelSpec(family="llama", hidden=16, intermediate=16, layers=2, heads=8, kv_heads=4, head_dim=8, vocab=128)
    grid = RankGrid(1, 2, 2)
    pairs = dict(equal_storages(megatron_layout(spec, grid), vllm_layout(spec, grid.generation(1, 2)), 3))
    assert pairs["decoder.layers.1.mlp.linear_fc1.weight"] == "model.layers.1.mlp.gate_up_proj.weight"
    assert pairs["embedding.word_embeddings.weight"] == "model.embed_tokens.weight"
    missing = set(megatron_layout(spec, grid).storages(3)) - set(pairs)
    assert missing == {f"decoder.layers.{i}.self_attention.linear_qkv.weight" for i in range(2)}
    smaller = dict(equal_storages(megatron_layout(spec, grid), vllm_layout(spec, grid.generation(1, 1)), 3))
    assert all("norm" in name for name in smaller)
    assert len(smaller) == 5


def test_one_storage_is_paired_once():
    """Tied embeddings that a rank holds twice share with one of them."""
    region = Region(Box("e", (0,), (4,)), "one", (0,))
    twice = [region, Region(region.box, "two", (0,))]
    source, destination = (Layout({"e": (4,)}, 1, lambda rank, own=own: own) for own in ([region], twice))
    assert equal_storages(source, destination, 0) == [("one", "one")]
    assert equal_storages(destination, source, 0) == [("one", "one")]
