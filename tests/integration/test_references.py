"""Batches by reference: who reads what, shared memory, and memory that comes back."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import ray
import torch

import hybridflow as hf
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import DP_PROTO, ONE_TO_ONE

ROWS = 10


class Traced:
    """An object column whose unpickling leaves its process id in a file."""

    def __init__(self, value: int, log: str) -> None:
        self.value, self.log = value, log

    def __reduce__(self):
        return _unpickle_traced, (self.value, self.log)


def _unpickle_traced(value: int, log: str) -> Traced:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    return Traced(value, log)


class Custodian:
    """Reads, writes in place, and makes large columns."""

    @register(DP_PROTO, reads=("big", "ragged"), writes=("sum",))
    def spoil(self, batch):
        batch["big"].zero_()
        batch["ragged"].values.fill_(-1)
        return hf.Batch({"sum": batch["big"].sum(1)})

    @register(DP_PROTO, reads=("big", "ragged"), writes=("sum",))
    def look(self, batch):
        return hf.Batch({"sum": batch.peek("big").sum(1) + sum(batch["ragged"].values.tolist())})

    @register(DP_PROTO, reads=("x",), writes=("y",))
    def double(self, batch):
        return hf.Batch({"y": batch["x"] * 2})

    @register(DP_PROTO, reads=lambda settings, call: (call["column"],), writes=lambda settings, call: (call["column"],))
    def copy(self, batch, column):
        return hf.Batch({column: batch[column]})

    @register(DP_PROTO, reads=("things",), writes=("things",))
    def pass_on(self, batch):
        return hf.Batch({"things": batch["things"]})

    @register(DP_PROTO, reads=(), writes=tuple(f"c{i}" for i in range(10)))
    def ten_columns(self, batch):
        rows = 64
        return hf.Batch({f"c{i}": torch.full((rows, 4096), float(i)) for i in range(10)})

    @register(ONE_TO_ONE, reads=("c3",))
    def read_one(self, batch):
        return float(batch["c3"].mean())


def test_writing_in_place_changes_nothing_for_other_readers(pool, place, cluster):
    """On the same and on other hosts, for columns large enough to be shared memory."""
    group = place(Custodian, pool[0:2])
    big = torch.ones(8, 40_000)
    ragged = hf.Ragged.from_lengths(torch.ones(80_000), torch.full((8,), 10_000))
    shared = BatchRef.from_batch(hf.Batch({"big": big, "ragged": ragged}))
    before = group.look(shared)
    assert group.spoil(shared)["sum"].get().tolist() == [0.0] * 8
    after = group.look(shared)
    assert before["sum"].get().tolist() == after["sum"].get().tolist() == [80_000.0] * 8
    assert shared.get()["big"].min() == 1
    mine = shared.get()
    mine["big"].zero_()
    assert shared.get()["big"].min() == 1


def test_the_driver_never_unpickles_a_payload(pool, place, cluster, tmp_path):
    log = tmp_path / "unpickled"
    things = [Traced(i, str(log)) for i in range(6)]
    group = place(Custodian, pool[0:2])
    batch = BatchRef.from_batch(hf.Batch({"things": things}))
    out = group.pass_on((batch | group.pass_on(batch))[1:5].repeat(2))
    cluster.iterations.drain()
    where = [int(pid) for pid in log.read_text().split()]
    assert where
    assert os.getpid() not in where
    assert [thing.value for thing in out["things"].get()] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert str(os.getpid()) in log.read_text().split()


def test_columns_of_every_kind_survive_the_way(pool, place, cluster):
    group = place(Custodian, pool)
    batch = hf.Batch(
        {
            "bf16": torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0)).bfloat16(),
            "large": torch.arange(ROWS * 20_000).reshape(ROWS, 20_000).bfloat16(),
            "flags": hf.Ragged.from_rows([[i % 2 == 0] * (i % 4) for i in range(ROWS)], torch.bool),
            "texts": [None if i == 3 else f"é{i}" for i in range(ROWS)],
            "dicts": [{"i": i} for i in range(ROWS)],
        }
    )
    sent = BatchRef.from_batch(batch)
    for column in batch.columns:
        assert group.copy(sent, column).get().equal(batch.select(column))


def stored_bytes(reference: Any) -> int:
    return ray.experimental.get_object_locations([reference])[reference]["object_size"]


def test_a_reader_of_one_column_fetches_one_object(pool, place, cluster, monkeypatch):
    """Each large column is an object of its own, about a tenth of the whole."""
    group = place(Custodian, pool[0:1])
    made = group.ten_columns(BatchRef.from_batch(hf.Batch({"x": torch.zeros(64)})))
    manifest = ray.get(made.column_refs["c0"].node.ref)
    assert len({*manifest.columns.values()}) == 10
    sizes = {name: stored_bytes(reference) for name, reference in manifest.columns.items()}
    assert 64 * 4096 * 4 < sizes["c3"] < 64 * 4096 * 4 * 1.01
    fetched = []
    real = ray.get
    monkeypatch.setattr(ray, "get", lambda refs, **how: fetched.append(refs) or real(refs, **how))
    assert made.get("c3")["c3"].mean() == 3
    assert {ref for refs in fetched for ref in refs} & {*manifest.columns.values()} == {manifest.columns["c3"]}
    assert group.read_one(made).get() == 3


def stored_objects() -> float:
    """MiB in the object store of this node."""
    from ray._private.internal_api import memory_summary

    text = memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True)
    line = next(line for line in text.splitlines() if "Plasma memory usage" in line)
    return float(line.split("usage")[1].split("MiB")[0])


def settles(measure, below: float, seconds: float = 20) -> bool:
    for _ in range(int(seconds * 10)):
        if measure() <= below:
            return True
        time.sleep(0.1)
    return False


def test_memory_comes_back_when_nobody_can_read_it(pool, place, cluster):
    group = place(Custodian, pool[0:1])
    source = BatchRef.from_batch(hf.Batch({"x": torch.zeros(64)}))
    kept = [group.ten_columns(source) for _ in range(4)]
    assert [made.get("c9")["c9"][0, 0].item() for made in kept] == [9] * 4
    held = stored_objects()  # and perhaps what earlier tests left, which goes in its own time
    assert held >= 40
    del kept
    gc.collect()
    cluster.iterations.drain()
    assert settles(stored_objects, held - 35)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_driver_does_not_grow_with_its_calls(pool, place, cluster):
    group = place(Custodian, pool[0:2])
    data = hf.Batch({"x": torch.arange(20_000.0), "row_id": torch.arange(20_000)})
    batch = BatchRef.from_batch(data)

    def loop(calls: int) -> None:
        out = batch
        for i in range(calls):
            out = batch | group.double(out.select("x"))
            if i % 10 == 9:
                cluster.iterations.begin()
        assert out["y"].get()[-1] == 2 * 19_999

    loop(60)
    gc.collect()
    before = resident_bytes()
    loop(300)
    gc.collect()
    assert resident_bytes() - before < 16 * 2**20
