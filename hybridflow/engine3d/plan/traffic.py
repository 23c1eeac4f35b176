"""What executing a weight plan costs each rank, and who gives what to whom, before a single byte moves. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hybridflow.engine3d.layout import Box, Move
from hybridflow.engine3d.plan.chunks import IN_FLIGHT, staged, travels_alone


@dataclass(frozen=True, slots=True)
class Traffic:
    """The cost for one rank: bytes over the wire, bytes copied locally, messages sent and received.

    The last two are the part of what it sends and receives that crosses nodes. `peak_bytes` bounds the extra memory
    of the transfer from above: two buffers take turns, and here every message is in one. A message of one piece whose
    storage is contiguous and of the dtype that travels needs none: that the storages decide.

    Everything else is exact where all elements travel at the `itemsize` that was asked for.
    """

    rank: int
    sent_bytes: int
    received_bytes: int
    local_bytes: int
    messages: int
    peak_bytes: int
    sent_between_nodes: int = 0
    received_between_nodes: int = 0


def count_traffic(
    ranks: Iterable[int], moves: Iterable[Move], rounds: Iterable[Sequence[Move]], nodes: Sequence[int], itemsize: int
) -> list[Traffic]:
    """The traffic of each of `ranks` when an element takes `itemsize` bytes, from all moves that touch them."""
    meters = {rank: _Meter() for rank in ranks}
    idle = _Meter()  # counts for ranks that were not asked for
    for move in moves:
        size, sender = move.box.numel * itemsize, meters.get(move.source, idle)
        if move.local:
            sender.local += size * len(move.into)
            continue
        receiver = meters.get(move.destination, idle)
        sender.sent += size
        receiver.received += size
        if nodes[move.source] != nodes[move.destination]:
            sender.sent_far += size
            receiver.received_far += size
    for i, pieces in enumerate(rounds):
        held: Counter[int] = Counter()
        for source, destination, size in _messages(pieces, itemsize):
            for rank in (source, destination):
                meters.get(rank, idle).messages += 1
                held[rank] += staged(size)
        for rank, size in held.items():
            buffers = meters.get(rank, idle).buffers
            buffers[i % IN_FLIGHT] = max(buffers[i % IN_FLIGHT], size)
    return [meter.read(rank) for rank, meter in meters.items()]


def _messages(pieces: Iterable[Move], itemsize: int) -> list[tuple[int, int, int]]:
    """Source, destination and bytes of each message of a round."""
    alone, shared = [], Counter[tuple[int, int]]()
    for move in pieces:
        size = move.box.numel * itemsize
        if travels_alone(size):
            alone.append((move.source, move.destination, size))
        else:
            shared[move.source, move.destination] += size
    return alone + [(*pair, size) for pair, size in shared.items()]


@dataclass(slots=True)
class _Meter:
    sent: int = 0
    received: int = 0
    local: int = 0
    messages: int = 0
    sent_far: int = 0
    received_far: int = 0
    buffers: list[int] = field(default_factory=lambda: [0] * IN_FLIGHT)

    def read(self, rank: int) -> Traffic:
        wire = (self.sent, self.received, self.local, self.messages, sum(self.buffers))
        return Traffic(rank, *wire, self.sent_far, self.received_far)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Rank `root` gives its pieces of `tensors`, `elements` in all, to `receivers`, whom it sends them or has them
    passed on to. A rank that keeps its own pieces is no receiver of them.
    """

    root: int
    receivers: tuple[int, ...]
    tensors: tuple[str, ...]
    elements: int


def tabulate(moves: Iterable[Move]) -> tuple[Broadcast, ...]:
    """One line for each root and set of receivers, by root, from all moves of a plan."""
    receivers: dict[tuple[Box, int], list[int]] = {}
    for move in moves:
        if not move.local:
            root = move.root[0] if move.root else move.source
            receivers.setdefault((move.box, root), []).append(move.destination)
    lines: dict[tuple[int, tuple[int, ...]], tuple[dict[str, None], int]] = {}
    for (box, root), ranks in receivers.items():
        key = (root, tuple(sorted(ranks)))
        tensors, elements = lines.get(key, ({}, 0))
        lines[key] = (tensors | {box.tensor: None}, elements + box.numel)
    return tuple(Broadcast(*key, tuple(tensors), elements) for key, (tensors, elements) in sorted(lines.items()))
