"""Residency: releases and reacquires the memory behind a rank's named tensors, and counts its bytes.

Tensor objects stay in place - module parameters, views, bound plans - while their storage is freed and allocated again.
It works on the host and on CUDA, where the memory returns to the caching allocator.

What is offloaded has an image on the host, which stays when the content comes back: content that has not changed since
leaves by being dropped. Code that writes into such a tensor calls `changed`. Copies run on a stream of their own, in
the order of the tensors, and the host does not wait for them:

    copy stream        embedding | layer 0 | layer 1 | layer 2 ...
    caller's stream              ▲ arrive  ▲ layer 0 computes  ▲ layer 1 computes ...
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridflow.engine3d.copy_stream import CopyStream


class Memory(Protocol):
    """Releasable memory of named tensors; implemented by `Residency` and, for vLLM, `PooledMemory`.

    `names` default to all of its tensors; unknown names are left alone. `total_bytes` counts all releasable bytes,
    `resident_bytes` those allocated now, `losses` how often content was dropped."""

    @property
    def losses(self) -> int: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def resident_bytes(self) -> int: ...

    def resident(self, name: str) -> bool:
        """Whether `name` has memory; True for unknown names."""
        ...

    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        """Allocate memory and restore offloaded content; returns the names whose content is undefined."""
        ...

    def release(self, names: Iterable[str] | None = None) -> None:
        """Free the memory and drop its content, even offloaded content."""
        ...

    def offload(self, names: Iterable[str] | None = None) -> None:
        """Free the memory and keep its content on the host."""
        ...

    def changed(self) -> None:
        """The tensors may have been written into, so images of them on the host are stale."""
        ...


class HostImages:
    """Content of device tensors on the host, by key: pinned on CUDA systems, allocated once, and copied only where it
    has changed. `copied_out` and `copied_in` count bytes; `nbytes` are those of the images.

    Copies are queued on `stream`, on which the caller orders them with what else uses the tensors.
    """

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        self._images: dict[Hashable, Tensor] = {}
        self._same: set[Hashable] = set()  # those with the content of their tensors
        self.copied_out = self.copied_in = self.nbytes = 0
        self._queued = False  # copies that `join` does not follow yet

    def save(self, tensors: Mapping[Any, Tensor]) -> None:
        """Make images of these tensors as they are now, or none when it fails; `join` comes before they change."""
        stale = {key: tensor for key, tensor in tensors.items() if key not in self._same}
        for key, tensor in stale.items():
            if key not in self._images:
                pin = tensor.device.type == "cuda"
                raw = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
                self._images[key] = raw.view(tensor.dtype).view(tensor.shape)
                self.nbytes += tensor.nbytes
        if stale:
            self._queued = True
            self.stream.follow()
        for key, tensor in stale.items():
            self.stream.copy(self._images[key], tensor)
        self._same.update(stale)
        self.copied_out += sum(tensor.nbytes for tensor in stale.values())

    def restore(self, key: Hashable, tensor: Tensor) -> Any:
        """Copy the image to the tensor; returns a mark behind that on the stream."""
        self._queued = True
        self.stream.copy(tensor, self._images[key])
        self.copied_in += tensor.nbytes
        return self.stream.mark()

    def join(self) -> None:
        """The tensors may change, and be freed, in later work of the caller's stream."""
        if self._queued:
            self.stream.join()
            self._queued = False

    def changed(self, keys: Iterable[Any] | None = None) -> None:
        """The content of these tensors (default: all) is no longer that of their images."""
        self._same.difference_update(list(self._same) if keys is None else keys)

    def drop(self, keys: Iterable[Any]) -> None:
        """Free these images."""
        for key in keys:
            image = self._images.pop(key, None)
            self.nbytes -= 0 if image is None else image.nbytes
            self._same.discard(key)


class Residency:
    """The `Memory` of `tensors`. Names that share one storage (fused or tied weights, flat buffers) free it together.

    `kept` names are never released: another owner shares their storage. `images` may be shared with others that have
    other names, or have the images of tensors with the same names and sizes before these.

    Storages on devices of another type than `device` are not released either: state that a CUDA model keeps in host
    memory stays there and is freed with the last reference. Existing views become valid again with the memory; a tensor
    without memory allows no new views. Code that writes into one of the tensors calls `changed` before it is offloaded.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        kept: Collection[str] = (),
        images: HostImages | None = None,
    ) -> None:
        self.device = device
        self.images = HostImages(CopyStream(device)) if images is None else images
        self._keys: dict[str, str] = {}  # of each name's storage: the first of its names
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._names: dict[str, set[str]] = {}  # by storage
        self._sizes: dict[str, int] = {}
        self._by_storage: dict[int, str] = {}
        kept_storages = {tensors[name].untyped_storage()._cdata for name in kept if name in tensors}
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            elsewhere = tensor.device.type != device.type
            if storage._cdata in kept_storages or elsewhere or not storage.resizable():
                continue
            key = self._keys[name] = self._by_storage.setdefault(storage._cdata, name)
            self._storages[key], self._sizes[key] = storage, storage.nbytes()
            self._names.setdefault(key, set()).add(name)
        self._held = {key: set(names) for key, names in self._names.items()}  # the names that are not released
        self._away: dict[str, set[str]] = {key: set() for key in self._names}  # the names to restore
        self._coming: dict[str, Any] = {}  # marks of storages whose content is being copied in
        self.total_bytes = self.resident_bytes = sum(self._sizes.values())
        self.losses = 0

    @property
    def names(self) -> set[str]:
        """Of the tensors whose memory can be released."""
        return set(self._keys)

    def names_of(self, tensors: Iterable[Tensor]) -> set[str]:
        """All names whose storages these tensors lie in."""
        keys = {self._by_storage.get(tensor.untyped_storage()._cdata) for tensor in tensors}
        return {name for name, key in self._keys.items() if key in keys}

    def sort(self, names: Iterable[str]) -> None:
        """From now on copies come in this order."""
        self._keys = {name: self._keys[name] for name in names}

    def resident(self, name: str) -> bool:
        return name not in self._keys or bool(self._held[self._keys[name]])

    def release(self, names: Iterable[str] | None = None) -> None:
        """Free the memory of `names`; a shared storage is freed with its last name."""
        self.losses += 1
        self._free(names, keep=False)

    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        """Returns all names with undefined content, including those that share a storage with `names`."""
        fresh = self.fetch(names)
        self.arrive()
        return fresh

    def fetch(self, names: Iterable[str] | None = None) -> set[str]:
        """`acquire` whose content is still being copied in: `arrive` comes before it is used."""
        found, fresh = self._found(names), set[str]()
        absent = {key: self._storages[key] for key, _ in found if not self._held[key]}
        try:
            for key, storage in absent.items():
                storage.resize_(self._sizes[key])
        except Exception:  # all or nothing
            for storage in absent.values():
                storage.resize_(0)
            raise
        if any(self._away[key] for key in absent):
            self.images.stream.follow()
        for key, storage in absent.items():
            self.resident_bytes += self._sizes[key]
            if self._away[key]:
                self._coming[key] = self.images.restore(key, _bytes(storage))
            else:
                fresh |= self._names[key]
        for key, name in found:
            self._held[key].add(name)
            self._away[key].discard(name)
        return fresh

    def arrive(self, names: Iterable[str] | None = None) -> Any:
        """The caller's stream waits for the content of `names` (default: all) that is being copied in. Returns the mark
        that it waits for, None if there is nothing to wait for."""
        if not self._coming:
            return None
        wanted = self._coming.keys() & {key for key, _ in self._found(names)}
        marks = [self._coming.pop(key) for key in list(self._coming) if key in wanted]
        if marks:
            self.images.stream.wait(marks[-1])
        return marks[-1] if marks else None

    def zero(self, names: Iterable[str]) -> None:
        """Fill the resident memory of `names` with zeros."""
        keys = {key for key, _ in self._found(names)}
        for key in keys:
            _bytes(self._storages[key]).zero_()
        self.images.changed(keys)

    def changed(self, names: Iterable[str] | None = None) -> None:
        """The tensors `names` (default: all) may have been written into."""
        self.images.changed({key for key, _ in self._found(names)})

    def save(self, names: Iterable[str]) -> None:
        """Copy what has changed in these tensors to their images already: nothing writes into them before they are
        offloaded."""
        self.images.save({key: _bytes(self._storages[key]) for key, _ in self._found(names) if self._held[key]})

    def offload(self, names: Iterable[str] | None = None) -> None:
        """Host memory is pinned on CUDA systems. A storage is freed with its last name, offloaded or released."""
        self._free(names, keep=True)

    def _free(self, names: Iterable[str] | None, keep: bool) -> None:
        going = dict[str, set[str]]()
        for key, name in self._found(names):
            going.setdefault(key, set()).add(name)
        wanted = {
            key: self._away[key] | (self._held[key] & gone) if keep else self._away[key] - gone
            for key, gone in going.items()
        }
        freed = [key for key, gone in going.items() if self._held[key] and self._held[key] <= gone]
        self.images.save({key: _bytes(self._storages[key]) for key in freed if wanted[key]})  # all or nothing
        for key, gone in going.items():
            self._held[key] -= gone
            self._away[key] = wanted[key]
            if not wanted[key]:
                self.images.drop((key,))
        if freed:
            self.images.join()
            self._coming.clear()
        for key in freed:
            self._storages[key].resize_(0)
            self.resident_bytes -= self._sizes[key]

    def _found(self, names: Iterable[str] | None) -> list[tuple[str, str]]:
        """(key, name) of each."""
        if names is None:
            return [(key, name) for name, key in self._keys.items()]
        return [(self._keys[name], name) for name in names if name in self._keys]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class MemoryAccount:
    """Bytes of this rank's tracked tensors: now, and the peak since `restart`.

    Every acquire and release goes through a `TrackedMemory`, so the numbers are measured, not planned. A storage shared
    by several names or both engines counts once."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # references keep the keys unique
        self._sizes: dict[int, int] = {}
        self._users: dict[int, list[tuple[Memory, str]]] = {}
        self._counted: dict[int, int] = {}
        self.resident_bytes = self.peak_bytes = 0

    def restart(self) -> None:
        """Measure the peak from here on."""
        self.peak_bytes = self.resident_bytes

    def add(self, memory: Memory, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Count the resident `tensors` of `memory`; returns the key of each name's storage."""
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
        """Recount these storages."""
        for key in keys:
            there = any(memory.resident(name) for memory, name in self._users[key])
            now = self._sizes[key] if there else 0
            self.resident_bytes += now - self._counted.get(key, 0)
            self._counted[key] = now
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)


class TrackedMemory:
    """One side's memory, entered into an account.

    Only names in `released` are ever released. Tensors in `gaps` have unwritten elements (padding), which return as
    zeros. `gone` are the names whose content is lost."""

    def __init__(
        self,
        memory: Memory,
        tensors: Mapping[str, Tensor],
        account: MemoryAccount,
        released: Collection[str],
        gaps: Collection[str] = (),
    ) -> None:
        self.tensors, self.released = tensors, tuple(name for name in tensors if name in released)
        self._may_go, self._gaps = frozenset(self.released), frozenset(gaps)
        self.gone: set[str] = set()
        self._memory, self._account = memory, account
        self._keys = account.add(memory, tensors)
        self._offsets = {name: tensor.storage_offset() for name, tensor in tensors.items()}
        self.resident = memory.resident

    @torch.no_grad()
    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        chosen = self._mine(names)
        try:
            fresh = self._memory.acquire(chosen)
        finally:  # some may have been allocated before one fails
            self._account.count(self._keys[name] for name in chosen)
        for name in (padded := fresh & self._gaps):
            self.tensors[name].zero_()
        return fresh - padded

    def release(self, names: Iterable[str] | None = None) -> None:
        chosen = self._mine(names)
        self.gone.update(chosen)
        self._memory.release(chosen)
        self._account.count(self._keys[name] for name in chosen)

    def offload(self, names: Iterable[str] | None = None) -> None:
        chosen = self._mine(names)
        self._memory.offload(chosen)
        self._account.count(self._keys[name] for name in chosen)

    def replaced(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names whose tensor is missing or has other memory than when this was built."""
        return [
            name
            for name, key in self._keys.items()
            if (now := tensors.get(name)) is None
            or now.untyped_storage()._cdata != key
            or now.storage_offset() != self._offsets[name]
        ]

    def bytes_of(self, name: str) -> int:
        """What `acquire` and `release` take and free for it, where it has a storage of its own."""
        return self.tensors[name].nbytes if name in self._may_go else 0

    def _mine(self, names: Iterable[str] | None) -> Sequence[str]:
        return self.released if names is None else [name for name in names if name in self._may_go]
