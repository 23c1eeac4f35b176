"""What a batch promises, held by `Batch` and, where it needs no cluster, by `BatchRef`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import booleans, data, integers, just, lists, one_of, slices

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.errors import BatchError, MissingColumnError
from tests.example_batches import make

KINDS = {"Batch": lambda batch: batch, "BatchRef": BatchRef.from_batch}
batch_only = pytest.mark.parametrize("of", [KINDS["Batch"]], ids=["Batch"])


@pytest.fixture(params=KINDS)
def of(request):
    """Makes a batch of one kind."""
    return KINDS[request.param]


def home(batch: Any) -> Batch:
    return batch if isinstance(batch, Batch) else batch.get()


@pytest.fixture
def batch(of):
    return of(make(6))


def test_columns_and_rows(batch):
    assert len(batch) == batch.rows == 6
    assert batch.columns == make(6).columns
    assert "reward" in batch
    assert "rewards" not in batch
    assert 3 not in batch
    assert home(batch).equal(make(6))


@pytest.mark.parametrize(
    "choose",
    [
        lambda b: b.select("reward", "row_id"),
        lambda b: b.select(["reward", "row_id"]),
        lambda b: b[["reward", "row_id"]],
        lambda b: b["reward", "row_id"],
    ],
)
def test_columns_are_chosen_by_names_or_a_list_of_them(batch, choose):
    assert choose(batch).columns == ("reward", "row_id")
    assert home(choose(batch)).equal(make(6).select("reward", "row_id"))


def test_columns_are_dropped_and_renamed_by_names_or_a_collection(batch):
    assert batch.without("answer", "mask").columns == batch.without(["answer", "mask"]).columns
    assert "mask" not in batch.without(["answer", "mask"])
    for renamed in (batch.rename(reward="score"), batch.rename({"reward": "score"}), batch.rename({}, reward="score")):
        assert renamed.columns == tuple("score" if name == "reward" else name for name in make(6).columns)
        assert home(renamed).select("score").equal(make(6).select("reward").rename(reward="score"))
    with pytest.raises(BatchError, match=r"one name|two columns"):
        batch.rename(reward="mask")


@pytest.mark.parametrize(
    ("rows", "index"), [(slice(1, 4), [1, 2, 3]), (slice(4, 2), []), (slice(-2, None), [4, 5]), (-1, [5]), (2, [2])]
)
def test_rows_are_chosen_by_slices_and_a_number(batch, rows, index):
    assert len(batch[rows]) == len(index)
    assert home(batch[rows]).equal(make(6).reorder(index))


@pytest.mark.parametrize(
    ("rows", "index"),
    [
        (slice(None, None, 2), [0, 2, 4]),
        ([0, 2], [0, 2]),
        ([5, -6, 5], [5, 0, 5]),
        ([], []),
        (range(3, 1, -1), [3, 2]),
        (torch.tensor([4, 1]), [4, 1]),
        (np.array([2]), [2]),
        (torch.tensor([True, False, False, True, True, False]), [0, 3, 4]),
        ([False] * 5 + [True], [5]),
        (torch.tensor(2), [2]),
    ],
)
def test_rows_are_chosen_by_numbers_and_masks(batch, rows, index):
    assert len(batch[rows]) == len(index)
    assert home(batch[rows]).equal(make(6).reorder(index))


def test_wrong_rows_and_names_are_refused(batch):
    for wrong in ([6], [0.5], torch.zeros(1, 1, dtype=torch.int64), [True], ["reward", 1]):
        with pytest.raises(BatchError):
            batch[wrong]
    for wrong in (6, -7):
        with pytest.raises(IndexError):
            batch[wrong]
    for wrong in (None, 1.5, {}):
        with pytest.raises(BatchError, match="indexed by columns or rows"):
            batch[wrong]
    with pytest.raises(BatchError, match="by name"):
        batch.select(["reward", 1])


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b["rewards"],
        lambda b: b[["rewards"]],
        lambda b: b.select("rewards"),
        lambda b: b.without("rewards"),
        lambda b: b.rename(rewards="x"),
        lambda b: b.rename({"rewards": "x"}),
        lambda b: b.split(2, balance="rewards"),
    ],
)
def test_a_missing_column_names_the_nearest(batch, call):
    with pytest.raises(MissingColumnError, match=r"no column 'rewards'. Did you mean 'reward'"):
        call(batch)


def test_union_takes_batches_and_mappings(batch, of):
    values = torch.rand(6)
    more = {"values": values, "reward": [0] * 6, "hint": ["h"] * 6}
    expected = make(6) | Batch(more)
    for both in (batch | of(Batch(more)), batch | Batch(more), batch | more, batch.union(more)):
        assert type(both) is type(batch)
        assert home(both).equal(expected)
        assert home(both)["reward"].dtype == torch.int64
    assert home(more | batch)["reward"].dtype == torch.float32  # the right one's column wins
    with pytest.raises(BatchError, match="6 rows with one of 2"):
        batch | {"x": [1, 2]}
    with pytest.raises((BatchError, TypeError)):
        batch | 3


@batch_only
def test_union_refuses_other_rows(batch, of):
    with pytest.raises(BatchError, match="row_id"):
        home(batch | of(make(6).reorder([1, 0, 2, 3, 4, 5])))
    assert len(batch | of(make(6))) == 6


def test_repeat_keeps_copies_adjacent_and_ids_unique(batch, of):
    twice = batch.repeat(2)
    assert len(twice) == 12
    assert home(twice).equal(make(6).repeat(2))
    assert home(twice.repeat(3)).equal(make(6).repeat(2).repeat(3))
    assert home(batch.repeat(1)).equal(make(6).repeat(1))
    plain = of(Batch({"x": torch.tensor([5, 6])})).repeat(2)
    assert home(plain)["group_id"].tolist() == [0, 0, 1, 1]
    assert home(plain)["row_id"].tolist() == [0, 1, 2, 3]
    with pytest.raises(BatchError, match="repeat"):
        batch.repeat(0)


def test_split_loses_no_row(batch):
    for parts in (batch.split(4), batch.split(2, balance="response_ids"), batch.split(3, balance="reward", chunks=2)):
        rows = [int(row) for part in parts for row in home(part)["row_id"]]
        assert sorted(rows) == list(range(6))
    assert home(type(batch).concat(batch.split(4))).equal(make(6))


@batch_only
def test_balance_loses_no_row(batch):
    rows = [int(row) for part in batch.balance(3, by="response_ids") for row in home(part)["row_id"]]
    assert sorted(rows) == list(range(6))
    with pytest.raises(MissingColumnError, match=r"no column 'rewards'. Did you mean 'reward'"):
        batch.balance(2, "rewards")


@given(data())
def test_chains_of_selections_are_those_of_a_batch(drawn):
    """Parts of joined parts, by numbers and masks: a reference finds the rows that a batch copies."""
    whole = make(8)
    batch, reference = whole, BatchRef.concat([BatchRef.from_batch(whole[:3]), BatchRef.from_batch(whole[3:])])
    for _ in range(3):
        rows = len(batch)
        numbers = lists(integers(-rows, rows - 1), max_size=9) if rows else just([])
        key = drawn.draw(one_of(numbers, lists(booleans(), min_size=rows, max_size=rows), slices(rows)))
        batch, reference = batch[key], reference[key]
    assert len(reference) == len(batch)
    assert reference.get().equal(batch)


def test_a_column_selects_rows():
    batch = make(6) | {"kept": [True, False, True, False, False, True]}
    reference = BatchRef.from_batch(batch)
    assert reference[reference["kept"]].get().equal(batch[batch["kept"]])
    assert len(reference[[]].get()) == 0


def test_vectors_of_repeated_rows_are_in_memory_once():
    """Of a group's images; whatever else happened to the rows."""
    patches = Ragged.from_lengths(torch.randn(12, 4), [2, 0, 7, 3])
    ref = BatchRef.from_batch(Batch({"pixel_values": patches, "num_tokens": torch.tensor([9, 2, 4, 5])})).repeat(3)
    parts = ref.split(2, balance="num_tokens", chunks=2)
    for one, index in ((ref, torch.arange(4).repeat_interleave(3)), (BatchRef.concat(parts), None)):
        found: Any = one.get().peek("pixel_values")
        assert found.equal(patches.index(torch.arange(4).repeat_interleave(3) if index is None else index))
    for part in [*parts, *(part[1:4] for part in parts)]:
        got, group = part.get(), [number // 3 for number in part.get()["row_id"].tolist()]
        rows = got.peek("pixel_values").rows()
        assert all(map(torch.equal, rows, patches.index(group).rows()))
        places = {
            number: {row.data_ptr() for row, of in zip(rows, group, strict=True) if of == number} for number in group
        }
        assert {number: len(places[number]) for number in places} == dict.fromkeys(places, 1)
