"""Boxes against sets of index tuples: every operation is checked element by element."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engine3d.layout import Box, Region, partition

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
