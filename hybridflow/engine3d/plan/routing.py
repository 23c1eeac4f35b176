"""Routes: who sends a piece of a tensor to whom. Pure.

A rank that needs a piece gets it from a holder of its own node where there is one. Into a node without a holder a piece
goes once, to one of the node's ranks that need it, which passes it on to the others. All decisions depend only on the
pieces that the same ranks hold, so each rank can make those that concern it, and every holder sends equally often.
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
    """`holders` serve `stations` in the order given, equally many each. A station is ranks of one node that need the
    same: one of them receives a piece and passes it on."""

    holders: tuple[int, ...]
    stations: tuple[tuple[int, ...], ...]

    def sends(self, size: int, load: Counter[int]) -> Iterator[Send]:
        """Routes of a piece of `size` elements; `load` counts what ranks have sent so far, and is updated."""
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
class Fan:
    """The way from a piece's holders to the ranks that need it, and the sequence of all pieces that take it.

    Deals within nodes that have holders, and one to the nodes that have none. `length` counts elements.
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

    `nodes[rank]` is the node of each rank. Ranks of equal `wanted[rank]` need the same of every tensor, and are served
    from among themselves first: with the paper's grouping they are micro data parallel groups; nothing leaves those.
    """

    def __init__(self, holders: Iterable[int], nodes: Sequence[int], wanted: Sequence[int]) -> None:
        self._order = [(part, rank) for rank, part in enumerate(wanted)]
        self.holders = tuple(sorted(holders, key=self._order.__getitem__))
        self._nodes = nodes
        self.fans: dict[frozenset[int], Fan] = {}
        self._load = (Counter[int](), Counter[int]())  # elements sent so far: within nodes, and between them

    def fan(self, needers: frozenset[int]) -> Fan:
        """The way to these ranks, which need pieces and do not hold them."""
        if (fan := self.fans.get(needers)) is None:
            fan = self.fans[needers] = self._fan(needers)
        return fan

    def concern(self, rank: int) -> bool:
        """Whether `rank` sends or receives any of the pieces."""
        return bool(self.fans) and (rank in self.holders or any(rank in needers for needers in self.fans))

    def sends(self, fan: Fan, size: int, rank: int | None = None) -> list[Send]:
        """The next piece's way, of which only the sends that `rank` takes part in (None: all), holders first."""
        out = []
        for deals, load in zip((fan.within, fan.between), self._load, strict=True):
            for deal in deals:
                out += [send for send in deal.sends(size, load) if rank is None or rank in send[:2]]
        return out

    def _fan(self, needers: frozenset[int]) -> Fan:
        held, needed = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for rank in self.holders:
            held[self._nodes[rank]].append(rank)
        for rank in sorted(needers, key=self._order.__getitem__):
            needed[self._nodes[rank]].append(rank)
        within = [
            _Deal(tuple(held[node]), tuple((rank,) for rank in ranks)) for node, ranks in needed.items() if node in held
        ]
        away = tuple(tuple(ranks) for node, ranks in needed.items() if node not in held)
        return Fan(within, [_Deal(self.holders, away)] if away else [])
