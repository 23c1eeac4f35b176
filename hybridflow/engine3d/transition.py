"""The transition of one rank's weights from the training layout to the generation layout, and back.

There, layer by layer: a generation tensor gets its memory right before its first byte arrives, and a training tensor
loses its own right after its last byte was read, if nothing is lost by it. Back, without communication: a training
shard is part of the generation shard of its device (paper, section 5.3), so it is copied out of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.designs import Design, equal_storages, storage_regions
from hybridflow.engine3d.holders import Generator, Trainer
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.ledger import Ledger, Watched
from hybridflow.engine3d.plan import BUCKET_BYTES, WeightPlan, plan
from hybridflow.engine3d.residency import Residency
from hybridflow.engine3d.transfer import Transfer
from hybridflow.engine3d.wire import wire_device

ROUNDS, SMALLEST_BUCKET = 16, 128 << 10  # a shard moves in about so many rounds, each of at least so many bytes
KEPT_SHARE = 0.25  # of the training shard may stay while generating, rather than be gathered again over the wire


class Transition:
    """`design` between a trainer and a generator of this rank; both hold memory for all their weights when it is built.

    Where the way back is not a local copy - generation has a dtype that loses something, or this rank does not
    generate with all that it trains (groupings other than the paper's, unequal vocabulary padding) - training tensors
    are kept, or, when they are many and the trainer has main parameters, released and restored from those.
    Building is collective over `group`.
    """

    def __init__(
        self,
        design: Design,
        train: Trainer,
        generate: Generator,
        group: dist.ProcessGroup | None,
        rank: int,
        bucket_bytes: int | None = None,
    ) -> None:
        self._train, self.ledger = train, Ledger()
        source, self.shared = train.storage(), share_equal(design, train, generate, rank)
        destination = generate.storage()
        self.plan: WeightPlan = plan(design.source, design.staging or design.destination, rank=rank)
        self.bucket_bytes = bucket_bytes or _bucket_bytes(design.destination, destination)
        self._back = _WayBack(design, self.plan, source, destination, rank)
        released = self._released(design, group)
        own = storage_regions(design.destination, rank)
        moved = [name for name in own if name not in self.shared]
        self.train = Watched(train.memory(), source, self.ledger, released)
        self.generate = Watched(generate.memory(), destination, self.ledger, moved)
        self._staging: Watched | None = None
        if design.staging is None:
            self._transfers = [
                Transfer(
                    *(self.plan, source, destination, group, rank, self.bucket_bytes),
                    release=self.train,
                    acquire=self.generate,
                )
            ]
        else:
            self._transfers = self._staged(design, design.staging, source, destination, group, rank)

    def _staged(
        self,
        design: Design,
        layout: Layout,
        source: Mapping[str, Tensor],
        destination: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
        rank: int,
    ) -> list[Transfer]:
        """Gather everything into a buffer of the whole model, then cut the generation shard out of it."""
        like = next(iter(destination.values()))
        whole = {name: like.new_empty(shape) for name, shape in layout.tensors.items()}
        staging = self._staging = Watched(Residency(whole), whole, self.ledger, whole)
        cut = plan(layout, design.destination, rank=rank)
        transfers = [
            Transfer(self.plan, source, whole, group, rank, self.bucket_bytes, acquire=staging),
            Transfer(cut, whole, destination, group, rank, self.bucket_bytes, release=staging, acquire=self.generate),
        ]
        staging.release()
        return transfers

    def _released(self, design: Design, group: dist.ProcessGroup | None) -> set[str]:
        """Training tensors that may go; decides whether they come back by copies or from main parameters."""
        self._restored = False
        if design.staging is not None:
            return set()
        size = {name: tensor.nbytes for name, tensor in self._train.storage().items()}
        here = {name for name in self._back.names if name not in self.shared.values()}
        lost = sum(size[name] for name in here - self._back.recovered)
        if self._train.restorable and _any_rank(lost > KEPT_SHARE * sum(size.values()), group):
            self._restored = True  # on all ranks: restoring is collective
            return here
        return here & self._back.recovered

    def run(self) -> None:
        """Bring the generation weights up to date. Collective. Errors: WaitTimeoutError, or out of memory; what has
        not arrived is still in the training tensors, and what has can be brought back (`back`)."""
        for transfer in self._transfers:
            transfer.run()
        if self._staging is not None:
            self._staging.release()
        self.train.release()

    @torch.no_grad()
    def back(self, *, keep: bool) -> None:
        """Fill the training tensors that went, layer by layer; the generation tensors go then, unless `keep`."""
        gone = self.train.gone
        if gone and self._restored:
            if not keep:
                self.generate.release()
            self.train.acquire()
            self._train.restore()
            gone.clear()
            return
        if not keep:
            self.generate.release(self._back.unread(gone))
        for name in self._back.order(gone):
            self.train.acquire((name,))
            self._back.copy(name)
            gone.discard(name)
            if not keep:
                self.generate.release(self._back.read_last(name, gone))

    @property
    def sent_bytes(self) -> int:
        """Sent over the wire so far."""
        return sum(transfer.sent_bytes for transfer in self._transfers)

    @property
    def buffer_bytes(self) -> int:
        """The most memory that messages needed in any run."""
        return max(transfer.peak_bytes for transfer in self._transfers)

    @property
    def received(self) -> Counter[str]:
        """Bytes received so far, by canonical tensor."""
        total: Counter[str] = Counter()
        for transfer in self._transfers:
            total.update(transfer.received)
        return total


@dataclass
class _Pairs:
    """Views of the generation tensors `read`, and of a training tensor that are filled from them."""

    into: list[Tensor]
    from_: list[Tensor]
    read: set[str]


class _WayBack:
    """Copies from this rank's generation tensors to its training tensors: the local part of the plan, reversed."""

    def __init__(
        self,
        design: Design,
        forward: WeightPlan,
        source: Mapping[str, Tensor],
        destination: Mapping[str, Tensor],
        rank: int,
    ) -> None:
        regions = storage_regions(design.source, rank)
        self.names = list(regions)
        self._pairs = {name: _Pairs([], [], set()) for name in regions}
        self._readers: dict[str, set[str]] = {name: set() for name in storage_regions(design.destination, rank)}
        self.recovered: set[str] = set()
        if design.staging is not None:
            return
        missing = {name: sum(region.box.numel for region in own) for name, own in regions.items()}
        for move in forward.local(rank):
            name, at = move.origin.storage, move.into[0]
            pairs = self._pairs[name]
            missing[name] -= move.box.numel
            if _lossless(source[name].dtype, destination[at.storage].dtype):
                pairs.into.append(move.origin.view(source[name], move.box))
                pairs.from_.append(at.view(destination[at.storage], move.box))
                pairs.read.add(at.storage)
                self._readers[at.storage].add(name)
            else:
                missing[name] += move.box.numel
        self.recovered = {name for name, count in missing.items() if count == 0}

    def order(self, names: Collection[str]) -> list[str]:
        return [name for name in self.names if name in names]

    def copy(self, name: str) -> None:
        pairs = self._pairs[name]
        torch._foreach_copy_(pairs.into, pairs.from_)  # pyright: ignore[reportPrivateImportUsage]

    def unread(self, names: Collection[str]) -> list[str]:
        """Generation tensors that none of `names` is filled from."""
        return [name for name, readers in self._readers.items() if readers.isdisjoint(names)]

    def read_last(self, name: str, names: Collection[str]) -> list[str]:
        """Generation tensors that `name` is filled from and none of `names` is."""
        return [read for read in self._pairs[name].read if self._readers[read].isdisjoint(names)]


def share_equal(design: Design, train: Trainer, generate: Generator, rank: int) -> dict[str, str]:
    """Let generation use the memory of training tensors that hold the same elements in the same places.

    Returns generation name -> training name. A training storage that also holds tensors which cannot be shared is
    left out: it would have to stay for the sake of a part of it, and zero redundancy comes first.
    """
    if design.staging is not None:
        return {}
    source, destination = train.storage(), generate.storage()
    places: dict[int, set[str]] = {}
    for name, tensor in source.items():
        places.setdefault(tensor.untyped_storage()._cdata, set()).add(name)
    pairs = {
        a: b for a, b in equal_storages(design.source, design.destination, rank) if _alike(source[a], destination[b])
    }
    shared = {}
    for names in places.values():
        if names <= pairs.keys():
            shared |= {pairs[name]: name for name in names if generate.share(pairs[name], source[name])}
    return shared


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device, one.stride()) == (other.shape, other.dtype, other.device, other.stride())


def _lossless(dtype: torch.dtype, through: torch.dtype) -> bool:
    return torch.promote_types(dtype, through) == through


def _bucket_bytes(layout: Layout, tensors: Mapping[str, Tensor]) -> int:
    """Buckets small against the shard of rank 0, by which all ranks go, so that little is in memory twice at a time."""
    elements = sum(region.box.numel for region in layout.regions(0))
    width = max(tensor.itemsize for tensor in tensors.values())
    return min(BUCKET_BYTES, max(SMALLEST_BUCKET, elements * width // ROUNDS))


def _any_rank(condition: bool, group: dist.ProcessGroup | None) -> bool:
    if group is None:
        return condition
    told = torch.tensor([condition], dtype=torch.uint8, device=wire_device(group))
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    return bool(told.item())
