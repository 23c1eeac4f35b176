"""PooledMemory: memory of vLLM that has to come back at the same addresses, because captured CUDA graphs hold them.

vLLM's sleep-mode allocator (`vllm/device_allocator/cumem.py`, switched on by `enable_sleep_mode`) gives the physical
memory of a tag back, keeps its addresses, and maps other memory there later. Its worker allocates the model under
"weights" (`Worker.load_model`: parameters, and buffers such as rotary caches) and the KV cache under "kv_cache"
(`Worker.initialize_from_config`); graphs and run-time state lie under tags of their own that we never touch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from hybridflow.engine3d.residency import Residency


class PooledMemory(Residency):
    """The memory of `tensors` under one tag of the allocator: all of them, or none.

    It is released with the last name and acquired with the first, like a storage that all names share. `buffers` lie
    under the same tag and belong to nobody else: they are kept on the host while the memory is away. `unmap` gives
    the physical memory back once the device is idle, `map_back` takes some again, of undefined content.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        unmap: Callable[[], None],
        map_back: Callable[[], None],
    ) -> None:
        super().__init__({})
        self._tensors, self._buffers = dict(tensors), dict(buffers)
        self._unmap, self._map_back = unmap, map_back
        self._users = set(tensors)  # the names that are not released
        self._copies: dict[str, Tensor] = {}  # what `offload` kept
        self._host_buffers: dict[str, Tensor] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that can be released."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes that have memory now: all or none."""
        return self.total_bytes if self._users else 0

    def resident(self, name: str) -> bool:
        """Whether `name` has memory; true for names that are not in here."""
        return bool(self._users) or name not in self._tensors

    def release(self, names: Iterable[str] | None = None) -> None:
        """Give `names` (default: all) up; with the last of them the memory goes, and what it held is lost, also what
        `offload` moved to the host."""
        if names is None or not self._tensors.keys().isdisjoint(names := list(names)):
            self._copies = {}
            self._give_up(names, keep=False)

    def offload(self, names: Iterable[str] | None = None) -> None:
        """As `release`, but everything is copied to pinned host memory before the memory goes."""
        self._give_up(names, keep=True)

    def _give_up(self, names: Iterable[str] | None, keep: bool) -> None:
        before, self._users = self._users, self._users - set(self._tensors if names is None else names)
        if not before or self._users:
            return
        self._host_buffers = {name: _on_host(tensor) for name, tensor in self._buffers.items()}
        self._copies = {name: _on_host(tensor) for name, tensor in self._tensors.items()} if keep else {}
        self._unmap()

    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        """Give `names` (default: all) memory: with what `offload` kept, or of undefined content.

        Returns the names whose content is undefined now: all of them, or none.
        """
        wanted = set(self._tensors) if names is None else self._tensors.keys() & set(names)
        fresh: set[str] = set()
        if wanted and not self._users:
            self._map_back()
            for name, host in self._host_buffers.items():
                self._buffers[name].copy_(host)
            for name, host in self._copies.items():
                self._tensors[name].copy_(host)
            fresh = self._tensors.keys() - self._copies.keys()
            self._copies, self._host_buffers = {}, {}
        self._users |= wanted
        return fresh


def _on_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)
