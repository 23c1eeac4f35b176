"""Ledger: how many bytes of parameters a rank has in memory, at any moment of a transition and at its peak.

Every acquire and release goes through a `Watched` memory, so the figures are what happened, not what was planned.
A storage that several names or both engines share counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.engine3d.offloadable import Memory


class Ledger:
    """Parameter bytes of all watched tensors of this rank: now, and the most since `restart`."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that the keys stay theirs
        self._sizes: dict[int, int] = {}
        self._users: dict[int, list[tuple[Memory, str]]] = {}
        self._counted: dict[int, int] = {}
        self.resident_bytes = self.peak_bytes = 0

    def restart(self) -> None:
        """Measure the peak from here on."""
        self.peak_bytes = self.resident_bytes

    def add(self, memory: Memory, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Count `tensors` (resident now), whose memory `memory` manages; the key of each name's storage."""
        keys = {}
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            key = keys[name] = storage._cdata
            self._storages[key] = storage
            self._sizes.setdefault(key, storage.nbytes())
            self._users.setdefault(key, []).append((memory, name))
        self.count(keys.values())
        return keys

    def count(self, keys: Iterable[int]) -> None:
        """Look again whether these storages have memory."""
        for key in keys:
            there = any(memory.resident(name) for memory, name in self._users[key])
            now = self._sizes[key] if there else 0
            self.resident_bytes += now - self._counted.get(key, 0)
            self._counted[key] = now
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)


class Watched:
    """One side's memory, entered into a ledger. Only names in `released` may go; others stay whatever is asked.

    Tensors in `gaps` have elements that nobody writes (padding): they come back as zeros. `gone` are the names whose
    contents this memory no longer has. `tensors` are looked at for the memory that is theirs when this is built.
    """

    def __init__(
        self,
        memory: Memory,
        tensors: Mapping[str, Tensor],
        ledger: Ledger,
        released: Collection[str],
        gaps: Collection[str] = (),
    ) -> None:
        self.tensors, self.released = tensors, tuple(name for name in tensors if name in released)
        self._may_go, self._held, self._gaps = frozenset(self.released), set(self.released), frozenset(gaps)
        self.gone: set[str] = set()
        self._memory, self._ledger = memory, ledger
        self._keys = ledger.add(memory, tensors)
        self._offsets = {name: tensor.storage_offset() for name, tensor in tensors.items()}

    @property
    def holds(self) -> bool:
        """Whether some of `released` may have memory, also after an acquire that failed half-way."""
        return bool(self._held)

    @property
    def total_bytes(self) -> int:
        return self._memory.total_bytes

    @property
    def resident_bytes(self) -> int:
        return self._memory.resident_bytes

    def resident(self, name: str) -> bool:
        return self._memory.resident(name)

    @torch.no_grad()
    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        """Give `names` (default: all) memory; returns those whose content is undefined now. Tensors with gaps are
        zero instead, and what was offloaded is back."""
        chosen = self._mine(names)
        self._held.update(chosen)  # first: of several the first may have been given memory when the next one fails
        try:
            fresh = self._memory.acquire(chosen)
        finally:
            self._ledger.count(self._keys[name] for name in chosen)
        for name in (padded := fresh & self._gaps):
            self.tensors[name].zero_()
        return fresh - padded

    def release(self, names: Iterable[str] | None = None) -> None:
        """Free `names` (default: all); their contents are lost, here and on the host."""
        chosen = self._mine(names)
        self.gone.update(chosen)
        self._memory.release(chosen)
        self._held.difference_update(chosen)
        self._ledger.count(self._keys[name] for name in chosen)

    def offload(self, names: Iterable[str] | None = None) -> None:
        """Move `names` (default: all) to host memory until they are acquired."""
        chosen = self._mine(names)
        self._memory.offload(chosen)
        self._held.difference_update(chosen)
        self._ledger.count(self._keys[name] for name in chosen)

    def replaced(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names for which `tensors` has another memory than the one that is watched here, or none."""
        return [
            name
            for name, key in self._keys.items()
            if (now := tensors.get(name)) is None
            or now.untyped_storage()._cdata != key
            or now.storage_offset() != self._offsets[name]
        ]

    def _mine(self, names: Iterable[str] | None) -> Sequence[str]:
        return self.released if names is None else [name for name in names if name in self._may_go]
