"""Who sends what to whom: balanced senders, nodes that are entered once, relays, and the routing table."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engine3d.layout import Box, Layout
from hybridflow.engine3d.plan import Move, WeightPlan, plan
from hybridflow.engine3d.routing import Routes, Send, cut
from hybridflow.errors import LayoutError
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.example_layouts import SIX, SPEC, TIED, any_layout, elements, fused, placed, side_by_side, whole

RANKS = 6
specs, seeds = st.sampled_from([SPEC, TIED, SIX]), st.integers(0, 10**6)


def holders(source: Layout, move: Move) -> frozenset[int]:
    """Ranks whose source regions contain the piece."""
    inside = lambda r: any(region.box.intersect(move.box) == move.box for region in source.regions(r))  # noqa: E731
    return frozenset(rank for rank in range(source.ranks) if inside(rank))


@settings(max_examples=60, deadline=None)
@given(specs, seeds, seeds)
def test_ranks_that_hold_the_same_share_the_sending(spec, a, b):
    source, destination = any_layout(spec, a), any_layout(spec, b)
    if any(len({r.box for r in source.regions(rank)}) < len(source.regions(rank)) for rank in range(RANKS)):
        return  # `holders` below does not join boxes that overlap
    sent: dict[frozenset[int], Counter[int]] = defaultdict(Counter)
    largest: Counter[frozenset[int]] = Counter()
    for move in plan(source, destination).moves:
        if not move.local and not move.hop:
            owners = holders(source, move)
            assert move.source in owners
            sent[owners][move.source] += move.box.numel
            largest[owners] = max(largest[owners], move.box.numel)
    for owners, load in sent.items():
        assert max(load[rank] for rank in owners) - min(load[rank] for rank in owners) <= largest[owners]


ranks_of = st.integers(2, 60)


@settings(max_examples=200, deadline=None)
@given(ranks_of, st.integers(1, 8), st.data())
def test_every_needer_is_served_once_and_every_node_is_entered_once(ranks, node, data):
    have = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    nodes = [rank // node for rank in range(ranks)]
    wanted = data.draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    needs = [frozenset(data.draw(st.sets(st.integers(0, ranks - 1)))) - have for _ in range(3)]
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    routes, alone = Routes(have, nodes, wanted), Routes(have, nodes, wanted)
    asked = [(needs[i % 3], size) for i, size in enumerate(sizes) if needs[i % 3]]
    for each in (routes, alone):
        at = [each.fan(need).add(size) for need, size in asked]
        assert at == [sum(n for other, n in asked[:i] if other == need) for i, (need, _) in enumerate(asked)]
    one = data.draw(st.integers(0, ranks - 1))
    for need, size in asked:
        fan = routes.fan(need)
        sends, copies = fan.sends(size), fan.copies()
        assert alone.fan(need).sends(size, one) == [send for send in sends if one in send[:2]]
        check_sends(sends, have, need, nodes)
        count = Counter(rank for send in sends for rank in send[:2])
        assert all(count[rank] <= copies[rank] for rank in count)
    assert routes.concern(one) == (bool(asked) and (one in have or any(one in need for need, _ in asked)))


def check_sends(sends: list[Send], have: set[int], need: frozenset[int], nodes: list[int]) -> None:
    assert sorted(send.destination for send in sends) == sorted(need)
    arrived = dict.fromkeys(have, -1)
    for send in sends:
        assert arrived[send.source] == send.hop - 1  # whoever relays has it one hop earlier
        arrived[send.destination] = send.hop
    crossing = [nodes[send.destination] for send in sends if nodes[send.source] != nodes[send.destination]]
    missing = {nodes[rank] for rank in need} - {nodes[rank] for rank in have}
    assert sorted(crossing) == sorted(missing)


def test_a_holder_serves_all_ranks_of_its_node_itself():
    routes = Routes([0], [0] * 9, [0] * 9)
    assert routes.fan(frozenset(range(1, 9))).sends(1) == [Send(0, rank, 0, 0) for rank in range(1, 9)]


def test_differently_sharded_replicas_share_the_sending_of_what_they_hold_alike():
    both = side_by_side(whole(SPEC), fused(SPEC, 1, 2, 1))
    made = plan(both, placed(whole(SPEC, 4), range(3, 7)))
    norms = made.only([name for name in SPEC.tensors() if "norm" in name])
    sent = [t.sent_bytes for t in norms.traffic(itemsize=1)[:3]]
    assert max(sent) - min(sent) <= SPEC.hidden
    shards = made.only([name for name in SPEC.tensors() if "norm" not in name])
    sent = [t.sent_bytes for t in shards.traffic(itemsize=1)[:3]]
    assert sent[0] == pytest.approx(sum(sent) / 2, rel=0.02)


def test_the_ranks_of_a_node_take_turns_in_fetching_from_outside():
    made = plan(whole(SPEC), placed(whole(SPEC, 4), range(4, 8)), node_of=lambda rank: rank // 4)
    traffic = made.traffic(itemsize=1)
    into = [t.received_between_nodes for t in traffic[4:]]
    assert sum(into) == SPEC.num_parameters
    assert max(into) - min(into) <= max(prod(shape) for shape in SPEC.tensors().values())
    assert [t.received_bytes for t in traffic[4:]] == [SPEC.num_parameters] * 4


MODEL = ModelSpec(family="llama", hidden=16, intermediate=32, layers=8, heads=8, kv_heads=8, head_dim=2, vocab=64)


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize(("p", "t", "factor"), [(2, 1, 2), (4, 1, 2), (4, 2, 2), (4, 1, 4), (8, 1, 4), (2, 4, 2)])
def test_the_routing_table_of_puzzles_case(p, t, d, factor):
    """D stays, P is divided and T multiplied by the same factor: each rank broadcasts pieces of its own layers only.

    A stage's ranks hand their shards to the ranks of the new, larger stage that contains them, within their replica.
    """
    source, destination = fused(MODEL, p, t, d), fused(MODEL, p // factor, t * factor, d)
    made = plan(source, destination)
    old, new = RankGrid(p, t, d), RankGrid(p // factor, t * factor, d)
    table = made.only([name for name in MODEL.tensors() if "_proj" in name]).routing_table()
    layers = MODEL.layers // p
    for line in table:
        stage = old.coords(line.root).p
        assert {int(name.split(".")[2]) // layers for name in line.tensors} == {stage}
        for receiver in line.receivers:
            assert old.coords(receiver).d == old.coords(line.root).d
            assert new.coords(receiver).p == stage // factor
            assert new.coords(receiver).t // factor == old.coords(line.root).t  # its shard lies within the root's
    assert {line.root for line in table} == set(range(old.size))
    moved = Counter[int]()
    for line in table:
        for receiver in line.receivers:
            moved[receiver] += line.elements
    for rank in range(old.size):
        held, needed = elements(source, rank), elements(destination, rank)
        assert moved[rank] == sum(int((needed[n] & ~held[n]).sum()) for n in needed if "_proj" in n)


def test_the_routing_table_names_who_gives_not_who_passes_on():
    made = plan(whole(SPEC), placed(whole(SPEC, 5), range(1, 6)), node_of=lambda rank: rank // 3)
    assert any(move.hop for move in made.moves)
    (line,) = made.routing_table()
    assert (line.root, line.receivers, line.elements) == (0, (1, 2, 3, 4, 5), SPEC.num_parameters)
    assert line.tensors == tuple(SPEC.tensors())


def test_the_routing_table_needs_the_whole_plan():
    with pytest.raises(LayoutError, match="rank 1's part of a plan"):
        plan(whole(SPEC), whole(SPEC, 2), rank=1).routing_table()


def test_the_same_plan_whether_alike_ranks_are_known_or_not():
    source, destination = fused(MODEL, 2, 2, 2), fused(MODEL, 1, 2, 4)
    made = plan(source, destination)
    assert made == plan(replace(source, part=None), replace(destination, part=None))
    boxes = {move.box for move in made.moves}
    assert all(a.intersect(b) is None for a, b in combinations(boxes, 2))


node_sizes = st.sampled_from([1, 2, 4, RANKS])


def travelling(made: WeightPlan) -> list[Move]:
    return [move for move in made.moves if not move.local]


@settings(max_examples=50, deadline=None)
@given(specs, seeds, seeds, node_sizes, st.integers(1, 2000), st.sampled_from([1, 2, 4]))
def test_rounds_are_bounded_complete_and_in_order(spec, a, b, node, elements_each, itemsize):
    made = plan(any_layout(spec, a), any_layout(spec, b), lambda rank: rank // node)
    limit = elements_each * itemsize
    rounds = made.buckets(limit, itemsize)
    moved = Counter[int]()
    for moves in rounds:
        extra = Counter[int]()
        for move in moves:
            assert not move.local
            for rank in (move.source, move.destination):
                extra[rank] += move.box.numel * itemsize
        assert max(extra.values(), default=0) <= max(limit // 2, (made.pace.copies + 1) * itemsize)
        moved.update(extra)
    traffic = made.traffic(itemsize, limit)
    assert [moved[t.rank] for t in traffic] == [t.sent_bytes + t.received_bytes for t in traffic]
    assert max(t.sent_bytes + t.received_bytes for t in traffic) <= made.pace.elements * itemsize
    at = 0
    pieces = [move for moves in rounds for move in moves]
    for move in travelling(made):  # cutting changes neither content nor order
        ends = (move.source, move.destination)
        parts = [p.box for p in pieces if (p.source, p.destination) == ends and move.box.intersect(p.box) == p.box]
        assert sum(box.numel for box in parts) == move.box.numel
        assert [box.start for box in parts] == sorted(box.start for box in parts)
        at += len(parts)
    assert at == len(pieces)


@settings(max_examples=25, deadline=None)
@given(specs, st.integers(1, 3), st.integers(3, 40), st.integers(1, 5), st.integers(100, 3000))
def test_a_relay_comes_after_the_round_that_brings_its_piece(spec, holders, needers, node, limit):
    destination = whole(spec, needers).placed(range(holders, holders + needers), holders + needers)
    made = plan(whole(spec, holders), destination, lambda rank: rank // node)
    arrived: dict[tuple[Box, int], int] = {}
    for i, moves in enumerate(made.buckets(limit, 1)):
        for move in moves:
            if move.hop:
                assert arrived[move.box, move.source] < i - 1  # the round before is under way when this is posted
            else:
                assert move.source < holders
        arrived |= {(move.box, move.destination): i for move in moves}
    sizes = Counter[int]()
    for box, rank in arrived:
        sizes[rank] += box.numel
    assert sizes == dict.fromkeys(range(holders, holders + needers), spec.num_parameters)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=0, max_size=3),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 60),
    st.integers(1, 40),
)
def test_cutting_covers_a_box_once_and_fills_windows_evenly(shape, before, after, windows, grain):
    box = Box.whole("w", shape)
    of = before + box.numel + after
    parts = list(cut(box, before, of, windows, grain))
    at, held = before, Counter[int]()
    for window, part in parts:
        assert part.intersect(box) == part
        last = at + part.numel - 1
        assert window == last * windows // of
        assert -(-window * of // windows) - at < max(grain, 1)  # what it has of earlier windows
        held[window] += part.numel
        at += part.numel
    assert at == before + box.numel  # in index order, each element once
    assert sum(part.numel for _, part in parts) == box.numel
    assert all(not a.intersect(b) for i, (_, a) in enumerate(parts) for _, b in parts[:i])
    assert all(count <= -(-of // windows) + grain - 1 for count in held.values())


def test_pieces_that_fit_are_left_whole():
    made = plan(fused(SPEC, 2, 2, 1), whole(SPEC, 4))
    assert [move for moves in made.buckets(1 << 20, 4) for move in moves] == travelling(made)


def test_disjoint_pairs_fill_rounds_side_by_side():
    """Pipeline stages in turn: without it the second stage would wait until the first is done."""
    made = plan(fused(SIX, 2, 1, 1).placed([0, 1], 4), fused(SIX, 2, 1, 1).placed([2, 3], 4))
    rounds = made.buckets(800, 1)
    total = max(t.sent_bytes for t in made.traffic(itemsize=1))
    assert len(rounds) <= 2 * -(-total // 400)
    assert all({move.destination for move in moves} == {2, 3} for moves in rounds)
