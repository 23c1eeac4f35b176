"""Batches from and to dicts and pandas, and how they show themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import Objects, same
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError
from tests.example_batches import batches, quick


def test_from_dicts_chooses_types_by_value_not_by_chance():
    records = [
        {
            "n": 1,
            "f": 1,
            "b": True,
            "ids": [1, 2],
            "p": [0.5],
            "s": "a",
            "none": 1,
            "deep": [[1], [2]],
            "np": np.ones(2),
        },
        {"n": 2, "f": 0.5, "b": False, "ids": [3, 4], "p": [1], "s": "b", "none": None, "deep": [], "np": np.ones(1)},
    ]
    batch = Batch.from_dicts(records)
    assert batch["n"].dtype == torch.int64
    assert batch["f"].dtype == torch.float32
    assert batch["b"].dtype == torch.bool
    assert batch["ids"].tolist() == [[1, 2], [3, 4]]  # ragged although all have one length
    assert batch["p"].dtype == torch.float32
    assert batch["s"] == ["a", "b"]
    assert batch["none"] == [1, None]
    assert batch["deep"] == [[[1], [2]], []]
    assert batch["np"].lengths.tolist() == [2, 1]
    assert Batch.from_dicts([{"big": 2**70}])["big"] == [2**70]
    assert Batch.from_dicts([{"e": []}, {"e": []}])["e"].dtype == torch.int64
    stacked = Batch.from_dicts([{"t": torch.zeros(2, 2), "z": torch.tensor(3)}] * 2)
    assert stacked["t"].shape == (2, 2, 2)
    assert stacked["z"].tolist() == [3, 3]
    assert len(Batch.from_dicts([])) == 0


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2, 3], torch.int64),
        ([1, 2.5, 3], torch.float32),
        ((True, False), torch.bool),
        (range(3), torch.int64),
        ([np.float64(1), np.int32(2)], torch.float32),
        ([torch.tensor(1.0), torch.tensor(2.0)], torch.float32),
        ([torch.tensor(1), 2], torch.int64),
        ([torch.tensor(1.0, dtype=torch.bfloat16)] * 2, torch.bfloat16),
        ([[1, 2], [3]], "ragged int64"),
        ([[1, 2], [3.5, 4]], "ragged float32"),
        ([[], [True]], "ragged bool"),
        ([(1, 2), [3, 4]], "ragged int64"),
        ([torch.rand(2).half(), torch.rand(3).half()], "ragged float16"),
        ([torch.tensor([1.5]), torch.tensor([2])], "ragged float32"),
        ([np.zeros(2, np.float32), np.zeros(0, np.float32)], "ragged float32"),
        ([np.zeros((2, 3)), np.ones((2, 3))], torch.float64),
        (["a", "b"], list),
        ([1, None], list),
        ([1, "1"], list),
        ([True, 1], list),
        ([[1], None], list),
        ([[1], 2], list),
        ([["a"], [1]], list),
        ([{"role": "user"}], list),
        ([2**70], list),
        ([torch.zeros(1, 1), torch.zeros(2, 2)], list),
        ([], list),
        (Objects([1, 2]), list),
        (np.array([1, 2], dtype=object), list),
    ],
)
def test_a_list_becomes_the_same_column_everywhere(values, kind):
    column = Batch({"x": values})["x"]
    if kind is list:
        assert isinstance(column, list)
        assert len(column) == len(values)
    elif isinstance(kind, str):
        assert isinstance(column, Ragged)
        assert f"ragged {str(column.dtype).removeprefix('torch.')}" == kind
        assert [list(map(float, row)) for row in column.tolist()] == [list(map(float, row)) for row in values]
    else:
        assert isinstance(column, torch.Tensor)
        assert column.dtype == kind
        assert len(column) == len(values)
    others = [Batch.from_dicts([{"x": value} for value in values])] if type(values) is list and values else []
    for other in [Batch({"x": column}), Batch({}).with_columns(x=values), *others]:
        assert same(other["x"], column)


def test_a_column_of_objects_stays_one_whatever_its_rows_are():
    batch = Batch({"x": [1, None, 2]})[:1]
    assert batch["x"] == [1]
    assert Batch({"x": batch["x"]})["x"] == [1]
    assert Batch.from_shared({"x": [1, 2]})["x"] == [1, 2]


def test_from_dicts_names_the_record():
    with pytest.raises(BatchError, match=r"record 1 has no 'prompt', record 0 has. Did you mean 'prompts'"):
        Batch.from_dicts([{"prompt": "a"}, {"prompts": "b"}])
    with pytest.raises(BatchError, match="record 1 has 'b', which record 0 lacks"):
        Batch.from_dicts([{"a": 1}, {"a": 1, "b": 2}])


@quick
@given(batches)
def test_dicts_round_trip(batch):
    batch = batch.without("hidden")  # [B, 3] comes back as ragged
    if not len(batch):
        assert batch.to_dicts() == []
        return
    assert (
        Batch.from_dicts(batch.to_dicts())
        .select("row_id", "response_ids", "reward")
        .equal(batch.select("row_id", "response_ids", "reward"))
    )


def test_repr_says_rows_types_lengths_and_an_example():
    batch = Batch({"ids": Ragged.from_rows([[1, 2, 3], [4]]), "r": torch.tensor([0.25, 4]), "s": ["x" * 90, "y\nz"]})
    lines = repr(batch).splitlines()
    assert lines[0] == "Batch(2 rows, 3 columns)"
    assert lines[1].split() == ["ids", "ragged", "int64", "lengths", "1..3", "[1,", "2,", "3]"]
    assert lines[2].split() == ["r", "float32", "[rows]", "0.25..4", "0.25"]
    assert lines[3].endswith("x...")
    assert len(repr(batch[:0]).splitlines()) == 4


def test_html_escapes_and_shows_first_rows():
    page = Batch({"<b>": ["<script>alert(1)</script>"] * 30, "x": torch.rand(30, 9)})._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;" in page
    assert "24 more rows" in page
