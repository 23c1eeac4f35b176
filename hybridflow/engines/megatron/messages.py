"""StageMessages: activations and gradients between a pipeline stage and its neighbours.

Both sides know the shape of each message from its micro-batch, and both send and receive in the order of one schedule,
because NCCL has no tags. Each direction has a group of its own there: one stream would make them wait for each other.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from hybridflow.engines.process_groups import RankContext
from hybridflow.planner.pipeline.schedule import WINDOW

Direction = Literal["forward", "backward"]


class StageMessages:
    """Messages of one model; at most `WINDOW` of a direction are on their way, as `simulate` assumes. Every wait ends
    with the timeout of the context's groups."""

    def __init__(self, context: RankContext) -> None:
        members = context.grid.group(context.rank, "p")
        at, ranks = context.coords.p, [context.groups.ranks[member] for member in members]
        before, after = ranks[at - 1] if at else None, ranks[at + 1] if at + 1 < len(ranks) else None
        self.first = before is None  # nothing comes from a stage before this one
        self._peers = {"forward": (before, after), "backward": (after, before)}  # to receive from, to send to
        both = own = context.groups.of(members)
        if context.device.type == "cuda":
            both, own = (context.groups.new(f"pipeline-{name}", members, priority=True) for name in self._peers)
        self._groups = {"forward": both, "backward": own}
        context.groups.between_stages.update((both, own))
        self._sent: dict[str, deque[tuple[dist.Work, Tensor]]] = {"forward": deque(), "backward": deque()}

    def receive(self, direction: Direction, buffer: Tensor) -> dist.Work:
        """Announce the next message of a direction; it is in `buffer` once `wait` returns."""
        work = dist.irecv(buffer, self._peers[direction][0], group=self._groups[direction])
        assert work is not None
        return work

    def send(self, direction: Direction, message: Tensor) -> None:
        """Without waiting for the peer, except for a message that it should have received long ago."""
        sent = self._sent[direction]
        if len(sent) == WINDOW:
            sent.popleft()[0].wait()
        message = message.detach().contiguous()
        work = dist.isend(message, self._peers[direction][1], group=self._groups[direction])
        assert work is not None
        sent.append((work, message))

    def flush(self) -> None:
        """Wait until the peers have received everything."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[0].wait()


def wait(work: dist.Work) -> None:
    """Until the message has arrived."""
    work.wait()
