"""PooledMemory: memory of vLLM that must keep its addresses, because captured CUDA graphs hold them.

vLLM's sleep-mode allocator (`vllm/device_allocator/cumem.py`, switched on by `enable_sleep_mode`) frees the physical
memory of a tag, keeps its addresses, and later maps new memory there. Its worker allocates the model under "weights"
(`Worker.load_model`: parameters, and buffers such as rotary caches) and the KV cache under "kv_cache"
(`Worker.initialize_from_config`); graphs and run-time state lie under tags of their own that we never touch.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


class PooledMemory:
    """The `Memory` of `tensors` under one tag of the allocator: all of them, or none.

    It is released with the last name and acquired with the first, like one shared storage. `buffers` under the same tag
    are kept on the host meanwhile. `unmap` frees the physical memory once the device is idle, `map_back` allocates it
    again with undefined content.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        unmap: Callable[[], None],
        map_back: Callable[[], None],
    ) -> None:
        self._tensors, self._buffers = dict(tensors), dict(buffers)
        self._unmap, self._map_back = unmap, map_back
        self._users = set(tensors)  # the names that are not released
        self._away: set[str] = set()  # the names that were offloaded
        self._host_tensors: dict[str, Tensor] = {}
        self._host_buffers: dict[str, Tensor] = {}
        self.total_bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def resident_bytes(self) -> int:
        return self.total_bytes if self._users else 0

    def resident(self, name: str) -> bool:
        return bool(self._users) or name not in self._tensors

    def release(self, names: Iterable[str] | None = None) -> None:
        gone = self._found(names)
        self._away -= gone
        self._drop(gone)

    def offload(self, names: Iterable[str] | None = None) -> None:
        """Copies to pinned host memory when the last name is released."""
        gone = self._found(names) & self._users
        self._away |= gone
        self._drop(gone)

    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        wanted, fresh = self._found(names), set[str]()
        if wanted and not self._users:
            self._map_back()
            for name, host in self._host_buffers.items():
                self._buffers[name].copy_(host)
            for name, host in self._host_tensors.items():
                self._tensors[name].copy_(host)
            fresh = self._tensors.keys() - self._host_tensors.keys()
            self._host_tensors, self._host_buffers = {}, {}
        self._users |= wanted
        self._away -= wanted
        return fresh

    def _found(self, names: Iterable[str] | None) -> set[str]:
        return set(self._tensors) if names is None else self._tensors.keys() & set(names)

    def _drop(self, gone: set[str]) -> None:
        before, self._users = self._users, self._users - gone
        if before and not self._users:
            self._host_buffers = {name: _on_host(tensor) for name, tensor in self._buffers.items()}
            self._host_tensors = {name: _on_host(self._tensors[name]) for name in self._away}
            self._unmap()
        elif not self._users:
            self._host_tensors = {name: host for name, host in self._host_tensors.items() if name in self._away}


def _on_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)


_SMALLEST = 1 << 20  # bytes: below it writing zeros is as fast


def zero_pages(storage: torch.UntypedStorage) -> None:
    """Make all bytes of `storage` zero. On Linux's CPU, whole pages take no memory until they are used."""
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
