"""Messages: pack and send the pieces between two ranks in one round; and one rank's rounds.

A large piece is a separate message, sent without a buffer if its storage is contiguous and has the transfer dtype. The
small pieces of a round are packed into one message.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.routing import staged, travels_alone
from hybridflow.engine3d.transfer.peer_memory import PeerMemory, read_announced


@dataclass
class Copies:
    """Pairs of equally shaped views that are copied in one call, with dtype conversion."""

    into: list[Tensor] = field(default_factory=list)
    from_: list[Tensor] = field(default_factory=list)

    def add(self, into: Tensor, from_: Tensor) -> None:
        self.into.append(into)
        self.from_.append(from_)

    def run(self) -> None:
        if self.into:
            torch._foreach_copy_(self.into, self.from_)  # pyright: ignore[reportPrivateImportUsage]


def same_memory(into: Tensor, from_: Tensor) -> bool:
    """Whether the tensors share memory and need no copy. Both must have memory."""
    same = into.data_ptr() == from_.data_ptr() and into.device == from_.device
    return same and into.dtype == from_.dtype and into.stride() == from_.stride()


class Parcel(NamedTuple):
    """A piece on one rank: its transfer dtype, and the views [box] that it is read from or written to.

    `storages` are the source storages read (none for a relay) or the destination storages written."""

    tensor: str
    dtype: torch.dtype
    views: tuple[Tensor, ...]  # one when sent; one or more when received
    storages: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.views[0].numel() * self.dtype.itemsize


@dataclass
class Message:
    """One message to or from `peer`: parcels in sequence, wider dtypes first for alignment.

    `flat` is the storage as bytes [nbytes] uint8 if it equals the message; else a buffer is needed. It is made at once:
    later the storage may have no memory."""

    peer: int
    sent: bool
    parcels: list[Parcel]
    flat: Tensor | None = None

    @classmethod
    def of(cls, peer: int, sent: bool, parcels: list[Parcel], device: torch.device) -> Message:
        parcels = sorted(parcels, key=lambda parcel: -parcel.dtype.itemsize)  # stable, so both sides agree
        views, view = parcels[0].views, parcels[0].views[0]
        direct = len(parcels) == len(views) == 1 and view.is_contiguous()
        direct = direct and view.dtype == parcels[0].dtype and view.device == device
        return cls(peer, sent, parcels, view.view(-1).view(torch.uint8) if direct else None)

    @property
    def nbytes(self) -> int:
        return sum(parcel.nbytes for parcel in self.parcels)

    @property
    def staged_bytes(self) -> int:
        """Bytes that it occupies in a buffer."""
        return 0 if self.flat is not None else staged(self.nbytes)


def messages(parcels: Iterable[tuple[int, bool, Parcel]], device: torch.device) -> list[Message]:
    """The messages of one round on one rank for its parcels (peer, whether sent, parcel) in plan order.

    Receives come first: gloo sends at once to a peer that is known to be waiting."""
    small: dict[tuple[int, bool], list[Parcel]] = {}
    out = []
    for peer, sent, parcel in parcels:
        if travels_alone(parcel.nbytes):
            out.append(Message.of(peer, sent, [parcel], device))
        else:
            small.setdefault((peer, sent), []).append(parcel)
    out += [Message.of(peer, sent, parts, device) for (peer, sent), parts in small.items()]
    return sorted(out, key=lambda message: message.sent)


ANNOUNCED_BYTES = 64 << 10  # below it a round's bytes for a peer are sent: announcing and acknowledging would cost more


@dataclass
class Round:
    """One round on this rank, from packing to unpacking: its messages, and the operations once it is bound to a buffer.

    `runs` counts completed runs. For large messages between ranks of one host, the sender announces the address, and
    the receiver reads the bytes and acknowledges (`peer_memory.py`)."""

    messages: list[Message]
    memory: PeerMemory
    group: dist.ProcessGroup | None
    runs: int = 0
    ops: list[dist.P2POp] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)
    _pack: Copies = field(default_factory=Copies)
    _unpack: Copies = field(default_factory=Copies)
    _announced: list[tuple[list[Tensor], Tensor]] = field(default_factory=list)  # what peers read, its announcement
    _read: dict[int, tuple[list[Tensor], Tensor]] = field(default_factory=dict)  # by the operation that announces it
    _waiting: int = 0

    @property
    def staged_bytes(self) -> int:
        return sum(message.staged_bytes for message in self.messages)

    def nbytes(self, sent: bool) -> int:
        """Bytes that this rank sends, or receives, in this round."""
        return sum(message.nbytes for message in self.messages if message.sent == sent)

    def bind(self, arena: Tensor) -> None:
        """Lay the messages out in `arena` [at least staged_bytes] uint8 and prepare the operations."""
        near: dict[tuple[int, bool], list[Tensor]] = {}
        totals, start = Counter[tuple[int, bool]](), 0
        for message in self.messages:
            totals[message.peer, message.sent] += message.nbytes
        for message in self.messages:
            if (flat := message.flat) is None:
                flat = arena[start : start + message.nbytes]
                start += message.staged_bytes
                begin = 0
                for parcel in message.parcels:
                    packed = flat[begin : begin + parcel.nbytes].view(parcel.dtype).view(parcel.views[0].shape)
                    begin += parcel.nbytes
                    for view in parcel.views:
                        self._pack.add(packed, view) if message.sent else self._unpack.add(view, packed)
            readable = message.peer in (self.memory.readers if message.sent else self.memory.readable)
            if readable and totals[message.peer, message.sent] >= ANNOUNCED_BYTES:
                near.setdefault((message.peer, message.sent), []).append(flat)
            else:
                self._add(dist.isend if message.sent else dist.irecv, flat, message.peer)
        for (peer, sent), flats in near.items():
            note = torch.empty(len(flats) + 2, dtype=torch.int64)
            if sent:
                self._announced.append((flats, note))
            else:
                self._read[len(self.ops)] = flats, note
            self._add(dist.isend if sent else dist.irecv, note, peer)
        for peer in (peer for peer, sent in near if sent):  # acknowledgements
            self._add(dist.irecv, torch.empty(1, dtype=torch.uint8), peer, tag=1)

    def unbind(self) -> None:
        """Let go of the buffer."""
        self._pack, self._unpack, self.ops, self._announced, self._read = Copies(), Copies(), [], [], {}

    def _add(self, operation: Callable, tensor: Tensor, peer: int, tag: int = 0) -> None:
        self.ops.append(dist.P2POp(operation, tensor, group=self.group, group_peer=peer, tag=tag))

    def post(self) -> None:
        """Pack and start the messages. Errors: RuntimeError of torch.distributed when a peer is gone."""
        self._pack.run()
        for flats, note in self._announced:
            self.memory.announce(flats, note)
        self.works = dist.batch_isend_irecv(self.ops) if self.ops else []

    def finish(self, timeout: float | None) -> None:
        """Wait at most `timeout` seconds for the messages, and unpack them.

        Receives come first: a rank acknowledges its reads before it waits for its peers'. Errors: RuntimeError of
        torch.distributed after the timeout, OSError when a peer's memory cannot be read."""
        end = time.monotonic() + timeout if timeout else None
        acknowledged: list[tuple[int, dist.Work]] = []
        for i, work in enumerate(self.works):
            self._wait(i, work, end)
            if (found := self._read.get(i)) is not None:
                peer = self.ops[i].group_peer
                read_announced(self.memory.readable[peer], found[1], found[0])
                done = dist.isend(torch.zeros(1, dtype=torch.uint8), group=self.group, group_dst=peer, tag=1)
                acknowledged += [(i, done)] if done is not None else []
        for i, work in acknowledged:
            self._wait(i, work, end)
        self.works = []
        self._unpack.run()
        self.runs += 1

    def _wait(self, index: int, work: dist.Work, end: float | None) -> None:
        self._waiting = index
        if end is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))

    def late_peers(self) -> list[int]:
        """The peer whose message is late, or all peers if the backend combines messages into one work."""
        ops = self.ops if len(self.works) != len(self.ops) else [self.ops[self._waiting]]
        return sorted({op.group_peer for op in ops})
