"""Weight plans against sets of elements: covered once, from who has it, and never more bytes than must be."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import Move, WeightPlan, plan
from hybridflow.errors import LayoutError
from tests.example_layouts import (
    SIX,
    SPEC,
    TIED,
    any_layout,
    elements,
    fused,
    placed,
    some_layout,
    storage_shapes,
    whole,
)

RANKS = 6
specs, seeds = st.sampled_from([SPEC, TIED, SIX]), st.integers(0, 10**6)
node_sizes = st.sampled_from([1, 2, 4, RANKS])
Storages = list[dict[str, torch.Tensor]]


def filled(layout: Layout) -> Storages:
    """The storages of every rank, with a number of its own for every element of the model."""
    values, first = {}, 1
    for name, shape in layout.tensors.items():
        values[name] = torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)
        first += values[name].numel()
    out = []
    for rank in range(layout.ranks):
        storage = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in storage_shapes(layout, rank).items()}
        for region in layout.regions(rank):
            box = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
            region.view(storage[region.storage]).copy_(values[region.box.tensor][box])
        out.append(storage)
    return out


def blank(storages: Storages) -> Storages:
    return [{name: torch.zeros_like(tensor) for name, tensor in storage.items()} for storage in storages]


def minimum(source: Layout, destination: Layout, rank: int) -> int:
    """Elements that `rank` needs and does not hold."""
    held, needed = elements(source, rank), elements(destination, rank)
    return sum(int((needed[name] & ~held[name]).sum()) for name in needed)


def minimum_into(source: Layout, destination: Layout, node: list[int]) -> int:
    """Elements that some rank of the node needs and none of it holds."""
    held, needed = ([elements(layout, rank) for rank in node] for layout in (source, destination))
    missing = 0
    for name in destination.tensors:
        wanted, found = (torch.stack([mine[name] for mine in side]).any(0) for side in (needed, held))
        missing += int((wanted & ~found).sum())
    return missing


@settings(max_examples=40, deadline=None)
@given(specs, seeds, seeds, node_sizes, st.integers(1, 400))
def test_every_element_arrives_exactly_once_at_the_smallest_cost(spec, a, b, node, limit):
    source, destination = any_layout(spec, a), any_layout(spec, b)
    made = plan(source, destination, lambda rank: rank // node)
    have, expected = filled(source), filled(destination)
    got, writes = blank(expected), blank(expected)

    def put(move: Move, values: torch.Tensor) -> None:
        for region in move.into:
            region.view(got[move.destination][region.storage], move.box).copy_(values)
            region.view(writes[move.destination][region.storage], move.box).add_(1)

    for rounds in ([[move for move in made.moves if move.local]], made.buckets(limit, 1)):
        for moves in rounds:  # all of a round is read before anything of it is written
            sides = [got if move.hop else have for move in moves]
            origins = [side[move.source][move.origin.storage] for side, move in zip(sides, moves, strict=True)]
            read = [m.origin.view(o, m.box).clone() for m, o in zip(moves, origins, strict=True)]
            for move, values in zip(moves, read, strict=True):
                put(move, values)
    for rank, storage in enumerate(expected):
        for name, tensor in storage.items():
            assert torch.equal(got[rank][name], tensor)
            assert torch.equal(writes[rank][name], (tensor > 0).long())
    traffic = made.traffic(itemsize=1)
    for rank in range(RANKS):
        assert traffic[rank].received_bytes == minimum(source, destination, rank)
    for first in range(0, RANKS, node):
        ranks = list(range(first, min(first + node, RANKS)))
        crossing = sum(traffic[rank].received_between_nodes for rank in ranks)
        assert crossing == minimum_into(source, destination, ranks)
    assert sum(t.sent_bytes for t in traffic) == sum(t.received_bytes for t in traffic)
    assert sum(t.sent_between_nodes for t in traffic) == sum(t.received_between_nodes for t in traffic)


@settings(max_examples=15, deadline=None)
@given(specs, seeds, seeds, node_sizes, st.integers(1, 400))
def test_a_rank_plans_its_own_part_as_in_the_whole(spec, a, b, node, limit):
    source, destination = any_layout(spec, a), any_layout(spec, b)
    node_of = lambda rank: rank // node  # noqa: E731
    whole_plan = plan(source, destination, node_of)
    rounds, traffic = whole_plan.buckets(limit, 1), whole_plan.traffic(1, limit)
    alike = replace(source, part=None), replace(destination, part=None)  # every rank asked for its regions
    for rank in range(RANKS):
        own = plan(*alike, node_of, rank=rank)
        assert own.moves == tuple(move for move in whole_plan.moves if rank in (move.source, move.destination))
        assert own == replace(whole_plan, rank=rank, moves=own.moves)
        mine = [[move for move in moves if rank in (move.source, move.destination)] for moves in rounds]
        while mine and not mine[-1]:
            mine.pop()
        assert own.buckets(limit, 1) == mine
        assert own.traffic(1, limit) == [traffic[rank]]


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


def test_a_tensor_that_the_source_lacks_is_named():
    source = Layout({n: s for n, s in whole(SPEC).tensors.items() if n != "lm_head.weight"}, 1, lambda rank: ())
    with pytest.raises(LayoutError, match=r"not of the same model: lm_head.weight \(10, 8\) is not in the source"):
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
    headless = Layout(fewer, 1, lambda rank: kept)
    assert {move.box.tensor for move in plan(whole(SPEC), headless).moves} == set(fewer)
    with pytest.raises(LayoutError, match=r"lm_head.weight \(10, 8\) is in the source only"):
        plan(whole(SPEC), headless, exact=True)
    assert plan(whole(SPEC), whole(SPEC), exact=True) == plan(whole(SPEC), whole(SPEC))


def test_layouts_of_different_models_are_refused_with_examples_and_a_count():
    with pytest.raises(LayoutError, match=r"not of the same model: .*\(and \d+ more\).*the same model spec"):
        plan(whole(TIED), whole(SIX))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_refused(rank):
    with pytest.raises(LayoutError, match=f"rank {rank} is not among the 2 ranks"):
        plan(whole(SPEC), whole(SPEC, 2), rank=rank)


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


@pytest.mark.parametrize(
    ("offset", "strides"), [((0,), None), ((0, 0, 0), None), ((0, 0), (8, 1)), ((0,), (1,)), ((0,), ())]
)
def test_an_offset_that_does_not_fit_its_tensor_is_refused(offset, strides):
    wrong = Layout({"w": (4, 8)}, 1, lambda rank: [Region(Box.whole("w", (4, 8)), "s", offset, strides)])
    with pytest.raises(LayoutError, match=r"stores w\[0:4, 0:8\] in 's' at offset .* The offset has to be one number"):
        plan(wrong, wrong)


def test_a_destination_without_a_place_for_some_elements_is_refused_where_all_are_asked_for():
    half = Layout({"w": (4, 8)}, 1, lambda rank: [Region(Box("w", (0, 0), (2, 8)), "w", (0, 0))])
    full = Layout({"w": (4, 8)}, 1, lambda rank: [Region(Box.whole("w", (4, 8)), "w", (0, 0))])
    assert sum(move.box.numel for move in plan(full, half).moves) == 16
    assert sum(move.box.numel for move in plan(full, full, exact=True).moves) == 32
    with pytest.raises(LayoutError, match=r"names w \(4, 8\), but its ranks have a place for 16 of the 32"):
        plan(full, half, exact=True)


@pytest.mark.parametrize("members", [(0, 5), (1, 1), (-1, 0), (0,), (0, 1, 2)])
def test_a_layout_is_placed_on_as_many_different_ranks_of_the_group(members):
    with pytest.raises(LayoutError, match="2 ranks cannot be placed on ranks"):
        whole(SPEC, 2).placed(members, 3)


def test_a_relay_knows_who_gave_the_piece_first():
    made = plan(whole(SPEC), placed(whole(SPEC, 7), range(1, 8)), node_of=lambda rank: rank // 4)
    relays = [move for move in made.moves if move.hop]
    assert {move.root for move in relays} == {(0, name) for name in SPEC.tensors()}
    assert all(move.root is None for move in made.moves if not move.hop)


def test_scalars_and_empty_plans():
    one = Layout({"scale": ()}, 1, lambda rank: [Region(Box("scale", (), ()), "scale", ())])
    made = plan(one, placed(one, [1]))
    assert [(m.source, m.destination, m.box.numel) for m in made.moves] == [(0, 1, 1)]
    nothing = plan(Layout({}, 1, lambda rank: ()), Layout({}, 2, lambda rank: ()))
    assert nothing == WeightPlan(2, (), nodes=(0, 0))
    assert (nothing.buckets(), nothing.routing_table()) == ([], ())
    assert [t.received_bytes for t in nothing.traffic()] == [0, 0]


def test_a_plan_is_plain_data():
    made = plan(fused(TIED, 2, 2, 1), whole(TIED, 2), rank=1)
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_plan_of_some_tensors_keeps_the_rounds_of_the_whole():
    made = plan(fused(SIX, 3, 1, 2), whole(SIX, 6))
    layers = [{name for name in SIX.tensors() if f".{layer}." in name} for layer in range(SIX.layers)]
    rest = set(SIX.tensors()).difference(*layers)
    parts = [made.only(names) for names in (*layers, rest)]
    assert Counter(move for part in parts for move in part.moves) == Counter(made.moves)
    rounds = made.buckets(500, 1)
    for part, names in zip(parts, (*layers, rest), strict=True):
        for i, moves in enumerate(part.buckets(500, 1)):
            assert moves == [move for move in rounds[i] if move.box.tensor in names]
