"""Messages: how the pieces that one rank sends another in one round are put on the wire, and the round on one rank.

A large piece is a message of its own, and goes from storage to storage without a buffer where that storage is
contiguous and of the dtype that travels. The small ones of a round share one message, packed one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.copies import Copies
from hybridflow.engine3d.rounds import staged, travels_alone


class Parcel(NamedTuple):
    """A piece of the plan on one rank: the dtype in which it travels, the views [box] it is read from or written to.

    `storages` are the source storages that are read (none by a relay), or the destination storages that are written.
    """

    tensor: str
    dtype: torch.dtype
    views: tuple[Tensor, ...]  # one when sent; one or more when received
    storages: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.views[0].numel() * self.dtype.itemsize


@dataclass
class Message:
    """What goes to or comes from `peer` at once: parcels one after the other, wider dtypes first to stay aligned.

    `flat` is the storage itself as bytes [nbytes] uint8, where it holds exactly what travels; else a buffer is needed.
    It is made when the message is: later the storage may be without memory.
    """

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
        """What it takes of a buffer."""
        return 0 if self.flat is not None else staged(self.nbytes)


def messages(parcels: Iterable[tuple[int, bool, Parcel]], device: torch.device) -> list[Message]:
    """The messages of one round on one rank for its parcels (peer, whether sent, parcel) in plan order.

    Receives come first: gloo sends at once to whoever is known to be waiting.
    """
    small: dict[tuple[int, bool], list[Parcel]] = {}
    out = []
    for peer, sent, parcel in parcels:
        if travels_alone(parcel.nbytes):
            out.append(Message.of(peer, sent, [parcel], device))
        else:
            small.setdefault((peer, sent), []).append(parcel)
    out += [Message.of(peer, sent, parts, device) for (peer, sent), parts in small.items()]
    return sorted(out, key=lambda message: message.sent)


@dataclass
class Round:
    """One round on this rank, from packing to unpacking: its messages, and the copies into and out of the buffer once
    it is bound to one.

    `runs` counts how often it has gone through.
    """

    messages: list[Message]
    pack: Copies = field(default_factory=Copies)
    unpack: Copies = field(default_factory=Copies)
    ops: list[dist.P2POp] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)
    runs: int = 0

    @property
    def staged_bytes(self) -> int:
        return sum(message.staged_bytes for message in self.messages)

    def nbytes(self, sent: bool) -> int:
        """Bytes that this rank sends, or receives, in this round."""
        return sum(message.nbytes for message in self.messages if message.sent == sent)

    def bind(self, arena: Tensor, group: dist.ProcessGroup | None) -> None:
        """Lay the messages out in `arena` [at least staged_bytes] uint8 and prepare the operations."""
        start = 0
        for message in self.messages:
            if (flat := message.flat) is None:
                flat = arena[start : start + message.nbytes]
                start += message.staged_bytes
                self._copy_parcels(message, flat)
            operation = dist.isend if message.sent else dist.irecv
            self.ops.append(dist.P2POp(operation, flat, group=group, group_peer=message.peer))

    def _copy_parcels(self, message: Message, flat: Tensor) -> None:
        start = 0
        for parcel in message.parcels:
            packed = flat[start : start + parcel.nbytes].view(parcel.dtype).view(parcel.views[0].shape)
            start += parcel.nbytes
            for view in parcel.views:  # not Copies.add: a view may be without memory now
                into, from_ = (packed, view) if message.sent else (view, packed)
                copies = self.pack if message.sent else self.unpack
                copies.into.append(into)
                copies.from_.append(from_)

    def post(self) -> None:
        """Pack and start the messages. Errors: RuntimeError of torch.distributed when a peer is gone."""
        self.pack.run()
        self.works = dist.batch_isend_irecv(self.ops) if self.ops else []

    def finish(self, timeout: float | None) -> None:
        """Wait until the messages have gone through, at most `timeout` seconds; and unpack them.

        Errors: RuntimeError of torch.distributed when they do not.
        """
        end = time.monotonic() + timeout if timeout else None
        for work in self.works:
            if end is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        self.works = []
        self.unpack.run()
        self.runs += 1

    def unbind(self) -> None:
        """Let go of the buffer."""
        self.pack, self.unpack, self.ops = Copies(), Copies(), []
