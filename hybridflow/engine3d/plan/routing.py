"""Routes: who sends a piece of a tensor to whom. Pure.

A piece has *holders* and *needers*. A needer gets it from a holder of its own node where there is one. Into a node
without a holder it goes once, to one of the node's needers, which passes it on to the others. All decisions depend
only on the pieces that the same ranks hold, so that each rank can make those that concern it, and every element is
sent evenly often by all of its holders. Where many ranks have nothing to send themselves (a generation pool beside
the training pool), a holder sends to the first of them only, and they pass the piece on like a chain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

WIDE = 2  # idle ranks that a holder sends to itself; of more, the first one relays
LONG = 32  # a chain of more relays becomes a binary tree: each sends twice, but the last waits for few others only

Station = tuple[int, ...]  # ranks of one node that need the same: one of them gets it from outside


class Send(NamedTuple):
    """Rank `source` sends to `destination`: at `hop` 0 what it holds, later what it has received.

    `root` is the holder at the beginning: `source` itself at `hop` 0.
    """

    source: int
    destination: int
    hop: int
    root: int


@dataclass(frozen=True)
class _Deal:
    """Holders that serve stations: dealt out evenly in the order given, or one chain of relays for each holder."""

    holders: tuple[int, ...]
    direct: tuple[Station, ...]
    chains: tuple[tuple[Station, ...], ...] = ()

    @classmethod
    def of(cls, holders: Sequence[int], stations: Sequence[Station], idle: Collection[int]) -> _Deal:
        quiet = [station for station in stations if all(rank in idle for rank in station)]
        count = len(holders)
        if len(quiet) <= WIDE * count:
            return cls(tuple(holders), tuple(stations))
        busy = tuple(station for station in stations if not all(rank in idle for rank in station))
        cuts = [len(quiet) * i // count for i in range(count + 1)]
        return cls(tuple(holders), busy, tuple(tuple(quiet[a:b]) for a, b in pairwise(cuts)))

    @property
    def fixed(self) -> bool:
        """Every piece takes the same route."""
        single = all(len(station) == 1 for chain in (self.direct, *self.chains) for station in chain)
        return single and len(self.direct) % len(self.holders) == 0

    def sends(self, size: int, load: Counter[int]) -> Iterator[Send]:
        """Routes of a piece of `size` elements; `load` counts what ranks have sent so far, and is updated."""
        each, more = divmod(len(self.direct), len(self.holders))
        favoured = set(sorted(self.holders, key=lambda rank: (load[rank], rank))[:more]) if more else ()
        stations = iter(self.direct)
        for holder in self.holders:
            count = each + (holder in favoured)
            load[holder] += size * count
            for _ in range(count):
                yield from _serve(holder, next(stations), 0, size, load, holder)[1]
        for holder, chain in zip(self.holders, self.chains, strict=False):
            load[holder] += size
            heads: list[int] = []
            for i, station in enumerate(chain):
                sender = heads[_parent(i, chain)] if i else holder
                head, sends = _serve(sender, station, _hop(i, chain), size, load, holder)
                heads.append(head)
                yield from sends

    def copies(self) -> Counter[tuple[int, int]]:
        """How many copies of one element each (rank, hop) sends and receives at most."""
        out: Counter[tuple[int, int]] = Counter()
        for holder in self.holders:
            out[holder, 0] = -(-len(self.direct) // len(self.holders)) + bool(self.chains)
        for station in self.direct:
            _count(out, station, 0, 0)
        for chain in self.chains:
            children = Counter(_parent(i, chain) for i in range(1, len(chain)))
            for i, station in enumerate(chain):
                _count(out, station, _hop(i, chain), children[i])
        return out


def _serve(sender: int, station: Station, hop: int, size: int, load: Counter[int], root: int) -> tuple[int, list[Send]]:
    """The station's rank that has relayed least gets the piece and passes it on."""
    head = station[0] if len(station) == 1 else min(station, key=lambda rank: (load[rank], rank))
    load[head] += size if len(station) > 1 else 0
    return head, [Send(sender, head, hop, root), *(Send(head, r, hop + 1, root) for r in station if r != head)]


def _count(copies: Counter[tuple[int, int]], station: Station, hop: int, children: int) -> None:
    for rank in station:
        copies[rank, hop] += 1
        if more := children + len(station) - 1:
            copies[rank, hop + 1] += more


def _parent(i: int, chain: Sequence[Station]) -> int:
    return i - 1 if len(chain) <= LONG else (i - 1) // 2


def _hop(i: int, chain: Sequence[Station]) -> int:
    return i if len(chain) <= LONG else (i + 1).bit_length() - 1


@dataclass
class Fan:
    """The way from a piece's holders to its `needers`, and the sequence of all pieces that take it.

    Deals within nodes that have holders, and one to the nodes that have none. `length` counts elements.
    """

    needers: frozenset[int]
    within: list[_Deal]
    between: list[_Deal]
    length: int = 0
    known: dict[int | None, list[Send]] = field(default_factory=dict)  # by rank, where all pieces take the same route

    def add(self, size: int) -> int:
        """Take note of the next piece, of `size` elements: its position in the sequence."""
        at, self.length = self.length, self.length + size
        return at

    def copies(self) -> Counter[int]:
        """How many copies of elements at one position a rank sends and receives at most in one round."""
        out: Counter[int] = Counter()
        for deal in (*self.within, *self.between):  # at different hops it meets different positions, so all add up
            for (rank, _), count in deal.copies().items():
                out[rank] += count
        return out

    @property
    def hops(self) -> int:
        return max(hop for deal in (*self.within, *self.between) for _, hop in deal.copies())

    @property
    def fixed(self) -> bool:
        """Every piece takes the same route."""
        return all(deal.fixed for deal in (*self.within, *self.between))


class Routes:
    """Routes of the pieces that exactly the ranks `holders` hold, asked for one by one in canonical order.

    `nodes[rank]` is the node of each rank, `idle` are the ranks that hold nothing of any tensor. Ranks of equal
    `kin[rank]` want the same of every tensor, and are served from among themselves first: with the paper's grouping
    they are micro data parallel groups, and nothing leaves those.
    """

    def __init__(self, holders: Iterable[int], nodes: Sequence[int], idle: Collection[int], kin: Sequence[int]) -> None:
        self._order = [(of, rank) for rank, of in enumerate(kin)]
        self.holders = tuple(sorted(holders, key=self._order.__getitem__))
        self._nodes, self._idle = nodes, idle
        self._at_node: dict[int, list[int]] = defaultdict(list)
        for rank in self.holders:
            self._at_node[nodes[rank]].append(rank)
        self.fans: dict[frozenset[int], Fan] = {}
        self._load = (Counter[int](), Counter[int]())  # sent so far: within nodes, and between them

    def fan(self, needers: frozenset[int]) -> Fan:
        """The way to these ranks, which need pieces and do not hold them."""
        if (fan := self.fans.get(needers)) is None:
            fan = self.fans[needers] = self._fan(needers)
        return fan

    def concern(self, rank: int) -> bool:
        """Whether `rank` sends or receives any of the pieces."""
        return bool(self.fans) and (rank in self.holders or any(rank in needers for needers in self.fans))

    def sends(self, fan: Fan, size: int, rank: int | None = None) -> Sequence[Send]:
        """The next piece's way to its needers, of which `rank` takes part (None: all), senders before relays."""
        if rank in fan.known:
            return fan.known[rank]
        out = []
        for deals, load in zip((fan.within, fan.between), self._load, strict=True):
            for deal in deals:
                out += [send for send in deal.sends(size, load) if rank is None or rank in send[:2]]
        if fan.fixed:
            fan.known[rank] = out
        return out

    def _fan(self, needers: frozenset[int]) -> Fan:
        at_node: dict[int, list[int]] = defaultdict(list)
        for rank in sorted(needers, key=self._order.__getitem__):
            at_node[self._nodes[rank]].append(rank)
        within = [
            _Deal.of(self._at_node[node], [(rank,) for rank in ranks], self._idle)
            for node, ranks in at_node.items()
            if node in self._at_node
        ]
        away = [tuple(ranks) for node, ranks in at_node.items() if node not in self._at_node]
        return Fan(needers, within, [_Deal.of(self.holders, away, self._idle)] if away else [])
