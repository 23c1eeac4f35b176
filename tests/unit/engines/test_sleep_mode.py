"""PooledMemory: what it asks of an allocator that gives and takes everything at once, and what survives.

The allocator here is the host's: unmapped memory is written over, as somebody else would.
"""

from __future__ import annotations

import mmap

import pytest
import torch

from hybridflow.engines.vllm.core import PooledMemory, zero_pages


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
    pool.memory.offload(["a", "b"])
    pool.memory.release(["c", "another's"])  # the last: now the memory goes
    assert pool.asked == ["unmap"]
    assert pool.memory.acquire(["b"]) == {"c"}
    assert [pool.weights[name].tolist() for name in "ab"] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert pool.weights["c"].isnan().all()
    pool.memory.acquire()
    pool.memory.release()
    assert pool.memory.acquire() == {"a", "b", "c"}
    assert pool.buffers["rope"].tolist() == [0, 1, 2]


def test_what_is_released_after_it_was_offloaded_is_lost():
    pool = Pool()
    pool.memory.offload()
    pool.memory.release(["a"])
    assert pool.memory.acquire() == {"a"}
    assert pool.weights["a"].isnan().all()
    assert pool.weights["b"].tolist() == [1, 2, 3, 4]


def test_names_offloaded_one_by_one_stay_whole():
    pool = Pool()
    for name in "abc":
        pool.memory.offload([name])
    assert pool.asked == ["unmap"]
    for name in "abc":
        assert pool.memory.acquire([name]) == set()
    assert [pool.weights[name].tolist() for name in "abc"] == [[i, i + 1, i + 2, i + 3] for i in range(3)]


PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("size", [1, PAGE, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + PAGE // 2 + 3, 40 << 20])
def test_all_bytes_become_zero(size):
    tensor = torch.full((size,), 7, dtype=torch.uint8)
    zero_pages(tensor.untyped_storage())
    assert not tensor.any()
    tensor.fill_(3)  # the memory is usable
    assert int(tensor.sum(dtype=torch.int64)) == 3 * size


def test_neighbours_are_left_alone():
    """Many blocks from one heap, of which every other is zeroed."""
    blocks = [torch.full(((1 << 20) + 100 * i,), i + 1, dtype=torch.uint8) for i in range(16)]
    for block in blocks[::2]:
        zero_pages(block.untyped_storage())
    assert not any(block.any() for block in blocks[::2])
    assert all(bool((block == i + 1).all()) for i, block in enumerate(blocks) if i % 2)
