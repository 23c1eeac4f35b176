"""Weight plans: from the boxes of one layout to the boxes of another. Pure.

The ranks of both layouts are the ranks of one process group that will execute the plan. Planning is deterministic and
needs no communication: bytes moved and peak bytes are known before a single byte moves (paper, section 5: the
transition between training and generation; ReaL: parameter reallocation). Every decision depends only on the pieces
that the same ranks hold, so each rank can compute its own part of a plan for thousands of ranks in seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

from hybridflow.engine3d.layout import Layout, Move
from hybridflow.engine3d.plan.chunks import Pace, cut, round_of
from hybridflow.engine3d.plan.intersection import Intersection, LayoutParts, pieces
from hybridflow.engine3d.plan.routing import Fan, Routes
from hybridflow.engine3d.plan.traffic import Broadcast, Traffic, count_traffic, tabulate
from hybridflow.errors import LayoutError

__all__ = ["BUCKET_BYTES", "Broadcast", "Move", "Traffic", "WeightPlan", "plan"]

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class WeightPlan:
    """Which pieces move between `ranks` ranks, in one order that all ranks share (canonical tensor, start, hop).

    With `rank` it is only that rank's part: the moves that it sends, receives or keeps. `nodes[rank]` is the node of
    each rank. Plain data: it can be pickled, and built long before the storages exist.
    """

    ranks: int
    moves: tuple[Move, ...]
    rank: int | None = None
    nodes: tuple[int, ...] = ()
    pace: Pace = field(default_factory=Pace)

    def local(self, rank: int) -> list[Move]:
        """Pieces that stay on `rank`."""
        return [move for move in self.moves if move.local and move.source == rank]

    def sends(self, rank: int) -> list[Move]:
        return [move for move in self.moves if move.source == rank and not move.local]

    def receives(self, rank: int) -> list[Move]:
        return [move for move in self.moves if move.destination == rank and not move.local]

    def buckets(self, max_bytes: int = BUCKET_BYTES, itemsize: int = 4) -> list[list[Move]]:
        """Pieces that travel, in the rounds in which a transfer moves them, two of which are under way at a time: no
        rank sends plus receives more than half of `max_bytes` in one.

        Pieces are cut where a round is full (to one element at least, and one per copy: `pace.copies + 1` elements
        are the smallest half). Both ends of a message and everyone who passes a piece on cut it alike, whether they
        have the whole plan or their own part, and count rounds alike: a round in which a rank has nothing to do is
        empty. Ranks that walk the rounds in order, each as one batch, cannot deadlock. A relay comes at least two
        rounds after the one that brings what it passes on, because the next one is posted while that is under way.
        """
        windows, grain = self.pace.windows(max_bytes, itemsize)
        rounds: dict[int, list[Move]] = {}
        for move in self.moves:
            if not move.local:
                for window, box in cut(move.box, move.at, move.of, windows, grain):
                    part = move if box is move.box else replace(move, box=box)
                    rounds.setdefault(round_of(window, move.hop), []).append(part)
        return [rounds.get(i, []) for i in range(max(rounds, default=-1) + 1)]

    def traffic(self, itemsize: int = 2, bucket_bytes: int = BUCKET_BYTES) -> list[Traffic]:
        """The cost for every rank, or for the one whose part this is, at `itemsize` bytes per element on the wire, of
        a transfer with the same `bucket_bytes`."""
        ranks = range(self.ranks) if self.rank is None else (self.rank,)
        return count_traffic(ranks, self.moves, self.buckets(bucket_bytes, itemsize), self.nodes, itemsize)

    def part(self, rank: int) -> WeightPlan:
        """The moves of `rank`. Errors: LayoutError when this is the part of another rank."""
        if self.rank == rank:
            return self
        if self.rank is not None:
            raise LayoutError(f"rank {rank} was given the part of the plan that is rank {self.rank}'s.")
        return replace(self, rank=rank, moves=tuple(m for m in self.moves if rank in (m.source, m.destination)))

    def only(self, tensors: Collection[str]) -> WeightPlan:
        """The part of the plan that moves these tensors. Rounds stay those of the whole: every rank names the same."""
        return replace(self, moves=tuple(move for move in self.moves if move.box.tensor in tensors))

    def routing_table(self) -> tuple[Broadcast, ...]:
        """Who broadcasts which tensors to whom.

        PUZZLE's Algorithm 1 computes such a table for a change of the parallel sizes in which D stays, P is divided
        and T multiplied by the same factor: there each rank broadcasts its shard to the ranks whose new shard
        contains or cuts it (as printed it is right for these pairs only). Here the table is read off the plan, so it
        exists for any two layouts on any ranks. Ranks that pass pieces on for another count as its receivers.

        Errors: LayoutError when this is one rank's part of a plan.
        """
        if self.rank is not None:
            raise LayoutError(
                f"this is rank {self.rank}'s part of a plan; the routing table needs the whole. Call plan(source, "
                "destination) without a rank."
            )
        return tabulate(self.moves)


def plan(
    source: Layout,
    destination: Layout,
    node_of: Callable[[int], int] | None = None,
    *,
    rank: int | None = None,
    exact: bool = False,
) -> WeightPlan:
    """Fill every region of `destination` from the regions of `source`, each element once.

    An element comes from the rank itself where it holds it, else from a rank of the same node (`node_of(rank)`, when
    given), and among several from the one that has sent least of what they hold together. So a rank receives exactly
    the elements that it needs and does not hold, and an element enters a node at most once. A layout with fewer ranks
    than the other leaves the rest out. With `rank` the plan is that rank's part, equal to its moves in the whole one.
    `exact` asks for the same tensors on both sides, wholly; else the source may have more (the head that a critic
    lacks), and the destination may ask for parts of tensors.

    Errors: LayoutError when a destination tensor is not in the source or has another shape there, when no rank holds
    some of its elements, for a box or an offset that does not fit its tensor, and for a rank outside the group; with
    `exact` also when the source has another tensor, or the destination has no place for some elements.
    """
    ranks = max(source.ranks, destination.ranks)
    if rank is not None and not 0 <= rank < ranks:
        raise LayoutError(f"rank {rank} is not among the {ranks} ranks of these layouts.")
    _check_tensors(source, destination, exact)
    nodes = tuple(node_of(i) if node_of else 0 for i in range(ranks))
    wanted = LayoutParts.of(destination, ranks)
    if exact:
        _check_whole(destination, wanted)
    draft = _Draft(LayoutParts.of(source, ranks), wanted, nodes, tuple(destination.tensors))
    return WeightPlan(ranks, tuple(draft.moves(rank)), rank, nodes, draft.pace())


class _Draft:
    """All pieces with their positions. What only one rank needs to know is then worked out for that rank."""

    def __init__(
        self, held: LayoutParts, wanted: LayoutParts, nodes: tuple[int, ...], tensors: tuple[str, ...]
    ) -> None:
        self.held, self.wanted = held, wanted
        self.routes: dict[tuple[int, ...], Routes] = {}  # by the parts of the source that hold a piece
        self.pieces: list[tuple[Intersection, Routes, Fan | None, int]] = []
        fans: dict[tuple[tuple[int, ...], tuple[int, ...]], Fan | None] = {}
        for tensor in tensors:
            for piece in pieces(tensor, held, wanted):
                holders, asking = tuple(piece.have), tuple(piece.need)
                if (routes := self.routes.get(holders)) is None:
                    routes = self.routes[holders] = Routes(held.ranks(piece.have), nodes, held.idle, wanted.part)
                if (holders, asking) not in fans:
                    needers = frozenset(wanted.ranks(piece.need)).difference(routes.holders)
                    fans[holders, asking] = routes.fan(needers) if needers else None
                fan = fans[holders, asking]
                self.pieces.append((piece, routes, fan, fan.add(piece.box.numel) if fan else 0))

    def pace(self) -> Pace:
        elements, copies, hops = Counter[int](), Counter[int](), 0
        for fan in (fan for routes in self.routes.values() for fan in routes.fans.values()):
            for rank, count in fan.copies().items():
                elements[rank] += count * fan.length
                copies[rank] += count
            hops = max(hops, fan.hops)
        return Pace(max(elements.values(), default=0), max(copies.values(), default=0), hops)

    def moves(self, rank: int | None) -> Iterator[Move]:
        """Moves that touch `rank` (None: all), in order."""
        held, wanted = self.held.part, self.wanted.part
        mine = {id(routes): rank is None or routes.concern(rank) for routes in self.routes.values()}
        for piece, routes, fan, at in self.pieces:
            box, have, need = piece.box, piece.have, piece.need
            for keeper in self._keepers(piece, rank):
                yield Move(box, keeper, keeper, have[held[keeper]][0], need[wanted[keeper]])
            if fan and mine[id(routes)]:
                for sender, receiver, hop, root in routes.sends(fan, box.numel, rank):
                    origin = need[wanted[sender]][0] if hop else have[held[sender]][0]
                    first = (root, have[held[root]][0].storage) if hop else None
                    yield Move(box, sender, receiver, origin, need[wanted[receiver]], at, fan.length, hop, first)

    def _keepers(self, piece: Intersection, rank: int | None) -> list[int]:
        """Ranks that need the piece and hold it."""
        ranks = sorted(self.wanted.ranks(piece.need)) if rank is None else (rank,)
        held, wanted = self.held.part, self.wanted.part
        return [r for r in ranks if held[r] in piece.have and wanted[r] in piece.need]


def _check_tensors(source: Layout, destination: Layout, exact: bool) -> None:
    wrong = []
    for name, shape in destination.tensors.items():
        found = source.tensors.get(name)
        if found is None:
            wrong.append(f"{name} {tuple(shape)} is not in the source")
        elif tuple(found) != tuple(shape):
            wrong.append(f"{name} is {tuple(shape)} in the destination and {tuple(found)} in the source")
    if exact:
        extra = [name for name in source.tensors if name not in destination.tensors]
        wrong += [f"{name} {tuple(source.tensors[name])} is in the source only" for name in extra]
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise LayoutError(
            f"these layouts are not of the same model: {'; '.join(wrong[:5])}{more}. Build both layouts from the same "
            "model spec."
        )


def _check_whole(destination: Layout, parts: LayoutParts) -> None:
    for name, shape in destination.tensors.items():
        stored, numel = sum(box.numel for box, _ in parts.atoms.get(name, ())), math.prod(shape)
        if stored != numel:
            raise LayoutError(
                f"the destination's layout names {name} {tuple(shape)}, but its ranks have a place for {stored} of the "
                f"{numel} elements only. The adapter that made this layout is wrong, or cannot split the model so."
            )
