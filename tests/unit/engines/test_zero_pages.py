"""Memory becomes zero wherever it begins and ends within a page."""

from __future__ import annotations

import mmap

import pytest
import torch

from hybridflow.engines.vllm.core import zero_pages

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
