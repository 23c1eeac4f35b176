"""Holders of weights that are nothing but named tensors: real layouts, real memory, real transfers, no engine.

A `Canon` gives every element of every canonical tensor a value of its own, so that a misplaced one is found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.offloadable import Residency
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid


class Canon:
    """Values of the canonical tensors at a version; random numbers that bfloat16 holds exactly."""

    def __init__(self, spec: ModelSpec, version: int = 0) -> None:
        random = torch.Generator().manual_seed(version)
        self.tensors = {
            name: torch.randn(shape, generator=random).bfloat16().float() for name, shape in spec.tensors().items()
        }

    def write(self, layout: Layout, rank: int, storage: Mapping[str, Tensor]) -> None:
        for region in layout.regions(rank):
            region.view(storage[region.storage]).copy_(self._of(region.box))

    def wrong(self, layout: Layout, rank: int, storage: Mapping[str, Tensor]) -> list[str]:
        """Boxes of `rank` whose values in `storage` are not these."""
        return [
            str(region.box)
            for region in layout.regions(rank)
            if not torch.equal(region.view(storage[region.storage]).float().cpu(), self._of(region.box))
        ]

    def _of(self, box) -> Tensor:
        return self.tensors[box.tensor][tuple(map(slice, box.start, box.stop))]


def tensors(layout: Layout, rank: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """A tensor for every storage that the layout names, as large as its regions need; nothing is written yet."""
    out = {}
    for name, regions in layout.storages(rank).items():
        ends = [[o + n for o, n in zip(r.offset, r.box.shape, strict=True)] for r in regions]
        shape = [max(sizes) for sizes in zip(*ends, strict=True)]
        out[name] = torch.full(shape, float("nan"), dtype=dtype, device=device)
    return out


class PlainTrainer:
    """Training weights; `step_parts` writes the next version of `canon`, group by group."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        grid: RankGrid,
        rank: int,
        dtype: torch.dtype,
        restorable: bool = False,
        device: str = "cpu",
    ) -> None:
        self.spec, self.grid, self.rank, self.restorable = spec, grid, rank, restorable
        self._layout, self._tensors = layout, tensors(layout, rank, dtype, device)
        self.memory_ = Residency(self._tensors, torch.device(device))
        self.version, self.restored = 0, 0
        self.canon = Canon(spec)
        self.canon.write(layout, rank, self._tensors)
        self.away: set[str] = set()
        self.step_result: dict[str, float] = {}
        self.fails_in: int | None = None  # the part of the next step that raises

    def layout(self) -> Layout:
        return self._layout

    def storage(self) -> dict[str, Tensor]:
        return self._tensors

    def memory(self) -> Residency:
        return self.memory_

    def restore(self) -> None:
        assert all(self.memory_.resident(name) for name in self._tensors)
        self.canon.write(self._layout, self.rank, self._tensors)
        self.restored += 1

    def train(self) -> None:
        for _ in self.step_parts():
            pass

    def step_groups(self) -> Sequence[frozenset[str]]:
        layers = [frozenset(self.spec.layer_tensors(i)) for i in range(self.spec.layers)]
        rest = frozenset(self.spec.tensors()).difference(*layers)
        return [rest, *layers]

    def step_parts(self) -> Iterator[int]:
        self.version += 1
        self.canon = Canon(self.spec, self.version)
        for part, names in enumerate(self.step_groups()):
            if part == self.fails_in:
                raise ArithmeticError("the optimizer failed")
            own = [region for region in self._layout.regions(self.rank) if region.box.tensor in names]
            self.canon.write(Layout(self._layout.tensors, 1, lambda _, own=own: own), 0, self._tensors)
            yield part
        self.step_result = {"grad_norm": float(self.version)}

    def offload(self, what: Collection[str]) -> None:
        self.away.update(what)

    def reload(self, what: Collection[str]) -> None:
        self.away.difference_update(what)


class PlainGenerator:
    """Generation weights, and a note of when the cache slept and weights were announced."""

    def __init__(self, layout: Layout, rank: int, dtype: torch.dtype, shares: bool = True, device: str = "cpu") -> None:
        self._layout, self._tensors, self._shares = layout, tensors(layout, rank, dtype, device), shares
        self.memory_: Residency | None = None
        self._device = torch.device(device)
        self.shared: set[str] = set()
        self.asleep, self.changes = False, 0

    def layout(self) -> Layout:
        return self._layout

    def storage(self) -> dict[str, Tensor]:
        return self._tensors

    def memory(self) -> Residency:
        if self.memory_ is None:
            self.memory_ = Residency(self._tensors, self._device, kept=self.shared)
        return self.memory_

    def share(self, name: str, tensor: Tensor) -> bool:
        if self._shares:
            self._tensors[name] = tensor
            self.shared.add(name)
        return self._shares

    def weights_changed(self, version: int | None = None) -> None:
        self.changes += 1

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False


def resident_bytes(*storages: Mapping[str, Tensor]) -> int:
    """Memory that these tensors really have, shared memory counted once."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for s in storages for t in s.values()}
    return sum(found.values())
