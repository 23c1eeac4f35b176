"""Ragged: the same rows as a plain list of lists, through every operation."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch.ragged import Ragged, SharedRows, spans
from hybridflow.errors import BatchError

lists = st.lists(st.lists(st.integers(-1000, 1000), max_size=6), max_size=12)


@given(lists)
def test_rows_round_trip(rows):
    ragged = Ragged.from_rows(rows)
    assert len(ragged) == len(rows)
    assert ragged.dtype == torch.int64
    assert ragged.tolist() == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert [ragged.row(i).tolist() for i in range(len(rows))] == rows
    assert pickle.loads(pickle.dumps(ragged)).equal(ragged)


@given(lists, st.data())
def test_slice_index_concat(rows, data):
    ragged = Ragged.from_rows(rows)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert ragged.slice(start, stop).tolist() == rows[start:stop]
    assert int(ragged.slice(start, stop).offsets[0]) == 0
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
    assert ragged.index(index).tolist() == [rows[i] for i in index]
    assert Ragged.concat([ragged.slice(0, start), ragged.slice(start, len(rows))]).tolist() == rows


@given(lists)
def test_row_arithmetic(rows):
    ragged = Ragged.from_rows(rows)
    assert ragged.row_sum().tolist() == [sum(row) for row in rows]
    assert ragged.row_index().tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert ragged.expand(torch.arange(len(rows))).tolist() == ragged.row_index().tolist()
    padded = ragged.pad(-7).tolist()
    width = max((len(row) for row in rows), default=0)
    assert padded == [row + [-7] * (width - len(row)) for row in rows]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=10))
def test_spans(pairs):
    starts = torch.tensor([start for start, _ in pairs], dtype=torch.int64)
    lengths = torch.tensor([length for _, length in pairs], dtype=torch.int64)
    assert spans(starts, lengths).tolist() == [start + i for start, length in pairs for i in range(length)]


def test_feature_dimensions():
    values = torch.arange(12.0).view(6, 2)
    ragged = Ragged.from_lengths(values, [1, 0, 5])
    assert ragged.row(2).shape == (5, 2)
    assert ragged.index([2, 0]).row(1).tolist() == [[0.0, 1.0]]
    assert ragged.row_sum().tolist() == [[0, 1], [0, 0], [30, 35]]
    assert ragged.pad().shape == (3, 5, 2)


def test_shared_rows_are_rows_of_one_memory():
    stored = Ragged.from_lengths(torch.arange(12.0).view(6, 2), [1, 0, 5])
    picked = [2, 2, 0, 1, 2]
    shared, plain = SharedRows(stored, torch.tensor(picked)), stored.index(picked)
    for one, other in (
        (shared, plain),
        (shared.slice(1, 4), plain.slice(1, 4)),
        (shared.index([4, 0, 3]), plain.index([4, 0, 3])),
        (Ragged.concat([shared, stored]), Ragged.concat([plain, stored])),
        (pickle.loads(pickle.dumps(shared)), plain),
        (shared.clone(), plain),
        (shared.map(lambda values: values * 2), plain.map(lambda values: values * 2)),
    ):
        assert one.equal(other)
        assert torch.equal(one.lengths, other.lengths)
        assert all(map(torch.equal, one.rows(), other.rows()))
        assert one.row_sum().equal(other.row_sum())
    assert shared.row(-1).data_ptr() == shared.slice(0, 2).row(1).data_ptr() == stored.row(2).data_ptr()
    assert (shared.dtype, shared.nbytes, len(shared)) == (stored.dtype, stored.nbytes, 5)


def test_slices_are_views_and_negative_rows_count_from_the_end():
    ragged = Ragged.from_rows([[1], [2, 3], [4]])
    ragged.slice(1, 3).values[0] = 9
    assert ragged.row(-2).tolist() == [9, 3]
    with pytest.raises(IndexError):
        ragged.row(3)


def test_row_sum_is_differentiable():
    values = torch.ones(4, requires_grad=True)
    (Ragged.from_lengths(values, [3, 1]).row_sum() * torch.tensor([2.0, 5.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2, 2, 2, 5]


def test_empty_lists_do_not_turn_token_ids_into_floats():
    assert Ragged.from_rows([[1, 2], []]).dtype == torch.int64
    assert Ragged.from_rows([[], [1.5]]).dtype == torch.float32
    assert Ragged.from_rows([[], []]).dtype == torch.int64
    assert Ragged.from_rows([torch.empty(0), torch.empty(0)]).dtype == torch.float32
    assert Ragged.from_rows([[1], []], dtype=torch.float32).dtype == torch.float32


def test_equal_tells_rows_and_types_apart():
    ragged = Ragged.from_rows([[1, 2], [3]])
    assert not ragged.equal(Ragged.from_rows([[1], [2, 3]]))
    assert not ragged.equal(Ragged.from_rows([[1, 2], [4]]))
    assert not ragged.equal(Ragged.from_rows([[1.0, 2.0], [3.0]]))
    assert ragged.equal(ragged.clone())


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.tensor([0, 2]), "run from 0 to 2, there are 3 values"),
        (torch.tensor([1, 3]), "run from 1 to 3"),
        (torch.tensor([0.0, 3.0]), "must be int64"),
        (torch.tensor([[0, 3]]), "must be int64 of shape"),
        (torch.tensor([0, 3, 1, 3]), "must not decrease"),
    ],
)
def test_bad_offsets(offsets, message):
    with pytest.raises(BatchError, match=message):
        Ragged(torch.arange(3), offsets)


def test_negative_lengths_and_nothing_to_join():
    with pytest.raises(BatchError, match="negative"):
        Ragged.from_lengths(torch.arange(1), [2, -1])
    with pytest.raises(BatchError, match="at least one"):
        Ragged.concat([])
    with pytest.raises(BatchError, match="float32 and int64"):
        Ragged.concat([Ragged.from_rows([[1]]), Ragged.from_rows([[1.0]])])
