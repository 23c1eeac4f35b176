"""torch's expandable segments: memory is mapped behind one address range, as users set it against fragmentation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _expandable() -> Iterator[None]:
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    yield
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def full(mib: int, value: int) -> torch.Tensor:
    return torch.full((mib * MIB,), value, dtype=torch.uint8, device="cuda")


def test_freed_neighbours_hold_a_larger_tensor():
    """Which fixed segments cannot: each tensor had one of its own."""
    before = torch.cuda.memory_reserved()
    parts = [full(20, value) for value in range(8)]
    reserved = torch.cuda.memory_reserved()
    del parts[2:6]
    large = full(80, 9)
    assert torch.cuda.memory_reserved() == reserved
    assert [int(part.max()) for part in parts] == [0, 1, 6, 7]
    assert [int(part.min()) for part in parts] == [0, 1, 6, 7]
    assert int(large.min()) == 9
    del parts, large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_memory_goes_back_to_the_device_and_comes_again():
    free = torch.cuda.mem_get_info()[0]
    for value in range(3):
        part = full(100, value)
        assert int(part.max()) == value
        assert torch.cuda.mem_get_info()[0] <= free - 100 * MIB
        del part
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] == free


def test_too_little_memory_is_reported():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(torch.cuda.mem_get_info()[1] + 1, dtype=torch.uint8, device="cuda")
    assert int(full(20, 3).max()) == 3


def test_streams_share_segments_in_order():
    side = torch.cuda.Stream()
    x = full(40, 1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    x.record_stream(side)
    del x
    torch.cuda.current_stream().wait_stream(side)
    assert int((y + full(40, 1)).max()) == 3
    torch.cuda.synchronize()
