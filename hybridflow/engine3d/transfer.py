"""Executes a weight plan with torch.distributed: pieces are packed per peer and round, sent, and unpacked.

A `Transfer` is built once for a plan and two storages and run as often as the weights change (every RL iteration):
everything that can be decided is decided when it is built. Local pieces are copied directly, or not at all where
source and destination are the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.layout import Box, Region
from hybridflow.engine3d.plan import BUCKET_BYTES, Move, WeightPlan
from hybridflow.engine3d.wire import agree_dtypes, wire_device
from hybridflow.errors import LayoutError, WaitTimeoutError

Storage = Mapping[str, Tensor]

ALIGNMENT = 16  # bytes; messages start at multiples of it, so that a message can be viewed as any dtype


def execute(
    plan: WeightPlan,
    source: Storage,
    destination: Storage,
    group: dist.ProcessGroup | None = None,
    rank: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Run `plan` once. Collective over `group`; arguments and errors are those of `Transfer`."""
    Transfer(plan, source, destination, group, rank, bucket_bytes).run()


class Transfer:
    """`plan` bound to the storages of this rank; `run()` moves the current values.

    `source[name]` and `destination[name]` are this rank's tensors by the names that its regions use. `rank` is the
    rank in `group`, which executes the plan (None: a plan of one rank). Values are converted to the destination's
    dtype, and travel in the narrower of both dtypes. Extra memory is at most `bucket_bytes`, kept between runs until
    `release()`. The storages must stay where they are in memory: build a new Transfer when an engine moves them.

    Building is collective over `group` (ranks tell each other their dtypes), and so is `run()`.

    Errors: LayoutError when a storage is missing or too small, or has a dtype that cannot travel.
    """

    def __init__(
        self,
        plan: WeightPlan,
        source: Storage,
        destination: Storage,
        group: dist.ProcessGroup | None = None,
        rank: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        size = group.size() if group is not None else 1
        if size < plan.ranks:
            raise LayoutError(f"the plan is for {plan.ranks} ranks, the process group has {size}.")
        self.plan, self.group, self.rank = plan, group, rank
        self._device = wire_device(group)
        wire = _agree_wire(plan, source, destination, group, rank)
        self._copies = _Copies()
        for move in plan.local(rank):
            from_ = _view(source, move.origin, move.box, "source", rank)
            for region in move.into:
                self._copies.add(_view(destination, region, move.box, "destination", rank), from_)
        self._rounds: list[_Round] = []
        itemsize = max((dtype.itemsize for dtype in wire.values()), default=1)
        for bucket in plan.buckets(bucket_bytes, itemsize):
            if mine := [move for move in bucket if rank in (move.source, move.destination)]:
                self._rounds.append(_Round.of(mine, wire, source, destination, rank))
        self._arena: Tensor | None = None

    @property
    def buffer_bytes(self) -> int:
        """Extra memory that a run uses on this rank."""
        return max((turn.buffer_bytes(self._device) for turn in self._rounds), default=0)

    @torch.no_grad()
    def run(self, timeout: float | None = None) -> None:
        """Move the weights. `timeout` in seconds bounds the wait for each round (None: the process group's own).

        Errors: WaitTimeoutError when a peer does not take part in time or is gone.
        """
        if self._arena is None and self._rounds:
            self._arena = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self._device)
            for turn in self._rounds:
                turn.bind(self._arena, self.group)
        if not self._rounds:
            self._copies.run()
        for i, turn in enumerate(self._rounds):
            turn.pack.run()
            with self._explained():
                works = dist.batch_isend_irecv(turn.ops)
            if i == 0:  # while the first round is under way
                self._copies.run()
            with self._explained():
                for work in works:
                    work.wait(timedelta(seconds=timeout)) if timeout else work.wait()
            turn.unpack.run()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            peers = sorted({message.peer for turn in self._rounds for message in turn.messages})
            raise WaitTimeoutError(
                f"rank {self.rank} exchanges weights with ranks {peers} and did not get through: {error}. All ranks "
                "of the group have to run the transfer together; look for an earlier error on the others."
            ) from error

    def release(self) -> None:
        """Give the buffer back; the next run allocates it again."""
        self._arena = None
        for turn in self._rounds:
            turn.unbind()


@dataclass
class _Copies:
    """Pairs of equally shaped views that are copied in one call, with dtype conversion."""

    into: list[Tensor] = field(default_factory=list)
    from_: list[Tensor] = field(default_factory=list)

    def add(self, into: Tensor, from_: Tensor) -> None:
        same = into.data_ptr() == from_.data_ptr() and into.device == from_.device
        if not (same and into.dtype == from_.dtype and into.stride() == from_.stride()):
            self.into.append(into)
            self.from_.append(from_)

    def run(self) -> None:
        if self.into:
            torch._foreach_copy_(self.into, self.from_)  # pyright: ignore[reportPrivateImportUsage]


class _Piece(NamedTuple):
    dtype: torch.dtype
    views: list[Tensor]  # one when sent; one or more when received

    @property
    def nbytes(self) -> int:
        return self.views[0].numel() * self.dtype.itemsize


@dataclass
class _Message:
    """What one rank sends another in one round: pieces one after the other, wider dtypes first to stay aligned."""

    peer: int
    sent: bool
    pieces: list[_Piece]

    def __post_init__(self) -> None:
        self.pieces.sort(key=lambda piece: -piece.dtype.itemsize)  # stable, so both sides agree
        self.nbytes = sum(piece.nbytes for piece in self.pieces)

    @property
    def padded(self) -> int:
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    def direct(self, device: torch.device) -> Tensor | None:
        """The bytes of the storage itself, where it holds exactly what travels: no packing, no buffer."""
        (dtype, views), view = self.pieces[0], self.pieces[0].views[0]
        if len(self.pieces) > 1 or len(views) > 1 or not view.is_contiguous():
            return None
        if view.dtype != dtype or view.device != device:
            return None
        return view.reshape(-1).view(torch.uint8)


@dataclass
class _Round:
    """One bucket on this rank: its messages, and the copies into and out of the buffer."""

    messages: list[_Message]
    pack: _Copies = field(default_factory=_Copies)
    unpack: _Copies = field(default_factory=_Copies)
    ops: list[dist.P2POp] = field(default_factory=list)

    @classmethod
    def of(
        cls, moves: Sequence[Move], wire: Mapping[_Pair, torch.dtype], source: Storage, destination: Storage, rank: int
    ) -> _Round:
        pieces: dict[tuple[int, bool], list[_Piece]] = {}
        for move in moves:
            if sent := move.source == rank:
                views = [_view(source, move.origin, move.box, "source", rank)]
            else:
                views = [_view(destination, region, move.box, "destination", rank) for region in move.into]
            peer = move.destination if sent else move.source
            pieces.setdefault((peer, sent), []).append(_Piece(wire[_pair(move)], views))
        return cls([_Message(peer, sent, parts) for (peer, sent), parts in pieces.items()])

    def buffer_bytes(self, device: torch.device) -> int:
        return sum(message.padded for message in self.messages if message.direct(device) is None)

    def bind(self, arena: Tensor, group: dist.ProcessGroup | None) -> None:
        """Lay the messages out in `arena` [bytes] uint8 and prepare the operations."""
        start = 0
        for message in self.messages:
            if (flat := message.direct(arena.device)) is None:
                flat = arena[start : start + message.nbytes]
                start += message.padded
                self._copy_pieces(message, flat)
            operation = dist.isend if message.sent else dist.irecv
            self.ops.append(dist.P2POp(operation, flat, group=group, group_peer=message.peer))

    def _copy_pieces(self, message: _Message, flat: Tensor) -> None:
        start = 0
        for piece in message.pieces:
            packed = flat[start : start + piece.nbytes].view(piece.dtype).view(piece.views[0].shape)
            start += piece.nbytes
            for view in piece.views:
                self.pack.add(packed, view) if message.sent else self.unpack.add(view, packed)

    def unbind(self) -> None:
        self.pack, self.unpack, self.ops = _Copies(), _Copies(), []


_Port = tuple[str, int, str]  # source or destination, rank, storage
_Pair = tuple[_Port, tuple[_Port, ...]]


def _pair(move: Move) -> _Pair:
    into = tuple(("destination", move.destination, region.storage) for region in move.into)
    return ("source", move.source, move.origin.storage), into


def _agree_wire(
    plan: WeightPlan, source: Storage, destination: Storage, group: dist.ProcessGroup | None, rank: int
) -> dict[_Pair, torch.dtype]:
    """The dtype in which values travel between two storages: the narrower one, the destination's where equal.

    This rank's storages are checked against the plan first, so that a misfit is an error on all ranks, not a hang.
    """
    pairs = dict.fromkeys(_pair(move) for move in plan.moves if not move.local)
    ports = list(dict.fromkeys(port for first, others in pairs for port in (first, *others)))
    mine: dict[_Port, torch.dtype] = {}
    failure = None
    try:
        for move in plan.moves:
            if move.source == rank:
                mine[_pair(move)[0]] = _view(source, move.origin, move.box, "source", rank).dtype
            if move.destination == rank:
                for region, port in zip(move.into, _pair(move)[1], strict=True):
                    mine[port] = _view(destination, region, move.box, "destination", rank).dtype
    except LayoutError as error:
        failure = error
    dtypes = agree_dtypes(ports, mine, group, failure)
    wire = {}
    for first, others in pairs:
        into = max((dtypes[port] for port in others), key=lambda dtype: dtype.itemsize)
        wire[first, others] = dtypes[first] if dtypes[first].itemsize < into.itemsize else into
    return wire


def _tensor(storage: Storage, name: str, side: str, rank: int) -> Tensor:
    if name not in storage:
        raise LayoutError(f"the {side} layout of rank {rank} names {name!r}, its storage has {sorted(storage)[:8]}.")
    return storage[name].detach()


def _view(storage: Storage, region: Region, box: Box, side: str, rank: int) -> Tensor:
    """The part of the storage that holds `box`, checked: slicing beyond the end would silently give less."""
    tensor, index = _tensor(storage, region.storage, side, rank), region.index(box)
    if tensor.dim() != len(index) or any(s.stop > n for s, n in zip(index, tensor.shape, strict=True)):
        raise LayoutError(
            f"the {side} layout of rank {rank} puts {box} at {[(s.start, s.stop) for s in index]} of "
            f"{region.storage!r}, which has shape {tuple(tensor.shape)}."
        )
    return tensor[index]
