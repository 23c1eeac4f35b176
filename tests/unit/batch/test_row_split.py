"""RowPlan: every row exactly once, counts known in advance, loads evened out, groups never cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch.row_split import RowPlan, balance
from hybridflow.errors import BatchError
from hybridflow.topology import even_bounds

sizes = st.tuples(st.integers(0, 200), st.integers(1, 40), st.integers(1, 9))


def weights_of(rows: int, seed: int, kind: str = "long") -> torch.Tensor:
    """Skewed row lengths, as real responses have them."""
    random = torch.rand(rows, generator=torch.Generator().manual_seed(seed))
    return (random**4 * 4000).long() if kind == "long" else random


@st.composite
def grouped(draw):
    """(group ids, rows) of groups of different sizes; ids in no order."""
    lengths = draw(st.lists(st.integers(1, 9), max_size=30))
    ids = draw(st.permutations(range(len(lengths))))
    return torch.tensor(ids, dtype=torch.int64).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))


def loads(assignment, weights, chunk):
    return [float(weights[part[chunk]].double().sum()) for part in assignment]


def check_cover(assignment, rows: int, parts: int, chunks: int) -> None:
    assert len(assignment) == parts
    assert all(len(part) == chunks for part in assignment)
    for part in assignment:
        for index in part:
            assert index.dtype == torch.int64
            assert (index.diff() > 0).all()
    assert sorted(torch.cat([index for part in assignment for index in part]).tolist()) == list(range(rows))


@given(st.integers(0, 500), st.integers(1, 600))
def test_even_bounds_are_even_and_larger_first(rows, parts):
    sizes = torch.tensor(even_bounds(rows, parts)).diff().tolist()
    assert len(sizes) == parts
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(sizes)
def test_contiguous_covers_every_row_once_in_order(size):
    rows, parts, chunks = size
    plan = RowPlan(rows, parts, chunks)
    assignment = plan.assign()
    check_cover(assignment, rows, parts, chunks)
    assert [[len(index) for index in part] for part in assignment] == plan.counts()
    by_chunk = torch.cat([part[chunk] for chunk in range(chunks) for part in assignment])
    assert by_chunk.tolist() == list(range(rows))


@given(sizes, st.integers(0, 2**20), st.sampled_from(["long", "float"]))
def test_balanced_keeps_the_counts_and_is_never_worse(size, seed, kind):
    rows, parts, chunks = size
    plan, weights = RowPlan(rows, parts, chunks), weights_of(rows, seed, kind)
    assignment = plan.assign(weights)
    check_cover(assignment, rows, parts, chunks)
    assert [[len(index) for index in part] for part in assignment] == plan.counts()
    contiguous = plan.assign()
    for chunk in range(chunks):
        assert max(loads(assignment, weights, chunk)) <= max(loads(contiguous, weights, chunk)) * (1 + 1e-9)


@given(st.integers(1, 12), st.integers(2, 30), st.integers(0, 2**20))
def test_balance_leaves_a_spread_of_at_most_one_row(parts, rounds, seed):
    """Known bound: joining heaviest to lightest never widens the largest spread, which starts at one row's load."""
    weights = weights_of(parts * rounds, seed)
    totals = [int(weights[units].sum()) for units in balance(weights, parts)]
    assert max(totals) - min(totals) <= int(weights.max())


def test_balance_of_many_rows_is_close_to_perfect():
    weights = weights_of(4096, seed=3)
    totals = loads(RowPlan(4096, 64).assign(weights), weights, 0)
    assert max(totals) <= 1.001 * sum(totals) / 64
    assert max(loads(RowPlan(4096, 64).assign(), weights, 0)) > 1.1 * sum(totals) / 64


def test_balance_is_deterministic_with_equal_loads():
    weights = torch.tensor([5, 5, 5, 5, 1, 1, 1, 1])
    first = RowPlan(8, 2).assign(weights)
    assert [part[0].tolist() for part in first] == [part[0].tolist() for part in RowPlan(8, 2).assign(weights)]
    assert loads(first, weights, 0) == [12, 12]


@given(grouped(), st.integers(1, 12), st.integers(1, 5), st.booleans(), st.integers(0, 2**20))
def test_groups_are_never_cut(groups, parts, chunks, balanced, seed):
    rows = len(groups)
    weights = weights_of(rows, seed) if balanced else None
    assignment = RowPlan(rows, parts, chunks).assign(weights, groups)
    check_cover(assignment, rows, parts, chunks)
    home = {}
    for part_number, part in enumerate(assignment):
        for chunk, index in enumerate(part):
            for group in groups[index].tolist():
                assert home.setdefault(group, (part_number, chunk)) == (part_number, chunk)


@given(sizes, st.integers(1, 40), st.booleans(), st.integers(0, 2**20), grouped(), st.booleans())
def test_mini_batches_do_not_depend_on_the_number_of_parts(size, other, balanced, seed, groups, use_groups):
    rows, parts, chunks = (len(groups), *size[1:]) if use_groups else size
    weights = weights_of(rows, seed) if balanced else None
    ids = groups if use_groups else None

    def members(parts):
        assignment = RowPlan(rows, parts, chunks).assign(weights, ids)
        return [sorted(torch.cat([part[chunk] for part in assignment]).tolist()) for chunk in range(chunks)]

    assert members(parts) == members(other)


def test_equal_groups_stay_equal_counts():
    """GRPO: 16 prompts x 8 responses over 4 parts: 4 whole groups each, whatever the lengths are."""
    groups = torch.arange(16).repeat_interleave(8)
    assignment = RowPlan(128, 4).assign(weights_of(128, seed=1), groups)
    assert [len(part[0]) for part in assignment] == [32] * 4


@given(grouped(), st.integers(1, 12), st.integers(1, 5))
def test_mini_batches_have_equally_many_groups(groups, parts, chunks):
    assignment = RowPlan(len(groups), parts, chunks).assign(groups=groups)
    counts = [
        sum(len(groups[part[chunk]].unique()) for part in assignment if len(part[chunk])) for chunk in range(chunks)
    ]
    assert max(counts) - min(counts) <= 1


def test_groups_snap_to_the_nearest_boundary():
    groups = torch.tensor([7, 7, 7, 7, 7, 2, 2, 9])
    assert [part[0].tolist() for part in RowPlan(8, 2).assign(groups=groups)] == [[0, 1, 2, 3, 4], [5, 6, 7]]


def test_fewer_rows_than_parts_gives_empty_parts():
    assert [len(part[0]) for part in RowPlan(2, 5).assign()] == [1, 1, 0, 0, 0]
    assert [len(part[0]) for part in RowPlan(2, 5).assign(torch.tensor([1, 9]))] == [1, 1, 0, 0, 0]
    assert [len(part[0]) for part in RowPlan(0, 3).assign(torch.empty(0))] == [0, 0, 0]


@pytest.mark.parametrize(
    ("weights", "groups", "message"),
    [
        (torch.ones(3), None, r"weights must have shape \[4\]"),
        (torch.tensor([1.0, -1, 1, 1]), None, "not negative"),
        (torch.tensor([1.0, float("nan"), 1, 1]), None, "finite"),
        (None, torch.ones(5), r"groups must have shape \[4\]"),
        (None, torch.tensor([0, 1, 0, 1]), "group 0 are not adjacent"),
    ],
)
def test_bad_weights_and_groups(weights, groups, message):
    with pytest.raises(BatchError, match=message):
        RowPlan(4, 2).assign(weights, groups)


@pytest.mark.parametrize("size", [(-1, 1, 1), (3, 0, 1), (3, 1, 0), (3, 1.5, 1)])
def test_bad_sizes(size):
    with pytest.raises(BatchError, match="whole number"):
        RowPlan(*size)
