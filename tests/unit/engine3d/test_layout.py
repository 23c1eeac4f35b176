"""Boxes against sets of index tuples: every operation is checked element by element."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.designs import plans, whole_layout, zero_layout
from hybridflow.engine3d.layout import Box, Layout, Region, equal_storages, partition
from hybridflow.engine3d.plan import WeightPlan, plan
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid

SHAPE = (7, 5, 3)


@st.composite
def boxes(draw, dims: int | None = None) -> Box:
    dims = draw(st.integers(0, 3)) if dims is None else dims
    edges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in SHAPE[:dims]]
    return Box("w", tuple(a for a, _ in edges), tuple(b for _, b in edges))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@settings(deadline=None)
@given(st.integers(0, 3).flatmap(lambda d: st.tuples(boxes(d), boxes(d))))
def test_intersect_and_subtract_are_those_of_sets(pair):
    one, other = pair
    common = one.intersect(other)
    assert (elements(common) if common else set()) == elements(one) & elements(other)
    if one.numel:
        rest = one.subtract(other)
        assert sum(part.numel for part in rest) == len(elements(one) - elements(other))
        assert set().union(*map(elements, rest)) == elements(one) - elements(other)


@settings(deadline=None)
@given(boxes(), st.integers(1, 40))
def test_split_covers_once_in_pieces_of_bounded_size(box, limit):
    parts = box.split(limit)
    if box.numel:
        assert all(0 < part.numel <= limit for part in parts)
        assert list(itertools.chain.from_iterable(sorted(elements(part)) for part in parts)) == sorted(elements(box))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 3).flatmap(lambda d: st.lists(boxes(d), max_size=6)))
def test_partition_is_disjoint_and_keeps_every_owner(many):
    atoms = partition((box, i) for i, box in enumerate(many))
    found = {}
    for box, owners in atoms:
        for at in elements(box):
            assert at not in found
            found[at] = sorted(owners)
    expected = {at: [i for i, box in enumerate(many) if at in elements(box)] for box in many for at in elements(box)}
    assert found == expected
    assert [box.start for box, _ in atoms] == sorted(box.start for box, _ in atoms)


def test_disjoint_and_equal_boxes_are_left_whole():
    columns = [Box("w", (0, i), (8, i + 2)) for i in (0, 2, 4)]
    rows = [Box("w", (i, 0), (i + 2, 6)) for i in (8, 10)]
    atoms = partition([(box, i) for i, box in enumerate(columns + rows + columns)])
    assert atoms == [(box, [i, i + 5] if i < 3 else [i]) for i, box in enumerate(columns + rows)]


@settings(deadline=None)
@given(boxes(2), st.data())
def test_region_index_addresses_the_same_elements(box, data):
    if not box.numel:
        return
    canonical = torch.from_numpy(np.arange(35).reshape(SHAPE[:2]))
    pad = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    storage = torch.full([n + 2 * p for n, p in zip(box.shape, pad, strict=True)], -1)
    region = Region(box, "s", pad)
    storage[region.index()] = canonical[Region(box, "w", box.start).index()]
    for part in box.split(data.draw(st.integers(1, 6))):
        assert torch.equal(storage[region.index(part)], canonical[Region(part, "w", part.start).index()])
    assert (storage >= 0).sum() == box.numel


def test_a_box_reads_like_the_slice_that_it_is():
    assert str(Box("lm_head.weight", (0, 4), (2, 8))) == "lm_head.weight[0:2, 4:8]"
    assert Box.whole("scalar", ()).numel == 1


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
