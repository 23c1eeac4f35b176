"""A plan bound to one rank's storages: the views behind its pieces, checked before anything moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Box, Region
from hybridflow.engine3d.plan import Move, WeightPlan
from hybridflow.engine3d.transfer.buffers import Copies, Parcel, same_memory
from hybridflow.engine3d.transfer.handshake import Handshake, check_dtype, converts
from hybridflow.errors import LayoutError

Storage = Mapping[str, Tensor]
"""A rank's tensors by the names that its regions use."""


@dataclass
class LocalCopies(Copies):
    """The copies of one canonical tensor's pieces that stay on the rank, and the storages that they touch."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)


class LocalPlan:
    """The moves of `plan` that touch `rank` over its storages, of which `sources` and `destinations` are used.

    `failure` is a misfit, or any error of a storage that is read from a file on access. It is not raised here, because
    the other ranks must learn of it.
    Storages must have memory now; views that were made stay valid when it goes and comes."""

    def __init__(self, plan: WeightPlan, source: Storage, destination: Storage, rank: int) -> None:
        self.sources: dict[str, Tensor] = {}
        self.destinations: dict[str, Tensor] = {}
        self.failure: Exception | None = None
        self._plan, self._rank, self._given = plan, rank, (source, destination)
        self._written: Counter[str] = Counter()
        try:
            self._plan = plan.part(rank)
            self._check()
        except Exception as error:  # the others must not wait for this rank
            self.failure = error

    def dtypes(self) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
        """Dtypes of source and destination storages, by name."""
        sides = [{name: tensor.dtype for name, tensor in side.items()} for side in (self.sources, self.destinations)]
        return sides[0], sides[1]

    def gaps(self) -> set[str]:
        """Destination storages that the plan does not fill completely: padding."""
        return {name for name, tensor in self.destinations.items() if self._written[name] < tensor.numel()}

    def local(self) -> dict[str, LocalCopies]:
        """Local copies by canonical tensor, in plan order."""
        out: dict[str, LocalCopies] = {}
        for move in self._plan.local(self._rank):
            from_ = move.origin.view(self.sources[move.origin.storage], move.box)
            for region in move.into:
                into = region.view(self.destinations[region.storage], move.box)
                if not same_memory(into, from_):
                    group = out.setdefault(move.box.tensor, LocalCopies())
                    group.add(into, from_)
                    group.reads.add(move.origin.storage)
                    group.writes.add(region.storage)
        return out

    def parcels(self, moves: Sequence[Move], handshake: Handshake) -> Iterator[tuple[int, bool, Parcel]]:
        """This rank's sends and receives for `moves`: peer, whether sent, and the parcel."""
        for move in moves:
            tensor, dtype = move.box.tensor, handshake.wire(move)
            if move.source == self._rank:
                side = self.destinations if move.hop else self.sources
                views = (move.origin.view(side[move.origin.storage], move.box),)
                read = () if move.hop else (move.origin.storage,)
                yield move.destination, True, Parcel(tensor, dtype, views, read)
            else:
                views = tuple(region.view(self.destinations[region.storage], move.box) for region in move.into)
                written = tuple(region.storage for region in move.into)
                yield move.source, False, Parcel(tensor, dtype, views, written)

    def _check(self) -> None:
        for move in self._plan.moves:
            origin = self._view(move.origin, move.box, sent=not move.hop) if move.source == self._rank else None
            for region in move.into if move.destination == self._rank else ():
                into = self._view(region, move.box, sent=False)
                self._written[region.storage] += move.box.numel
                if origin is not None and not converts(origin.dtype, into.dtype):
                    raise LayoutError(
                        f"{move.box} is {origin.dtype} in the source and {into.dtype} in the destination of rank "
                        f"{self._rank}, and there is no conversion between them."
                    )

    def _view(self, region: Region, box: Box, sent: bool) -> Tensor:
        """A checked view: slicing beyond the end would silently return less."""
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
        check_resident(side, region.storage, tensor, self._rank)
        return region.view(tensor, box)


def check_resident(side: str, name: str, tensor: Tensor, rank: int) -> None:
    """Errors: LayoutError for a tensor without memory."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise LayoutError(f"{side} tensor {name!r} of rank {rank} has no memory. Acquire it before weights move.")
