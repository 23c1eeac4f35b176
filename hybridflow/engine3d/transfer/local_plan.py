"""A plan bound to one rank's storages: the views behind its pieces, checked before anything moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Box, Region
from hybridflow.engine3d.plan.plan import Move, WeightPlan
from hybridflow.engine3d.transfer.buffers import Parcel
from hybridflow.engine3d.transfer.copies import Copies
from hybridflow.engine3d.transfer.handshake import Terms
from hybridflow.engine3d.transfer.wire import check_dtype, converts
from hybridflow.errors import LayoutError

Storage = Mapping[str, Tensor]
"""A rank's tensors by the names that its regions use."""


@dataclass
class LocalCopies:
    """The copies of one canonical tensor's pieces that stay on the rank, and the storages that they touch."""

    copies: Copies = field(default_factory=Copies)
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)


class Binding:
    """The moves of `plan` that touch `rank` over its storages, of which `sources` and `destinations` are used.

    `failure` is what went wrong: a misfit, or any error of a storage that is read from a file when it is looked at. It
    is not raised here, because the other ranks have to hear of it.
    Storages must have memory now; views that were made stay valid when it goes and comes.
    """

    def __init__(self, plan: WeightPlan, source: Storage, destination: Storage, rank: int) -> None:
        self.sources: dict[str, Tensor] = {}
        self.destinations: dict[str, Tensor] = {}
        self.failure: Exception | None = None
        self._plan, self._rank, self._given = plan, rank, (source, destination)
        self._written: dict[str, int] = {}
        try:
            self._plan = plan.part(rank)
            self._check()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            self.failure = error

    def dtypes(self) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
        """Of the source and of the destination storages, by name."""
        sides = [{name: tensor.dtype for name, tensor in side.items()} for side in (self.sources, self.destinations)]
        return sides[0], sides[1]

    def gaps(self) -> set[str]:
        """Destination storages that the plan does not fill to the last element: padding."""
        return {name for name, tensor in self.destinations.items() if self._written.get(name, 0) < tensor.numel()}

    def local(self) -> dict[str, LocalCopies]:
        """Local copies by canonical tensor, in plan order."""
        out: dict[str, LocalCopies] = {}
        for move in self._plan.local(self._rank):
            from_ = move.origin.view(self.sources[move.origin.storage], move.box)
            for region in move.into:
                group = out.setdefault(move.box.tensor, LocalCopies())
                if group.copies.add(region.view(self.destinations[region.storage], move.box), from_):
                    group.reads.add(move.origin.storage)
                    group.writes.add(region.storage)
        return {tensor: group for tensor, group in out.items() if group.writes}

    def parcels(self, moves: Sequence[Move], terms: Terms) -> Iterator[tuple[int, bool, Parcel]]:
        """What this rank sends and receives for `moves`: peer, whether it is sent, and the parcel."""
        for move in moves:
            if move.source == self._rank:
                side = self.destinations if move.hop else self.sources
                views = (move.origin.view(side[move.origin.storage], move.box),)
                read = () if move.hop else (move.origin.storage,)
                yield move.destination, True, Parcel(move.box.tensor, terms.wire(move), views, read)
            else:
                regions = [(region, self.destinations[region.storage]) for region in move.into]
                views = tuple(region.view(tensor, move.box) for region, tensor in regions)
                written = tuple(region.storage for region, _ in regions)
                yield move.source, False, Parcel(move.box.tensor, terms.wire(move), views, written)

    def _check(self) -> None:
        for move in self._plan.local(self._rank):
            origin = self._view(move.origin, move.box, sent=True)
            for region in move.into:
                into = self._view(region, move.box, sent=False)
                if not converts(origin.dtype, into.dtype):
                    raise LayoutError(
                        f"{move.box} is {origin.dtype} in the source and {into.dtype} in the destination of rank "
                        f"{self._rank}, and there is no conversion between them."
                    )
        for move in self._plan.sends(self._rank):
            self._view(move.origin, move.box, sent=not move.hop)
        for move in self._plan.receives(self._rank):
            for region in move.into:
                self._view(region, move.box, sent=False)
        # relays read what receives wrote, so elements are counted where they are written only
        for move in (*self._plan.local(self._rank), *self._plan.receives(self._rank)):
            for region in move.into:
                self._written[region.storage] = self._written.get(region.storage, 0) + move.box.numel

    def _view(self, region: Region, box: Box, sent: bool) -> Tensor:
        """Checked: slicing beyond the end would silently give less."""
        side, kept = ("source", self.sources) if sent else ("destination", self.destinations)
        storage = self._given[0 if sent else 1]
        if region.storage not in storage:
            raise LayoutError(
                f"the {side} layout of rank {self._rank} names {region.storage!r}, its storage has "
                f"{sorted(storage)[:8]}."
            )
        if (tensor := kept.get(region.storage)) is None:
            check_dtype(storage[region.storage].dtype)
            tensor = kept[region.storage] = storage[region.storage].detach()
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise LayoutError(
                f"{side} tensor {region.storage!r} of rank {self._rank} has no memory. Acquire it before weights are "
                "planned to move."
            )
        return region.view(tensor, box)
