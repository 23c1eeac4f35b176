"""Texts and tables of batches and columns in a notebook: they never raise, and every text is escaped."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import markup
from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import Objects
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.future import Future, Known
from hybridflow.cluster.row_refs import CallOrigin, RankOutput
from tests.example_batches import batches

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
