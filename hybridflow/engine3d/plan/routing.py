"""Routes: the sender and receivers of each piece of a tensor.

Pure. A rank receives a piece from a holder on its own node if there is one. A node without a holder receives the piece
once, on one of its ranks that need it, which relays it to the others. Decisions depend only on pieces with the same
holders, so each rank computes its own routes, and every holder sends equally often.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple


class Send(NamedTuple):
    """Rank `source` sends to `destination`: at `hop` 0 what it holds, at `hop` 1 what `root` has sent it."""

    source: int
    destination: int
    hop: int
    root: int


@dataclass(frozen=True)
class _Deal:
    """`holders` serve `stations` in order, equally many each. A station is a node's ranks with the same need: one of
    them receives a piece and relays it."""

    holders: tuple[int, ...]
    stations: tuple[tuple[int, ...], ...]

    def sends(self, size: int, load: Counter[int]) -> Iterator[Send]:
        """Routes of a piece of `size` elements; updates `load`, the elements that each rank has sent."""
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

    It has a deal within each node that has holders, and one for all other nodes. `length` counts elements.
    """

    within: list[_Deal]
    between: list[_Deal]
    length: int = 0

    def add(self, size: int) -> int:
        """Append the next piece, of `size` elements, and return its position in the sequence."""
        at, self.length = self.length, self.length + size
        return at

    def copies(self) -> Counter[int]:
        """How many copies of elements at one position each rank sends and receives at most in one round."""
        out: Counter[int] = Counter()
        for deal in (*self.within, *self.between):
            for rank, count in deal.copies():
                out[rank] += count
        return out


class Routes:
    """Routes of the pieces that exactly the ranks `holders` hold, requested one by one in canonical order.

    `nodes[rank]` is the node of each rank. Ranks of equal `wanted[rank]` need the same of every tensor, and serve each
    other first: with the paper's grouping they are micro data parallel groups, which no piece leaves.
    """

    def __init__(self, holders: Iterable[int], nodes: Sequence[int], wanted: Sequence[int]) -> None:
        self._order = [(part, rank) for rank, part in enumerate(wanted)]
        self.holders = tuple(sorted(holders, key=self._order.__getitem__))
        self._nodes = nodes
        self.fans: dict[frozenset[int], FanOut] = {}
        self._load = (Counter[int](), Counter[int]())  # elements sent so far: within nodes, and between them

    def fan(self, needers: frozenset[int]) -> FanOut:
        """The fan to these ranks, which need pieces and do not hold them."""
        if (fan := self.fans.get(needers)) is None:
            fan = self.fans[needers] = self._fan(needers)
        return fan

    def concern(self, rank: int) -> bool:
        """Whether `rank` sends or receives any of the pieces."""
        return bool(self.fans) and (rank in self.holders or any(rank in needers for needers in self.fans))

    def sends(self, fan: FanOut, size: int, rank: int | None = None) -> list[Send]:
        """Sends of the next piece in which `rank` takes part (None: all), holders first."""
        out = []
        for deals, load in zip((fan.within, fan.between), self._load, strict=True):
            for deal in deals:
                out += [send for send in deal.sends(size, load) if rank is None or rank in send[:2]]
        return out

    def _fan(self, needers: frozenset[int]) -> FanOut:
        held, needed = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for rank in self.holders:
            held[self._nodes[rank]].append(rank)
        for rank in sorted(needers, key=self._order.__getitem__):
            needed[self._nodes[rank]].append(rank)
        within = [
            _Deal(tuple(held[node]), tuple((rank,) for rank in ranks)) for node, ranks in needed.items() if node in held
        ]
        away = tuple(tuple(ranks) for node, ranks in needed.items() if node not in held)
        return FanOut(within, [_Deal(self.holders, away)] if away else [])
