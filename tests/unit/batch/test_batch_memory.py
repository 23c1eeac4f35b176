"""Batch in memory: pickling sends only the own rows, and shared memory is never written."""

from __future__ import annotations

import pickle

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given

from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import decode, encode, from_array, is_read_only, same
from hybridflow.batch.ragged import Ragged
from tests.example_batches import batches, make, quick


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


DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint32, torch.complex64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_encoded_and_decoded_over_the_same_memory(dtype):
    values = torch.randint(0, 255, (24 * dtype.itemsize,), dtype=torch.uint8)
    dense = (values % 2).bool() if dtype == torch.bool else values.view(dtype)
    for column in (dense, dense[3:7], dense[:24].reshape(4, 6), dense[::2], dense[:0]):
        kind, name, array = encode(column)
        back = decode((kind, name, array))
        assert isinstance(back, torch.Tensor)
        assert back.dtype == dtype
        assert back.shape == column.shape
        if len(column):
            assert back.contiguous().view(torch.uint8).equal(column.contiguous().view(torch.uint8))
            assert back.data_ptr() == array.ctypes.data
    ragged = Ragged.from_lengths(dense[:6], [2, 0, 4])
    assert decode(encode(ragged)).values.view(torch.uint8).equal(ragged.values.view(torch.uint8))
    assert decode(encode(ragged)).lengths.tolist() == [2, 0, 4]


def test_read_only_memory_is_decoded_without_a_copy_or_a_warning(recwarn):
    encoded = encode(torch.arange(6.0).to(torch.bfloat16))
    assert not is_read_only(encoded)
    encoded[2].flags.writeable = False
    assert is_read_only(encoded)
    column = decode(encoded)
    assert column.data_ptr() == encoded[2].ctypes.data
    del encoded
    assert column.tolist() == [0, 1, 2, 3, 4, 5]  # the tensor keeps the memory
    assert not recwarn


def test_objects_are_encoded_once_and_come_back_as_objects():
    class Local:  # pickle alone could not send it
        value = 3

    objects = [1, "a", None, {"k": [2]}]
    assert same(decode(encode(objects)), objects)
    assert not is_read_only(encode(objects))
    assert decode(encode([Local()]))[0].value == 3


def test_arrays_that_torch_cannot_describe_are_copied():
    array = np.arange(5)[::-1]
    assert from_array(array).tolist() == [4, 3, 2, 1, 0]
    array.flags.writeable = False
    assert from_array(array[:0]).shape == (0,)
    assert Batch({"x": np.arange(5)[::-1]})["x"].tolist() == [4, 3, 2, 1, 0]
