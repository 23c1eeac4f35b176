"""Zeroing large memory without writing it: the kernel gives zeros for pages that were handed back.

A KV cache, of which a call uses a few blocks, would otherwise be written as a whole every time it wakes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

_SMALLEST = 1 << 20  # bytes: below, writing is as fast


def zero_pages(storage: torch.UntypedStorage) -> None:
    """Make all bytes of `storage` zero. On Linux's CPU whole pages cost nothing until they are used."""
    size, bytes_ = storage.nbytes(), torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if storage.device.type != "cpu" or sys.platform != "linux" or size < _SMALLEST:
        bytes_.zero_()
        return
    first = -storage.data_ptr() % mmap.PAGESIZE
    last = size - (storage.data_ptr() + size) % mmap.PAGESIZE
    address, length = ctypes.c_void_p(storage.data_ptr() + first), ctypes.c_size_t(last - first)
    # torch's CPU memory is private and anonymous, for which this advice means zeros on the next access
    if ctypes.CDLL(None).madvise(address, length, mmap.MADV_DONTNEED):
        bytes_.zero_()
        return
    bytes_[:first].zero_()
    bytes_[last:].zero_()
