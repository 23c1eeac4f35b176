"""Routes and rounds: who sends each piece of a tensor to whom, in which round and message. Pure.

A rank receives a piece from a holder on its own node if there is one. A node without a holder receives the piece once,
on one of its ranks that need it, which relays it to the others. Decisions depend only on pieces with the same holders,
so each rank computes its own routes, and every holder sends equally often.

All ranks execute the same rounds, two consecutive ones at a time. Pieces with the same holders and receivers form a
sequence, which is spread evenly over all rounds: round j takes the j-th of R equal windows, and relayed pieces follow
two rounds later. So a rank computes a piece's round from the piece alone; sender and receiver agree; and a piece has
arrived before the round that relays it is posted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from hybridflow.engine3d.layout import Box


class Send(NamedTuple):
    """Rank `source` sends to `destination`: at `hop` 0 what it holds, at `hop` 1 what `root` has sent it."""

    source: int
    destination: int
    hop: int
    root: int


@dataclass(frozen=True)
class _Deal:
    """`holders` serve `stations` in order, equally many each. A station is a node's ranks with the same need: one of
    them receives a piece and relays it. `load`, shared with other deals, counts the elements that each rank sent."""

    holders: tuple[int, ...]
    stations: tuple[tuple[int, ...], ...]
    load: Counter[int]

    def sends(self, size: int) -> Iterator[Send]:
        """Routes of a piece of `size` elements; updates `load`."""
        load = self.load
        each, more = divmod(len(self.stations), len(self.holders))
        favoured = sorted(self.holders, key=lambda rank: (load[rank], rank))[:more] if more else ()
        stations = iter(self.stations)
        for holder in self.holders:
            count = each + (holder in favoured)
            load[holder] += size * count
            for station in islice(stations, count):
                head = station[0]
                if len(station) > 1:
                    head = min(station, key=lambda rank: (load[rank], rank))
                    load[head] += size
                yield Send(holder, head, 0, holder)
                yield from (Send(head, rank, 1, holder) for rank in station if rank != head)

    def copies(self) -> Iterator[tuple[int, int]]:
        """Ranks, and how many copies of one element each sends and receives at most."""
        for holder in self.holders:
            yield holder, -(-len(self.stations) // len(self.holders))
        for station in self.stations:
            for rank in station:
                yield rank, len(station)


@dataclass
class FanOut:
    """Route from a piece's holders to its receivers, and the sequence of all pieces on it.

    It has a deal within each node that has holders, and one for all other nodes. `length` counts elements."""

    deals: list[_Deal]
    length: int = 0

    def add(self, size: int) -> int:
        """Append the next piece, of `size` elements, and return its position in the sequence."""
        at, self.length = self.length, self.length + size
        return at

    def copies(self) -> Counter[int]:
        """How many copies of elements at one position each rank sends and receives at most in one round."""
        out: Counter[int] = Counter()
        for deal in self.deals:
            for rank, count in deal.copies():
                out[rank] += count
        return out

    def sends(self, size: int, rank: int | None = None) -> list[Send]:
        """Sends of the next piece in which `rank` takes part (None: all), holders first."""
        return [send for deal in self.deals for send in deal.sends(size) if rank is None or rank in send[:2]]


class Routes:
    """Routes of the pieces that exactly the ranks `holders` hold, requested one by one in canonical order.

    `nodes[rank]` is the node of each rank. Ranks of equal `wanted[rank]` need the same of every tensor, and serve each
    other first: with the paper's grouping they are micro data parallel groups, which no piece leaves."""

    def __init__(self, holders: Iterable[int], nodes: Sequence[int], wanted: Sequence[int]) -> None:
        self._order = [(part, rank) for rank, part in enumerate(wanted)]
        self.holders = tuple(sorted(holders, key=self._order.__getitem__))
        self._nodes = nodes
        self.fans: dict[frozenset[int], FanOut] = {}
        self._load = (Counter[int](), Counter[int]())  # elements sent so far: within nodes, and between them

    def fan(self, needers: frozenset[int]) -> FanOut:
        """The fan to these ranks, which need pieces and do not hold them."""
        if needers in self.fans:
            return self.fans[needers]
        held, needed = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for rank in self.holders:
            held[self._nodes[rank]].append(rank)
        for rank in sorted(needers, key=self._order.__getitem__):
            needed[self._nodes[rank]].append(rank)
        within, between = self._load
        near = {node: tuple((rank,) for rank in ranks) for node, ranks in needed.items() if node in held}
        deals = [_Deal(tuple(held[node]), stations, within) for node, stations in near.items()]
        if away := tuple(tuple(ranks) for node, ranks in needed.items() if node not in held):
            deals.append(_Deal(self.holders, away, between))
        fan = self.fans[needers] = FanOut(deals)
        return fan

    def concern(self, rank: int) -> bool:
        """Whether `rank` sends or receives any of the pieces."""
        return bool(self.fans) and (rank in self.holders or any(rank in needers for needers in self.fans))


IN_FLIGHT = 2  # rounds: one is packed and posted while the previous one is in flight
DIRECT_BYTES = 256 << 10  # above, a separate message (50 us with gloo) costs less than two copies
ALIGNMENT = 16  # bytes; messages start at multiples of it in a buffer, so any dtype can view them


@dataclass(frozen=True, slots=True)
class Pace:
    """Bounds of a plan's rounds, equal on every rank.

    Window j of each sequence travels in round j.

    `elements`: maximum that a rank sends and receives. `copies`: maximum number of copies of the elements at one
    position of all sequences that a rank sends and receives."""

    elements: int = 0
    copies: int = 0

    def windows(self, max_bytes: int, itemsize: int) -> tuple[int, int]:
        """Number of windows, and the number of elements up to which a piece is never cut, so that the rounds in flight
        take at most `max_bytes` together.

        A window holds at most 1/R of a sequence plus one uncut piece from the previous window, for which a quarter of a
        round's elements is reserved. A bound below one element per copy cannot be met."""
        if not self.copies:
            return 1, 1
        bound = max(max_bytes // IN_FLIGHT // itemsize, self.copies + 1)
        grain = max(1, bound // (4 * self.copies))
        return -(-self.elements // (bound - self.copies * grain)), grain


def travels_alone(nbytes: int) -> bool:
    """Whether a piece is a message of its own; a round's other pieces between two ranks share one.

    The size alone decides, so both sides agree without communication."""
    return nbytes >= DIRECT_BYTES


def staged(nbytes: int) -> int:
    """Bytes of a buffer that a message of `nbytes` occupies."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def cut(box: Box, at: int, of: int, windows: int, grain: int) -> Iterator[tuple[int, Box]]:
    """Parts of `box`, which starts at element `at` of a sequence of `of`, in index order, each with its window.

    A part belongs to the window of its last element, and reaches at most `grain - 1` elements into earlier ones."""
    numel = box.numel
    first, last = at * windows // of, (at + numel - 1) * windows // of
    if first == last or numel <= grain:
        yield last, box
        return
    axis = box.first_axis
    begin, length, inner = box.start[axis], box.shape[axis], numel // box.shape[axis]
    row = 0
    while row < length:
        start, window = at + row * inner, (at + (row + 1) * inner - 1) * windows // of
        limit = -(-(window + 1) * of // windows)  # first element of the next window
        until = row + 1 if inner > grain else max(row + 1, min(length, (limit - at) // inner))
        part = box.slab(axis, begin + row, begin + until)
        if inner > grain:
            yield from cut(part, start, of, windows, grain)
        else:
            yield window, part
        row = until
