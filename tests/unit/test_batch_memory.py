"""Batch in memory: pickling sends only the own rows, and shared memory is never written."""

from __future__ import annotations

import pickle

import cloudpickle
import numpy as np
import pytest
import torch
from example_batches import batches, make, quick
from hypothesis import given

from hybridflow.batch import Batch
from hybridflow.ragged import Ragged


@quick
@given(batches)
def test_pickle_round_trip(batch):
    for dumps in (pickle.dumps, cloudpickle.dumps):
        back = pickle.loads(dumps(batch))
        assert back.equal(batch)
        assert back.columns == batch.columns
    assert pickle.loads(pickle.dumps(batch.split(1, chunks=3)[0])).chunk_rows == batch.split(1, chunks=3)[0].chunk_rows
    assert len(pickle.loads(pickle.dumps(batch.select()))) == len(batch)


def test_pickling_a_slice_sends_only_its_rows():
    batch = Batch({"x": torch.zeros(1000, 100), "r": Ragged.from_lengths(torch.zeros(10000), [10] * 1000)})
    assert len(pickle.dumps(batch[:10])) < batch.nbytes / 50
    grad = Batch({"x": torch.zeros(3, requires_grad=True)})
    assert not pickle.loads(pickle.dumps(grad))["x"].requires_grad


def test_out_of_band_buffers_are_not_copied_and_not_written():
    batch, buffers = make(50), []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    assert len(data) < 6000
    back = pickle.loads(data, buffers=frozen)
    assert back.shared
    assert back.equal(batch)
    before = [bytes(buffer) for buffer in frozen]
    for name in back.columns:
        column = back[name]
        if isinstance(column, Ragged):
            column.values.zero_()
        elif not isinstance(column, list):
            column.zero_()
    assert not back.shared
    assert frozen == before


def shared_batch():
    array = np.arange(8, dtype=np.float32)
    ids = np.arange(6)
    batch = Batch.from_shared(
        {"x": torch.from_numpy(array), "r": Ragged.from_lengths(torch.from_numpy(ids), [1] * 6 + [0, 0]), "o": [0] * 8}
    )
    return batch, array, ids


def test_writing_into_a_shared_column_changes_only_the_own_copy():
    batch, array, ids = shared_batch()
    assert batch.shared
    assert batch.peek("x").data_ptr() == array.ctypes.data
    batch["x"].add_(100)
    batch["r"].values.add_(100)
    assert array.tolist() == list(range(8))
    assert ids.tolist() == list(range(6))
    assert batch["x"][0] == 100  # the private copy is kept
    assert batch["r"].values[0] == 100
    assert not batch.shared


@pytest.mark.parametrize(
    "derive",
    [
        lambda b: b.select("x"),
        lambda b: b.without("o"),
        lambda b: b.rename(r="s"),
        lambda b: b[2:6],
        lambda b: b[3],
        lambda b: b.split(2)[1],
        lambda b: b.split(2, balance="x")[1],
        lambda b: Batch({"x": torch.zeros(8), "row_id": torch.arange(8)}) | b,
        lambda b: b.with_columns(y=torch.zeros(8)),
        lambda b: Batch.concat([b]),
        lambda b: Batch.concat([b, b]),
        lambda b: b.repeat(1),
        lambda b: b.reorder(range(8)),
        lambda b: b.filter([True] * 8),
        lambda b: b.to("cpu"),
        lambda b: b.split(1, chunks=2)[0].chunks()[0],
        lambda b: pickle.loads(pickle.dumps(b)),
    ],
)
def test_what_derives_from_a_shared_batch_cannot_write_into_it(derive):
    batch, array, _ = shared_batch()
    derived = derive(batch)
    derived["x"].fill_(-1)
    for row in derive(batch):
        row["x"].fill_(-1)
    assert array.tolist() == list(range(8))
    assert batch.peek("x").tolist() == list(range(8))


def test_read_only_arrays_count_as_shared():
    array = np.arange(4.0)
    array.flags.writeable = False
    batch = Batch({"x": array})
    assert batch.shared
    batch["x"].zero_()
    assert array.tolist() == [0, 1, 2, 3]


def test_clone_to_and_nbytes():
    batch = make(5)
    copy = batch.clone()
    assert copy.equal(batch)
    copy["reward"].zero_()
    assert not copy.equal(batch)
    assert not shared_batch()[0].clone().shared
    meta = batch.to("meta")
    assert meta["hidden"].device.type == "meta"
    assert meta["response_ids"].values.device.type == "meta"
    assert meta["response_ids"].offsets.device.type == "cpu"
    assert Batch({"x": torch.zeros(4, 2), "o": ["abc"] * 4}).nbytes == 32


def test_shown_columns_are_not_changed_or_copied():
    batch, _, _ = shared_batch()
    assert "x" in repr(batch)
    assert "x" in batch._repr_html_()
    assert batch.nbytes > 0
    assert batch.shared
