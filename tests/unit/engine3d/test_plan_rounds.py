"""Rounds of a plan: bounded for every rank, complete, alike on both ends, relays after what they pass on."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engine3d.layout import Box
from hybridflow.engine3d.plan import Move, WeightPlan, plan
from hybridflow.engine3d.routing import cut
from tests.example_layouts import SIX, SPEC, TIED, any_layout, fused, whole

RANKS = 6
specs, seeds = st.sampled_from([SPEC, TIED, SIX]), st.integers(0, 10**6)
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
