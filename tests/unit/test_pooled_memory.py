"""PooledMemory: what it asks of an allocator that gives and takes everything at once, and what survives.

The allocator here is the host's: unmapped memory is written over, as somebody else would.
"""

from __future__ import annotations

import torch

from hybridflow.engines.vllm.pooled_memory import PooledMemory


class Pool:
    """Three weights and a buffer of one tag, and a record of when their memory came and went."""

    def __init__(self) -> None:
        self.weights = {name: torch.arange(4.0) + i for i, name in enumerate("abc")}
        self.buffers = {"rope": torch.arange(3.0)}
        self.asked: list[str] = []
        self.memory = PooledMemory(self.weights, self.buffers, self.unmap, self.map_back)

    def unmap(self) -> None:
        self.asked.append("unmap")
        for tensor in (*self.weights.values(), *self.buffers.values()):
            tensor.fill_(torch.nan)

    def map_back(self) -> None:
        self.asked.append("map")


def test_the_memory_goes_with_the_last_name_and_comes_with_the_first():
    pool = Pool()
    memory = pool.memory
    assert memory.total_bytes == memory.resident_bytes == 48
    memory.release(["a", "b", "another's"])
    assert pool.asked == []
    assert (memory.resident("a"), memory.resident_bytes) == (True, 48)
    memory.release()
    memory.release()
    assert pool.asked == ["unmap"]
    assert (memory.resident("a"), memory.resident("another's"), memory.resident_bytes) == (False, True, 0)
    assert memory.acquire(["another's"]) == set()
    assert pool.asked == ["unmap"]
    assert memory.acquire(["c"]) == {"a", "b", "c"}
    assert memory.acquire() == set()
    assert pool.asked == ["unmap", "map"]
    assert memory.resident_bytes == 48
    assert pool.weights["a"].isnan().all()  # what was released is lost
    assert pool.buffers["rope"].tolist() == [0, 1, 2]  # what nobody writes again is not


def test_the_names_that_came_back_have_to_go_again():
    pool = Pool()
    pool.memory.release()
    pool.memory.acquire(["a"])
    pool.memory.release(["a"])
    pool.memory.acquire(["b"])
    assert pool.asked == ["unmap", "map", "unmap", "map"]


def test_offloaded_weights_come_back_once():
    pool = Pool()
    pool.memory.release(["a"])
    pool.memory.offload()
    pool.memory.release(["another's"])
    assert pool.memory.acquire(["b"]) == set()
    assert [pool.weights[name].tolist() for name in "abc"] == [[i, i + 1, i + 2, i + 3] for i in range(3)]
    pool.memory.acquire()
    pool.memory.offload()
    pool.memory.release(["a"])
    assert pool.memory.acquire() == {"a", "b", "c"}
    assert all(tensor.isnan().all() for tensor in pool.weights.values())
    assert pool.buffers["rope"].tolist() == [0, 1, 2]
