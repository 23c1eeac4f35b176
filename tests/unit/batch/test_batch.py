"""Batch: rows and columns survive every operation, and empty batches work everywhere."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, MissingColumnError
from tests.example_batches import batches, make, quick


def test_columns_of_every_kind():
    batch = make(4)
    assert len(batch) == batch.rows == 4
    assert batch.columns == ("row_id", "response_ids", "log_probs", "mask", "hidden", "reward", "answer")
    assert "reward" in batch
    assert "rewards" not in batch
    assert 3 not in batch
    assert isinstance(batch["mask"], Ragged)
    assert batch["hidden"].dtype == torch.bfloat16
    assert batch["answer"] == [None, "<1>", "<2>", None]
    assert Batch({"x": np.arange(3, dtype=np.int32), "s": np.array(["a", "b", "c"])}).to_dicts()[2] == {
        "x": 2,
        "s": "c",
    }


def test_storage_is_a_tensordict():
    storage = make(3).tensordict
    assert type(storage).__name__ == "TensorDict"
    assert storage["hidden"].shape == (3, 3)
    assert storage["response_ids", "offsets"].shape == (4,)
    assert storage["answer"] == [None, "<1>", "<2>"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": torch.zeros(3), "b": [1, 2]}, "same number of rows, got 'a' 3, 'b' 2"),
        ({"": torch.zeros(3)}, "column name"),
        ({7: torch.zeros(3)}, "column name"),
        ({"a": torch.tensor(1.0)}, "'a' is a Tensor without a row dimension"),
        ({"a": "text"}, "'a' is a str"),
        ({"a": 3}, "'a' is a int"),
        ({"a": np.zeros(2, dtype=">f4")}, "'a': torch has no type for an array of >f4"),
    ],
)
def test_bad_columns(columns, message):
    with pytest.raises(BatchError, match=message):
        Batch(columns)


def test_bad_chunk_rows():
    with pytest.raises(BatchError, match=r"has 5 rows, the batch has 3"):
        Batch({"a": torch.zeros(3)}, chunk_rows=(2, 3))


def test_missing_column_names_the_nearest():
    with pytest.raises(MissingColumnError, match=r"no column 'rewards'. Did you mean 'reward'"):
        make(2)["rewards"]
    with pytest.raises(KeyError):
        make(2).select("nothing")
    for call in (lambda b: b.without("rewards"), lambda b: b.rename(rewards="x"), lambda b: b.split(2, balance="x")):
        with pytest.raises(MissingColumnError):
            call(make(2))


def test_select_without_rename_with_columns():
    batch = make(3)
    assert batch.select("reward", "row_id").columns == ("reward", "row_id")
    assert batch.select("reward")["reward"] is batch["reward"]
    assert batch.without("answer", "mask").columns == ("row_id", "response_ids", "log_probs", "hidden", "reward")
    renamed = batch.rename(reward="score")
    assert renamed.columns[5] == "score"
    assert "reward" not in renamed
    added = batch.with_columns(reward=torch.ones(3), text=["a", "b", "c"])
    assert added["reward"].tolist() == [1, 1, 1]
    assert not torch.equal(batch["reward"], added["reward"])
    assert len(batch.select()) == 3
    with pytest.raises(BatchError, match="one name"):
        batch.rename(reward="mask")
    with pytest.raises(BatchError, match="got 'x' 4; the batch has 3"):
        batch.with_columns(x=torch.ones(4))
    with pytest.raises(BatchError, match="got 'x' 4; the batch has 3"):
        batch.select().with_columns(x=torch.ones(4))


def test_row_slices_are_views():
    batch = make(6)
    part = batch[2:5]
    assert part["row_id"].tolist() == [2, 3, 4]
    assert part["hidden"].data_ptr() == batch["hidden"][2:].data_ptr()
    part["response_ids"].values.fill_(5)
    assert all(token == 5 for row in batch["response_ids"].tolist()[2:5] for token in row)
    assert batch[-1]["row_id"].tolist() == [5]
    assert batch[::2]["answer"] == batch["answer"][::2]
    assert batch[::-1]["row_id"].tolist() == [5, 4, 3, 2, 1, 0]
    assert len(batch[4:2]) == 0
    for wrong in (6, -7):
        with pytest.raises(IndexError):
            batch[wrong]
    with pytest.raises(BatchError, match="indexed by columns or rows"):
        batch[None]


def test_iteration_gives_rows():
    rows = list(make(3))
    assert [int(row["row_id"]) for row in rows] == [0, 1, 2]
    assert rows[1]["answer"] == "<1>"
    assert rows[1]["response_ids"].tolist() == make(3)["response_ids"].tolist()[1]


@quick
@given(batches, st.integers(1, 9), st.integers(1, 4))
def test_split_then_concat_is_the_batch(batch, parts, chunks):
    pieces = batch.split(parts, chunks=chunks)
    assert len(pieces) == parts
    by_chunk = [piece.chunks()[chunk] for chunk in range(chunks) for piece in pieces]
    assert Batch.concat(by_chunk).equal(batch)
    assert all(len(piece.chunk_rows) == chunks for piece in pieces)


@quick
@given(batches, st.integers(1, 5), st.sampled_from(["response_ids", "reward"]))
def test_balanced_split_is_undone_by_reorder(batch, parts, column):
    joined = Batch.concat(batch.split(parts, balance=column, chunks=2))
    assert joined.reorder(joined["row_id"].argsort()).equal(batch)


def test_balanced_split_evens_out_tokens():
    batch = Batch({"ids": Ragged.from_lengths(torch.arange(32), [9, 7, 7, 5, 1, 1, 1, 1])})
    totals = [int(part["ids"].lengths.sum()) for part in batch.split(2, balance="ids")]
    assert max(totals) <= 17
    assert [int(part["ids"].lengths.sum()) for part in batch.split(2)] == [28, 4]
    by_weight = batch.split(2, balance=torch.tensor([4, 0, 0, 0, 1, 1, 1, 1]))
    assert {9} <= {length for part in by_weight[:1] for length in part["ids"].lengths.tolist()}
    with pytest.raises(BatchError, match="Python objects has no weights"):
        make(3).split(2, balance="answer")


def test_balance_is_a_split_by_tokens():
    batch = make(12).with_columns(num_tokens=torch.arange(12))
    for by in ("num_tokens", "response_ids"):
        assert all(a.equal(b) for a, b in zip(batch.balance(3, by), batch.split(3, balance=by), strict=True))
    assert [int(part["num_tokens"].sum()) for part in batch.balance(2)] == [33, 33]
    with pytest.raises(MissingColumnError, match="num_tokens"):
        make(4).balance(2)


def test_split_by_groups_keeps_them_whole():
    batch = make(5).repeat(3)
    for balance in (None, "response_ids"):
        parts = batch.split(4, groups=True, balance=balance)
        assert sum(len(part) for part in parts) == 15
        assert all(len(part) % 3 == 0 for part in parts)
    with pytest.raises(MissingColumnError, match="group_id"):
        make(5).split(2, groups=True)


def test_chunks_by_rows():
    batch = Batch({"x": torch.arange(5)}, chunk_rows=(2, 0, 3))
    assert [chunk["x"].tolist() for chunk in batch.chunks()] == [[0, 1], [], [2, 3, 4]]
    assert batch.select("x").chunk_rows == (2, 0, 3)
    assert batch[:2].chunk_rows is None
    assert batch.without("x").chunks()[2].rows == 3
    assert len(batch[:2].chunks()) == 1


def test_concat_refuses_different_columns_and_types():
    batch = make(2)
    with pytest.raises(BatchError, match=r"only one of them has \['answer'\]"):
        Batch.concat([batch, batch.without("answer")])
    with pytest.raises(BatchError, match=r"'reward' cannot be joined: it is float32 \[rows\] .* int64 \[rows\]"):
        Batch.concat([batch, batch.with_columns(reward=torch.arange(2))])
    with pytest.raises(BatchError, match=r"float32 .* ragged float32"):
        Batch.concat([batch, batch.with_columns(reward=batch["log_probs"])])
    with pytest.raises(BatchError, match=r"\[rows, 3\] .* \[rows, 4\]"):
        Batch.concat([batch, batch.with_columns(hidden=torch.zeros(2, 4, dtype=torch.bfloat16))])
    with pytest.raises(BatchError, match="at least one"):
        Batch.concat([])


def test_union_takes_the_right_column_and_checks_rows():
    left, right = make(3), Batch({"row_id": torch.arange(3), "values": torch.rand(3), "reward": torch.zeros(3)})
    both = left | right
    assert both.columns == (*left.columns, "values")
    assert both["reward"].tolist() == [0, 0, 0]
    left |= right
    assert left.equal(both)
    with pytest.raises(BatchError, match="3 rows with one of 2"):
        left.union(right[:2])
    with pytest.raises(BatchError, match="row_id differ"):
        left.union(right.reorder([1, 0, 2]))
    assert (left | right.without("row_id").reorder([1, 0, 2]))["values"][0] == right["values"][1]


def test_repeat_keeps_copies_adjacent_and_ids_unique():
    batch = make(2).with_columns(row_id=torch.tensor([10, 4]))
    twice = batch.repeat(3)
    assert twice["row_id"].tolist() == [30, 31, 32, 12, 13, 14]
    assert twice["group_id"].tolist() == [10, 10, 10, 4, 4, 4]
    assert twice["answer"] == [None] * 3 + ["<1>"] * 3
    again = twice.repeat(2)
    assert again["group_id"].tolist() == [10] * 6 + [4] * 6
    assert len(set(again["row_id"].tolist())) == 12
    plain = Batch({"x": torch.tensor([5, 6])}).repeat(2)
    assert plain["group_id"].tolist() == [0, 0, 1, 1]
    assert plain["row_id"].tolist() == [0, 1, 2, 3]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(BatchError, match="repeat"):
            batch.repeat(wrong)


@quick
@given(batches, st.integers(0, 2**16))
def test_reorder_and_its_inverse(batch, seed):
    index = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    assert batch.reorder(index).reorder(index.argsort()).equal(batch)
    assert batch.reorder(index)["response_ids"].tolist() == [batch["response_ids"].tolist()[i] for i in index]


def test_reorder_and_filter_check_their_input():
    batch = make(4)
    assert batch.reorder([-1, 0])["row_id"].tolist() == [3, 0]
    assert batch.filter([True, False, False, True])["answer"] == [None, None]
    assert batch.filter(batch["row_id"] > 1)["row_id"].tolist() == [2, 3]
    for wrong in ([4], [-5, 0], [0.5], [True, False], [[0]]):
        with pytest.raises(BatchError, match="reorder"):
            batch.reorder(wrong)
    for wrong in ([True], [0, 1, 0, 1], []):
        with pytest.raises(BatchError, match="filter needs a bool mask"):
            batch.filter(wrong)


def test_equal_tells_types_and_values_apart():
    batch = make(3)
    assert batch.equal(make(3).select(*reversed(batch.columns)))
    assert not batch.equal(batch.without("mask"))
    assert not batch.equal(batch[:2])
    assert not batch.equal(batch.with_columns(reward=batch["reward"].double()))
    assert not batch.equal(batch.with_columns(reward=batch["log_probs"]))
    assert not batch.equal(batch.with_columns(answer=["x", "y", "z"]))
    assert not batch.equal(batch.with_columns(reward=batch["reward"] + 1))


def test_empty_batch_in_every_method():
    empty = make(3)[:0]
    assert len(empty) == 0
    assert list(empty) == []
    assert empty.to_dicts() == []
    assert [len(part) for part in empty.split(3, balance="response_ids", chunks=2)] == [0, 0, 0]
    assert empty.split(2)[0].chunks()[0].columns == empty.columns
    assert Batch.concat([empty, make(3), empty]).equal(make(3))
    assert Batch.concat(empty.split(2)).equal(empty)
    assert empty.union(empty).equal(empty)
    assert empty.repeat(4).columns[-1] == "group_id"
    assert len(empty.repeat(4).split(2, groups=True)) == 2
    assert len(empty.reorder([])) == len(empty.filter([])) == 0
    assert empty.clone().to("cpu").equal(empty)
    assert pickle.loads(pickle.dumps(empty)).equal(empty)
    assert empty["response_ids"].dtype == torch.int64
    assert "0 rows" in repr(empty)
    assert "0 rows" in empty._repr_html_()
    assert len(Batch({})) == 0
    with pytest.raises(IndexError):
        empty[0]


def test_rows_of_two_sources_are_no_group():
    """Both number their rows from 0; each keeps its own groups, also where they were repeated before."""
    first, second = Batch({"row_id": torch.arange(3)}), Batch({"row_id": torch.arange(4)})
    later = Batch.concat([first, second]).repeat(2)
    before = Batch.concat([first.repeat(2), second.repeat(2), second.repeat(2)])
    for found, groups in ((later, 7), (before, 11)):
        assert len(found["row_id"].unique()) == found.rows == 2 * groups
        assert torch.equal(found["group_id"].unique_consecutive(), found["group_id"][::2])
        assert len(found["group_id"].unique()) == groups
    again = Batch.concat([Batch.concat([first, first]), first])
    assert len(again["row_id"].unique()) == 9


def test_parts_of_one_batch_keep_their_numbers():
    batch = Batch({"row_id": torch.arange(6)}).repeat(2)
    joined = Batch.concat([batch[:3], batch[3:]])
    assert torch.equal(joined["row_id"], batch["row_id"])
    assert torch.equal(joined["group_id"], batch["group_id"])
    turns = Batch({"row_id": torch.tensor([1, 1, 2]), "trajectory_id": torch.tensor([5, 5, 6])})
    assert torch.equal(Batch.concat([turns[:1], turns[1:]])["row_id"], turns["row_id"])


def test_rows_are_repeated_by_numbers_of_their_own():
    batch = Batch({"row_id": torch.tensor([5, 9]), "x": ["a", "b"]})
    found = batch.repeat([1, 2])
    assert found["x"] == ["a", "b", "b"]
    assert found["group_id"].tolist() == [5, 9, 9]
    assert found["row_id"].tolist() == [10, 18, 19]
    assert batch.repeat([2, 2]).equal(batch.repeat(2))
    for wrong in ([1], [1, 0], [1, True], [1.0, 2], 0, "2", None):
        with pytest.raises(BatchError, match="one for each of the 2 rows"):
            batch.repeat(wrong)
