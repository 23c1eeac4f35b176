"""Residency: which of a rank's named tensors have memory behind them.

Tensors stay where they are known - parameters of a module, views of them, plans bound to them - while the storage
behind them is given back and taken again. Works alike on the host and on CUDA, where the caching allocator gets it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """Memory of named tensors that can be given and taken; `Residency` is one, `PooledMemory` of vLLM another.

    `names` default to all of its tensors; names that it does not know are left alone.
    """

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that can be released."""
        ...

    @property
    def resident_bytes(self) -> int:
        """Bytes that have memory now."""
        ...

    def resident(self, name: str) -> bool:
        """Whether `name` has memory; true for names that it does not know."""
        ...

    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        """Give memory, with what `offload` kept; returns the names whose content is undefined now."""
        ...

    def release(self, names: Iterable[str] | None = None) -> None:
        """Take the memory; its content is lost, also what `offload` kept."""
        ...

    def offload(self, names: Iterable[str] | None = None) -> None:
        """Take the memory and keep its content on the host."""
        ...


class Residency:
    """The memory of `tensors`. Names that share one storage (fused or tied weights, flat buffers) free it together.

    `kept` names are never released: their storage belongs to somebody else as well. So does what is elsewhere than on
    `device`, if that is given: a model on CUDA whose parameters or optimizer wait in host memory, pinned or not, for
    their turn keeps them there, and it is freed with the last reference.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], kept: Collection[str] = (), device: torch.device | None = None
    ) -> None:
        self.device = device
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._names: dict[int, set[str]] = {}  # of each storage, by its address as an object
        self._sizes: dict[int, int] = {}
        self._held: dict[int, set[str]] = {}  # the names of a storage that are not released
        self._host: dict[int, Tensor] = {}  # offloaded bytes
        kept_storages = {tensors[name].untyped_storage()._cdata for name in kept if name in tensors}
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            key = storage._cdata
            elsewhere = device is not None and storage.device.type != device.type
            if key in kept_storages or elsewhere or not storage.resizable():
                continue
            self._storages[name] = storage
            self._names.setdefault(key, set()).add(name)
            self._sizes[key] = storage.nbytes()
        self._held = {key: set(names) for key, names in self._names.items()}
        self._away: dict[int, set[str]] = {key: set() for key in self._names}  # names of a storage that want them back
        self._resident = sum(self._sizes.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that can be released."""
        return sum(self._sizes.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes that have memory now."""
        return self._resident

    def resident(self, name: str) -> bool:
        """Whether `name` has memory; true for names that are kept."""
        storage = self._storages.get(name)
        return storage is None or bool(self._held[storage._cdata])

    def release(self, names: Iterable[str] | None = None) -> None:
        """Free the memory of `names` (default: all), a shared storage with its last name; what they held is lost,
        also what `offload` moved to the host.

        Views that exist stay valid for when the memory is back; new ones cannot be made of a tensor without memory.
        """
        for storage, key, name in self._found(names):
            self._away[key].discard(name)
            self._drop(storage, key, name)

    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        """Give `names` (default: all) memory: with what `offload` kept, or of undefined content.

        Returns the names whose content is undefined now, among them all that share the storage of one of `names`.
        """
        fresh: set[str] = set()
        for storage, key, name in self._found(names):
            if not self._held[key]:
                storage.resize_(self._sizes[key])
                self._resident += self._sizes[key]
                if (host := self._host.pop(key, None)) is not None:
                    _bytes(storage).copy_(host)
                else:
                    fresh |= self._names[key]
            self._held[key].add(name)
            self._away[key].discard(name)
        return fresh

    def offload(self, names: Iterable[str] | None = None) -> None:
        """Move what `names` hold to host memory (pinned where there is CUDA); `acquire` brings it back.

        A storage goes with its last name, whether that is offloaded or released.
        """
        for storage, key, name in self._found(names):
            if name in self._held[key]:
                self._away[key].add(name)
                self._drop(storage, key, name)

    def _drop(self, storage: torch.UntypedStorage, key: int, name: str) -> None:
        held, wanted = self._held[key], self._away[key]
        if name in held:
            held.discard(name)
            if not held:
                if wanted:
                    pin = storage.device.type == "cuda"
                    host = torch.empty(self._sizes[key], dtype=torch.uint8, device="cpu", pin_memory=pin)
                    self._host[key] = host.copy_(_bytes(storage))
                storage.resize_(0)
                self._resident -= self._sizes[key]
        elif not wanted:
            self._host.pop(key, None)

    def _found(self, names: Iterable[str] | None) -> list[tuple[torch.UntypedStorage, int, str]]:
        wanted = self._storages if names is None else [name for name in names if name in self._storages]
        return [(self._storages[name], self._storages[name]._cdata, name) for name in wanted]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
