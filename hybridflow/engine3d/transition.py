"""The transition of one rank's weights from the training layout to the generation layout, and back.

There, layer by layer: a generation tensor gets its memory right before its first byte arrives, and a training tensor
loses its own right after its last byte was read, if nothing is lost by it. Back, without communication: a training
shard is part of the generation shard of its device (paper, section 5.3), so it is copied out of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.designs import Design, storage_regions
from hybridflow.engine3d.holders import Generator, Trainer
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.ledger import Ledger, Watched
from hybridflow.engine3d.plan import BUCKET_BYTES, WeightPlan, plan
from hybridflow.engine3d.residency import Residency
from hybridflow.engine3d.sharing import share_equal
from hybridflow.engine3d.transfer import Transfer, received_by_tensor
from hybridflow.engine3d.way_back import WayBack
from hybridflow.engine3d.wire import wire_device
from hybridflow.errors import LayoutError, WaitTimeoutError

ROUNDS, SMALLEST_BUCKET = 16, 128 << 10  # a shard moves in about so many rounds, each of at least so many bytes
KEPT_SHARE = 0.25  # of the training shard may stay while generating, rather than be gathered again over the wire


class Transition:
    """`design` between a trainer and a generator of this rank; both hold memory for all their weights when it is built.

    Where the way back is not a local copy - generation has a dtype that loses something, or this rank does not
    generate with all that it trains (groupings other than the paper's, unequal vocabulary padding) - training tensors
    are kept, or, when they are many and the trainer has main parameters, released and restored from those.
    Building is collective over `group`. `nodes[rank]` is the node of each rank, empty where all are equally near.

    Errors: LayoutError when trainer and generator do not have the same tensors, wholly, before anything moves or is
    shared, and for `nodes` of another number of ranks; those of `share_equal` and `Transfer`.
    """

    def __init__(
        self,
        design: Design,
        train: Trainer,
        generate: Generator,
        group: dist.ProcessGroup | None,
        rank: int,
        bucket_bytes: int | None = None,
        nodes: Sequence[int] = (),
    ) -> None:
        self._train, self._generate, self.ledger = train, generate, Ledger()
        self._nodes, self._left = tuple(nodes), False
        self.plan: WeightPlan = self._planned(design.source, design.staging or design.destination, rank)
        cut = None if design.staging is None else self._planned(design.staging, design.destination, rank)
        source, self.shared = train.storage(), share_equal(design, train, generate, rank)
        destination = generate.storage()
        self.bucket_bytes = bucket_bytes or _bucket_bytes(design.destination, destination)
        self._back = WayBack(design, self.plan, source, destination, rank)
        released = self._released(design, group)
        own = storage_regions(design.destination, rank)
        moved = [name for name in own if name not in self.shared]
        gaps = [name for name in moved if sum(r.box.numel for r in own[name]) < destination[name].numel()]
        self.train = Watched(train.memory(), source, self.ledger, released)
        self.generate = Watched(generate.memory(), destination, self.ledger, moved, gaps)
        self._staging: Watched | None = None
        if design.staging is None or cut is None:
            settings = (group, rank, self.bucket_bytes)
            transfer = Transfer(*(self.plan, source, destination, *settings), release=self.train, acquire=self.generate)
            self._transfers = [transfer]
        else:
            self._transfers = self._staged(design.staging, cut, source, destination, group, rank)

    def _planned(self, source: Layout, destination: Layout, rank: int) -> WeightPlan:
        ranks = max(source.ranks, destination.ranks)
        if self._nodes and len(self._nodes) != ranks:
            raise LayoutError(f"nodes={self._nodes} are of {len(self._nodes)} ranks, the layouts of {ranks}.")
        node_of = self._nodes.__getitem__ if self._nodes else None
        return plan(source, destination, node_of, rank=rank, exact=True)

    def _staged(
        self,
        layout: Layout,
        cut: WeightPlan,
        source: Mapping[str, Tensor],
        destination: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
        rank: int,
    ) -> list[Transfer]:
        """Gather everything into a buffer of the whole model, then cut the generation shard out of it."""
        like = next(iter(destination.values()))
        whole = {name: like.new_empty(shape) for name, shape in layout.tensors.items()}
        staging = self._staging = Watched(Residency(whole), whole, self.ledger, whole)
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
        if self._train.restorable and any_rank(lost > KEPT_SHARE * sum(size.values()), group):
            self._restored = True  # on all ranks: restoring is collective
            return here
        return here & self._back.recovered

    def check(self) -> None:
        """Errors: LayoutError when a holder has other tensors than those that are moved here."""
        for what, side, watched in (
            ("training", self._train, self.train),
            ("generation", self._generate, self.generate),
        ):
            if replaced := watched.replaced(side.storage()):
                raise LayoutError(
                    f"{len(replaced)} {what} tensors were replaced since their weights were planned to move, "
                    f"{replaced[:3]} among them: what would move is what they were. Build the HybridEngine anew, and "
                    "after whatever replaces tensors (FSDP's first forward pass does)."
                )

    def run(self) -> None:
        """Bring the generation weights up to date; training tensors go. Collective over the group.

        Errors: WaitTimeoutError, or out of memory. What has not arrived is still in the training tensors then, and
        what has can be brought back (`back`).
        """
        self._left = True
        for transfer in self._transfers:
            transfer.run()
        if self._staging is not None:
            self._staging.release()
        self.train.release()

    def recall(self) -> None:
        """Bring the generation weights back, which are current, and let those of training go. No communication."""
        self._left = True
        self.generate.acquire()
        self.train.release()

    def drop(self) -> None:
        """Give up all memory that generation has, wherever a failure may have left some."""
        self.generate.release()
        if self._staging is not None:
            self._staging.release()

    @torch.no_grad()
    def back(self, *, keep: bool) -> None:
        """Fill the training tensors that went, layer by layer; the generation tensors go then, unless `keep`.

        After an error call it again: it goes on where it was.
        """
        gone = self.train.gone
        if self._left and self._restored:  # on all ranks, also those from which nothing went yet
            if not keep:
                self.drop()
            self.train.acquire()
            self._train.restore()
            gone.clear()
        if not keep:
            self.generate.release(self._back.unread(gone))
        for name in self._back.order(gone):
            self.train.acquire((name,))
            self._back.copy(name)
            gone.discard(name)
            if not keep:
                self.generate.release(self._back.read_last(name, gone))
        self._left = False
        if not keep:
            self.drop()

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
        return received_by_tensor(self._transfers)


def _bucket_bytes(layout: Layout, tensors: Mapping[str, Tensor]) -> int:
    """Buckets small against the shard of rank 0, by which all ranks go, so that little is in memory twice at a time."""
    elements = sum(region.box.numel for region in layout.regions(0))
    width = max(tensor.itemsize for tensor in tensors.values())
    return min(BUCKET_BYTES, max(SMALLEST_BUCKET, elements * width // ROUNDS))


def any_rank(condition: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether `condition` holds on some rank. Collective over `group`. Errors: WaitTimeoutError."""
    if group is None:
        return condition
    told = torch.tensor([condition], dtype=torch.uint8, device=wire_device(group))
    try:
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    except RuntimeError as error:
        raise WaitTimeoutError(
            f"ranks agree on how weights move, and one did not come: {error}. All ranks of the group have to make the "
            "same calls of their HybridEngine; look for an earlier error on the others."
        ) from error
    return bool(told.item())
