"""Weight plans against sets of elements: covered once, from a holder, and never more bytes than must be."""

from __future__ import annotations

import numpy as np
import pytest
from example_layouts import SPEC, TIED, fused, placed, row_shards, side_by_side, some_layout, storage_shapes, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import WeightPlan, plan
from hybridflow.errors import LayoutError
from hybridflow.topology import RankGrid

pairs = st.tuples(st.sampled_from([SPEC, TIED]), st.integers(0, 10**6), st.integers(0, 10**6))


def canonical(layout: Layout) -> dict[str, np.ndarray]:
    """Every element of the model has its own number."""
    out, first = {}, 1
    for name, shape in layout.tensors.items():
        size = int(np.prod(shape))
        out[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return out


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def filled(layout: Layout) -> list[dict[str, np.ndarray]]:
    values = canonical(layout)
    out = []
    for rank in range(layout.ranks):
        storage = {name: np.zeros(shape, dtype=np.int64) for name, shape in storage_shapes(layout, rank).items()}
        for region in layout.regions(rank):
            storage[region.storage][region.index()] = values[region.box.tensor][at(region.box)]
        out.append(storage)
    return out


def elements(layout: Layout, rank: int) -> dict[str, np.ndarray]:
    out = {name: np.zeros(shape, dtype=bool) for name, shape in layout.tensors.items()}
    for region in layout.regions(rank) if rank < layout.ranks else ():
        out[region.box.tensor][at(region.box)] = True
    return out


def minimum(source: Layout, destination: Layout, rank: int) -> int:
    """Elements that `rank` needs and does not hold."""
    held, needed = elements(source, rank), elements(destination, rank)
    return sum(int((needed[name] & ~held[name]).sum()) for name in needed)


@settings(max_examples=150, deadline=None)
@given(pairs)
def test_every_element_arrives_exactly_once_at_the_smallest_cost(pair):
    spec, a, b = pair
    source, destination = some_layout(spec, a), some_layout(spec, b)
    made = plan(source, destination)
    have, expected = filled(source), filled(destination)
    got = [{name: np.zeros_like(array) for name, array in storage.items()} for storage in expected]
    writes = [{name: np.zeros_like(array) for name, array in storage.items()} for storage in expected]
    for move in made.moves:
        values = have[move.source][move.origin.storage][move.origin.index(move.box)]
        for region in move.into:
            got[move.destination][region.storage][region.index(move.box)] = values
            writes[move.destination][region.storage][region.index(move.box)] += 1
    for rank, storage in enumerate(expected):
        for name, array in storage.items():
            assert np.array_equal(got[rank][name], array)
            assert np.array_equal(writes[rank][name], (array > 0).astype(int))
    for rank, traffic in enumerate(made.traffic(itemsize=1)):
        assert traffic.received_bytes == minimum(source, destination, rank)


@settings(max_examples=100, deadline=None)
@given(pairs, st.integers(1, 200), st.sampled_from([1, 2, 4]))
def test_rounds_are_bounded_complete_and_in_order(pair, elements_each, itemsize):
    spec, a, b = pair
    made = plan(some_layout(spec, a), some_layout(spec, b))
    limit = elements_each * itemsize
    rounds = made.buckets(limit, itemsize)
    assert all(rounds)
    moved = [0] * made.ranks
    for bucket in rounds:
        extra = [0] * made.ranks
        for move in bucket:
            assert not move.local
            for rank in (move.source, move.destination):
                extra[rank] += move.box.numel * itemsize
                moved[rank] += move.box.numel * itemsize
        single = len(bucket) == 1 and bucket[0].box.numel == 1
        assert max(extra) <= limit or single
    traffic = made.traffic(itemsize, limit)
    assert moved == [t.sent_bytes + t.received_bytes for t in traffic]
    assert all(t.peak_bytes <= max(limit, itemsize) for t in traffic)
    for source in range(made.ranks):  # cutting changes neither content nor order
        for destination in range(made.ranks):
            pair = (source, destination)
            uncut = [(i, m) for i, m in enumerate(made.sends(source)) if m.destination == destination]
            order = [
                next(i for i, m in uncut if m.origin == piece.origin and m.box.intersect(piece.box) == piece.box)
                for bucket in rounds
                for piece in bucket
                if (piece.source, piece.destination) == pair
            ]
            assert order == sorted(order)
            assert set(order) == {i for i, _ in uncut}


def test_plans_are_deterministic_and_rank_views_partition_the_moves():
    source, destination = some_layout(SPEC, 3), some_layout(SPEC, 8)
    made = plan(source, destination)
    assert made == plan(source, destination)
    local = [move for rank in range(made.ranks) for move in made.local(rank)]
    sent = [move for rank in range(made.ranks) for move in made.sends(rank)]
    received = [move for rank in range(made.ranks) for move in made.receives(rank)]
    assert len(local) + len(sent) == len(local) + len(received) == len(made.moves)
    assert set(sent) == set(received)


def test_same_layout_moves_nothing():
    layout = fused(SPEC, 2, 2, 2)
    made = plan(layout, layout)
    assert all(move.local for move in made.moves)
    assert made.buckets() == []


def test_a_box_stored_twice_travels_once():
    made = plan(placed(whole(TIED), [1]), placed(fused(TIED, 1, 1, 1), [0]))
    (embedding,) = [move for move in made.receives(0) if move.box.tensor == "model.embed_tokens.weight"]
    assert [region.storage for region in embedding.into] == ["embedding", "output"]


def share(source: Layout, destination: Layout, ranks: int) -> list[float]:
    model = sum(int(np.prod(shape)) for shape in source.tensors.values())
    return [minimum(source, destination, rank) / model for rank in range(ranks)]


def test_transition_volume_is_that_of_the_papers_table_2():
    """1-4-2 to 1-2-2-2: (d_g - 1) / (t p) M, up to norms, which every tensor rank holds already."""
    grid = RankGrid(p=1, t=4, d=2)
    spec = SPEC.__class__(
        family="llama", hidden=64, intermediate=128, layers=2, heads=8, kv_heads=4, head_dim=8, vocab=64
    )
    generation = grid.generation(p=1, t=2)
    shards = fused(spec, 1, 2, 1)
    source = fused(spec, grid.p, grid.t, grid.d)
    destination = Layout(source.tensors, 8, lambda rank: shards.regions(generation.coords(rank).t))
    traffic = plan(source, destination).traffic(itemsize=1)
    model = spec.num_parameters
    assert [t.received_bytes / model for t in traffic] == pytest.approx([0.25] * 8, abs=0.01)
    assert [t.sent_bytes / model for t in traffic] == pytest.approx([0.25] * 8, abs=0.01)


def test_replicas_share_the_sending():
    made = plan(placed(whole(SPEC, 4), [0, 1, 2, 3]), placed(whole(SPEC, 8), range(4, 12)))
    sent = [t.sent_bytes for t in made.traffic(itemsize=1)[:4]]
    largest = max(int(np.prod(shape)) for shape in SPEC.tensors().values())
    assert max(sent) - min(sent) <= largest


def test_differently_sharded_replicas_share_the_sending():
    both = side_by_side(whole(SPEC), fused(SPEC, 1, 2, 1))
    made = plan(both, placed(whole(SPEC, 6), range(3, 9)))
    sent = [t.sent_bytes for t in made.traffic(itemsize=1)[:3]]
    largest = max(int(np.prod(shape)) for shape in SPEC.tensors().values())
    assert max(sent) - min(sent) <= largest


def test_the_own_node_comes_first():
    source = placed(whole(SPEC, 2), [0, 4])
    made = plan(source, placed(whole(SPEC, 6), [1, 2, 3, 5, 6, 7]), node_of=lambda rank: rank // 4)
    assert all(move.source // 4 == move.destination // 4 for move in made.moves)


def test_disjoint_pairs_fill_rounds_side_by_side():
    """Pipeline stages in turn: without it the second stage would wait until the first is done."""
    source, destination = placed(fused(SPEC, 2, 1, 1), [0, 1]), placed(fused(SPEC, 2, 1, 1), [2, 3])
    made = plan(source, destination)
    largest = max(t.sent_bytes for t in made.traffic(itemsize=1))
    assert len(made.buckets(largest * 2, 1)) == 1
    assert {move.destination for move in made.buckets(64, 1)[0]} == {2, 3}


def test_hundreds_of_ranks_are_planned_exactly():
    spec = SPEC.__class__(
        family="llama", hidden=64, intermediate=96, layers=8, heads=16, kv_heads=8, head_dim=4, vocab=96
    )
    source, destination = row_shards(spec, 256), fused(spec, 4, 8, 8)
    made = plan(source, destination)
    traffic = made.traffic(itemsize=1)
    for rank in (0, 17, 100, 255):
        assert traffic[rank].received_bytes == minimum(source, destination, rank)


def test_a_tensor_that_the_source_lacks_is_named():
    source = Layout({n: s for n, s in whole(SPEC).tensors.items() if n != "lm_head.weight"}, 1, lambda rank: ())
    with pytest.raises(LayoutError, match=r"lm_head.weight \(10, 8\) is not in the source"):
        plan(source, whole(SPEC))


def test_another_shape_is_named_with_both_shapes():
    source = whole(SPEC)
    other = Layout({**source.tensors, "model.norm.weight": (9,)}, 1, lambda rank: ())
    with pytest.raises(LayoutError, match=r"model.norm.weight is \(8,\) in the destination and \(9,\) in the source"):
        plan(other, source)


def test_a_tensor_that_only_the_source_has_is_ignored():
    destination = whole(SPEC)
    fewer = {name: shape for name, shape in destination.tensors.items() if name != "lm_head.weight"}
    kept = [region for region in destination.regions(0) if region.box.tensor in fewer]
    assert {move.box.tensor for move in plan(whole(SPEC), Layout(fewer, 1, lambda rank: kept)).moves} == set(fewer)


@pytest.mark.parametrize("dropped", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_an_element_without_source_is_named(dropped):
    shards = fused(SPEC, 1, 2, 1)

    def partly(rank: int) -> list[Region]:
        return [region for region in shards.regions(rank) if rank == 0 or region.box.tensor != dropped]

    with pytest.raises(LayoutError, match=rf"needs {dropped}\[.*hold only {dropped}\["):
        plan(Layout(shards.tensors, 2, partly), placed(whole(SPEC), [2]))
    with pytest.raises(LayoutError, match=rf"needs {dropped}\[.*hold nothing of it"):
        plan(Layout(shards.tensors, 2, partly), placed(fused(SPEC, 1, 2, 1), [2, 1]))


def test_a_box_outside_its_tensor_is_refused():
    wrong = Layout({"w": (4,)}, 1, lambda rank: [Region(Box("w", (2,), (5,)), "s", (0,))])
    with pytest.raises(LayoutError, match=r"w\[2:5\] in 's'"):
        plan(wrong, wrong)


def test_scalars_and_empty_plans():
    one = Layout({"scale": ()}, 1, lambda rank: [Region(Box("scale", (), ()), "scale", ())])
    made = plan(one, placed(one, [1]))
    assert [(m.source, m.destination, m.box.numel) for m in made.moves] == [(0, 1, 1)]
    assert plan(Layout({}, 1, lambda rank: ()), Layout({}, 2, lambda rank: ())) == WeightPlan(2, ())
