"""Batches from and to dicts and pandas, and how they show themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import markup
from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import Objects, same
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.future import Future, Known
from hybridflow.cluster.row_refs import CallOrigin, RankOutput
from hybridflow.errors import BatchError
from tests.example_batches import batches, quick


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
        ([[], []], "ragged int64"),
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
        ([[[1], [2]], []], list),
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
    assert len(Batch.from_dicts([])) == 0


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


SCRIPT = "<script>alert('1')</script>"


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError(SCRIPT)


@given(batches)
def test_any_batch_has_a_text_and_a_table(batch):
    for shown in (batch, BatchRef.from_batch(batch), *(batch.peek(name) for name in batch.columns)):
        assert repr(shown)
        table = shown._repr_html_() if hasattr(shown, "_repr_html_") else str(shown)
        assert table.encode()


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16),
        *(torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_columns_of_any_type_are_shown(dtype):
    values = torch.tensor([0.0, 1.0, 2.0]).to(dtype)
    batch = Batch({"dense": values, "matrix": values[:, None, None].expand(3, 2, 9), "ragged": Ragged(values, OFFSETS)})
    assert "dense" in repr(batch)
    assert "matrix" in batch._repr_html_()
    assert "length" in batch["ragged"]._repr_html_()


OFFSETS = torch.tensor([0, 1, 1, 3])


@pytest.mark.parametrize(
    "value",
    [SCRIPT, [SCRIPT], {SCRIPT: SCRIPT}, Broken(), [Broken()], 10**5000, "\ud800", float("nan"), b"<b>", "a" * 10**7],
    ids=range(10),
)
def test_objects_are_shortened_and_escaped(value: Any):
    batch = Batch({"<b>": Objects([value, value])})
    for page in (batch._repr_html_(), batch["<b>"]._repr_html_(), BatchRef.from_batch(batch)._repr_html_()):
        assert page.encode()
        assert "<script>" not in page
        assert "<b>" not in page
        assert len(page) < 2000
    assert len(repr(batch)) < 1000


@given(st.text(), st.text(), st.text())
def test_tables_escape_every_text(title, cell, note):
    page = markup.table(title, (cell,), [(cell,)], note)
    for tag in ("p", "table", "thead", "tbody", "tr"):
        assert (
            page.count(f"<{tag}")
            == page.count(f"</{tag}>")
            == (1 + bool(note) if tag == "p" else page.count(f"</{tag}>"))
        )
    assert page.count("<") == page.count(">")
    assert page.encode()


def test_a_column_of_a_reference_names_its_writer():
    column = BatchRef.from_batch(Batch({"x": [1, 2]}))["x"]
    assert repr(column) == "x: 2 rows by reference, driver.from_batch: done; .get() brings them here"
    assert "driver.from_batch" in column._repr_html_()


def test_a_future_of_a_trace_shows_its_value():
    output = RankOutput(Known({"actor/<b>": 0.5}), None, CallOrigin("actor", 0, "update_actor"))
    future = Future((output,), "join")
    assert repr(future) == "Future(actor.update_actor: {'actor/<b>': 0.5})"
    assert "actor/&lt;b&gt;" in future._repr_html_()


def test_a_future_of_a_closed_session_says_so():
    # other tests of this process may have left Ray connected: an unknown reference is pending then
    output = RankOutput(ray.ObjectRef.from_random(), None, CallOrigin("actor", 0, "save"))
    state = "pending" if ray.is_initialized() else "gone: RuntimeError"
    assert repr(Future((output,))) == f"Future(actor.save: {state})"
