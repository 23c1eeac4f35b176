"""Turn: one round of a transfer on one rank, from packing to unpacking."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.copies import Copies
from hybridflow.engine3d.messages import Message


@dataclass
class Turn:
    """One round on this rank: its messages, and the copies into and out of the buffer once it is bound to one.

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
                self._copy_pieces(message, flat)
            operation = dist.isend if message.sent else dist.irecv
            self.ops.append(dist.P2POp(operation, flat, group=group, group_peer=message.peer))

    def _copy_pieces(self, message: Message, flat: Tensor) -> None:
        start = 0
        for piece in message.pieces:
            packed = flat[start : start + piece.nbytes].view(piece.dtype).view(piece.views[0].shape)
            start += piece.nbytes
            for view in piece.views:  # not Copies.add: a view may be without memory now
                into, from_ = (packed, view) if message.sent else (view, packed)
                copies = self.pack if message.sent else self.unpack
                copies.into.append(into)
                copies.from_.append(from_)

    def post(self) -> None:
        """Pack and start the messages."""
        self.pack.run()
        self.works = dist.batch_isend_irecv(self.ops) if self.ops else []

    def finish(self, timeout: float | None) -> None:
        """Wait until the messages have gone through, at most `timeout` seconds; and unpack them."""
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
        self.pack, self.unpack, self.ops = Copies(), Copies(), []
