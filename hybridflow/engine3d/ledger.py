"""Ledger: how many bytes of parameters a rank has in memory, at any moment of a transition and at its peak.

Every acquire and release goes through a `Watched` memory, so the figures are what happened, not what was planned.
A storage that several names or both engines share counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.engine3d.residency import Memory


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

    `gone` are the names whose contents this memory no longer has.
    """

    def __init__(
        self, memory: Memory, tensors: Mapping[str, Tensor], ledger: Ledger, released: Collection[str]
    ) -> None:
        self.tensors, self.released = tensors, tuple(name for name in tensors if name in released)
        self._may_go, self._held = frozenset(self.released), set(self.released)
        self.gone: set[str] = set()
        self._memory, self._ledger = memory, ledger
        self._keys = ledger.add(memory, tensors)

    @property
    def total_bytes(self) -> int:
        return self._memory.total_bytes

    @property
    def resident_bytes(self) -> int:
        return self._memory.resident_bytes

    def resident(self, name: str) -> bool:
        return self._memory.resident(name)

    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        """Give `names` (default: all) memory; those that come from `release`, whose content is undefined."""
        fresh = set(self._mine(names)) - self._held
        self._memory.acquire(fresh)
        self._held |= fresh
        self._ledger.count(self._keys[name] for name in fresh)
        return fresh

    def recall(self) -> None:
        """Bring back what was offloaded."""
        self._memory.acquire(self.released)
        self._held.update(self.released)
        self._ledger.count(self._keys.values())

    def release(self, names: Iterable[str] | None = None) -> None:
        """Free `names` (default: all); their contents are lost here."""
        chosen = self._mine(names)
        self._memory.release(chosen)
        self._held.difference_update(chosen)
        self.gone.update(chosen)
        self._ledger.count(self._keys[name] for name in chosen)

    def offload(self, names: Iterable[str] | None = None) -> None:
        """Move `names` (default: all) to host memory until `recall`."""
        chosen = self._mine(names)
        self._memory.offload(chosen)
        self._held.difference_update(chosen)
        self._ledger.count(self._keys[name] for name in chosen)

    def _mine(self, names: Iterable[str] | None) -> Sequence[str]:
        return self.released if names is None else [name for name in names if name in self._may_go]
