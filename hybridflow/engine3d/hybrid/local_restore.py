"""Local restore: training weights copied out of generation weights, a plan's local part in reverse (section 5.3)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan.plan import WeightPlan
from hybridflow.engine3d.transfer.copies import Copies
from hybridflow.engine3d.transfer.wire import holds


@dataclass
class _Filling:
    """Copies that fill a training tensor, and the generation tensors that they read."""

    copies: Copies = field(default_factory=Copies)
    read: set[str] = field(default_factory=set)


class LocalRestore:
    """Copies from this rank's generation tensors to its training tensors; both have memory when it is built.

    `names` are the training tensors in the layout's order. `recovered` are those that copies fill to the last element
    and bit: their rank generates with all of them, in a dtype that holds every value of theirs.
    """

    def __init__(
        self,
        layouts: tuple[Layout, Layout],
        forward: WeightPlan,
        source: Mapping[str, Tensor],
        destination: Mapping[str, Tensor],
        rank: int,
    ) -> None:
        regions = layouts[0].storages(rank)
        self.names = list(regions)
        self._fillings = {name: _Filling() for name in regions}
        self._readers: dict[str, set[str]] = {name: set() for name in layouts[1].storages(rank)}
        self.recovered: set[str] = set()
        missing = {name: sum(region.box.numel for region in own) for name, own in regions.items()}
        for move in forward.local(rank):
            name, at = move.origin.storage, move.into[0]
            if not holds(destination[at.storage].dtype, source[name].dtype):
                continue
            missing[name] -= move.box.numel
            filling = self._fillings[name]
            filling.copies.add(move.origin.view(source[name], move.box), at.view(destination[at.storage], move.box))
            filling.read.add(at.storage)
            self._readers[at.storage].add(name)
        self.recovered = {name for name, count in missing.items() if count == 0}

    def order(self, names: Collection[str]) -> list[str]:
        return [name for name in self.names if name in names]

    def copy(self, name: str) -> None:
        """Fill a training tensor; it and what it is filled from have memory."""
        self._fillings[name].copies.run()

    def unread(self, names: Collection[str]) -> list[str]:
        """Generation tensors that none of `names` is filled from."""
        return [name for name, readers in self._readers.items() if readers.isdisjoint(names)]

    def read_last(self, name: str, names: Collection[str]) -> list[str]:
        """Generation tensors that `name` is filled from and none of `names` is."""
        return [read for read in self._fillings[name].read if self._readers[read].isdisjoint(names)]
