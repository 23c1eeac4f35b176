"""Traffic: what executing a weight plan costs each rank, computed before a single byte moves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridflow.engine3d.move import Move


@dataclass(frozen=True, slots=True)
class Traffic:
    """The cost for one rank: bytes over the wire, bytes copied locally, messages sent and received.

    The last two are the part of what it sends and receives that crosses nodes. `peak_bytes` bounds the extra memory
    of the transfer: what the fullest round sends and receives.
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
    idle = _Meter()  # takes the count of ranks that nobody asked for
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
    for turn in rounds:
        held: dict[int, int] = {}
        for move in turn:
            for rank in (move.source, move.destination):
                held[rank] = held.get(rank, 0) + move.box.numel * itemsize
        for pair in {(move.source, move.destination) for move in turn}:
            for rank in pair:
                meters.get(rank, idle).messages += 1
        for rank, size in held.items():
            meter = meters.get(rank, idle)
            meter.peak = max(meter.peak, size)
    return [meter.read(rank) for rank, meter in meters.items()]


@dataclass(slots=True)
class _Meter:
    sent: int = 0
    received: int = 0
    local: int = 0
    messages: int = 0
    peak: int = 0
    sent_far: int = 0
    received_far: int = 0

    def read(self, rank: int) -> Traffic:
        wire = (self.sent, self.received, self.local, self.messages, self.peak)
        return Traffic(rank, *wire, self.sent_far, self.received_far)
