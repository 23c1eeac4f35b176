"""Weight plans: moves from the boxes of one layout to the boxes of another, and their cost.

Pure. The ranks of both layouts are ranks of the process group that executes the plan. Planning is deterministic and
needs no communication: bytes moved and peak bytes are known before a byte moves (paper, section 5: the transition
between training and generation; ReaL: parameter reallocation). Every decision depends only on pieces with the same
holders, so each rank can compute its own part of a plan for thousands of ranks in seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hybridflow.engine3d.layout import Box, Intersection, Layout, LayoutParts, Region, pieces
from hybridflow.engine3d.routing import IN_FLIGHT, FanOut, Pace, Routes, cut, staged, travels_alone
from hybridflow.errors import LayoutError

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Move:
    """`box` goes from rank `source`, where it lies within `origin`, into every region of `into` on `destination`.

    `into` has more than one region where a rank stores the same elements twice (tied embeddings): they travel once.

    Pieces with the same holders and receivers form a sequence in canonical order. This one starts at element `at` of
    the sequence's `of` elements, which determines its round.

    With `hop` 0 it comes from the source layout. With `hop` 1 it is relayed: `origin` is then a region of the
    *destination* layout on rank `source`, filled in an earlier round by a move of hop 0, and `root` is that move's
    source rank and storage name."""

    box: Box
    source: int
    destination: int
    origin: Region
    into: tuple[Region, ...]
    at: int = 0
    of: int = 0
    hop: int = 0
    root: tuple[int, str] | None = None

    @property
    def local(self) -> bool:
        return self.source == self.destination


@dataclass(slots=True)
class Traffic:
    """The cost for one rank: bytes over the wire, bytes copied locally, messages sent and received.

    The last two are the parts sent and received across nodes.

    `peak_bytes` is an upper bound of the transfer's extra memory: it counts a buffer for every message, in two
    alternating buffers, though a message of one contiguous piece in the transfer dtype needs none. Everything else is
    exact if all elements travel at the given `itemsize`."""

    rank: int
    sent_bytes: int = 0
    received_bytes: int = 0
    local_bytes: int = 0
    messages: int = 0
    peak_bytes: int = 0
    sent_between_nodes: int = 0
    received_between_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Rank `root` gives its pieces of `tensors`, `elements` in all, to `receivers`, directly or through one of them. A
    rank that keeps its own pieces is not a receiver."""

    root: int
    receivers: tuple[int, ...]
    tensors: tuple[str, ...]
    elements: int


@dataclass(frozen=True)
class WeightPlan:
    """The moves between `ranks` ranks, in an order that all ranks share (canonical tensor, start, hop).

    With `rank` it holds only the moves that this rank sends, receives or keeps. `nodes[rank]` is the node of each rank.
    Plain data: it can be pickled, and built long before the storages exist."""

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
        """Travelling pieces by round.

        Two rounds are in flight at a time, so a rank sends plus receives at most half of `max_bytes` in one. Pieces are
        cut where a round is full (to at least one element, and one per copy: `pace.copies + 1` elements are the
        smallest half). All ranks cut and number alike, with the whole plan or their own part: a round without work for
        a rank is empty. Ranks that execute the rounds in order, each as one batch, cannot deadlock. A relay comes two
        rounds after its piece arrives, because the next round is posted while that one is in flight."""
        windows, grain = self.pace.windows(max_bytes, itemsize)
        rounds: dict[int, list[Move]] = {}
        for move in self.moves:
            if not move.local:
                for window, box in cut(move.box, move.at, move.of, windows, grain):
                    part = move if box is move.box else replace(move, box=box)
                    rounds.setdefault(window + IN_FLIGHT * move.hop, []).append(part)
        return [rounds.get(i, []) for i in range(max(rounds, default=-1) + 1)]

    def traffic(self, itemsize: int = 2, bucket_bytes: int = BUCKET_BYTES) -> list[Traffic]:
        """The cost for every rank, or for this part's rank, of a transfer with `bucket_bytes` and `itemsize` bytes per
        element on the wire."""
        found = [Traffic(rank) for rank in range(self.ranks)]
        for move in self.moves:
            size, source, destination = move.box.numel * itemsize, found[move.source], found[move.destination]
            if move.local:
                source.local_bytes += size * len(move.into)
                continue
            source.sent_bytes += size
            destination.received_bytes += size
            if self.nodes[move.source] != self.nodes[move.destination]:
                source.sent_between_nodes += size
                destination.received_between_nodes += size
        buffers = Counter[tuple[int, int]]()  # by rank and buffer
        for i, moves in enumerate(self.buckets(bucket_bytes, itemsize)):
            held = Counter[tuple[int, int]]()
            for *ends, size in _messages(moves, itemsize):
                for rank in ends:
                    found[rank].messages += 1
                    held[rank, i % IN_FLIGHT] += staged(size)
            buffers |= held
        for (rank, _), size in buffers.items():
            found[rank].peak_bytes += size
        return found if self.rank is None else [found[self.rank]]

    def part(self, rank: int) -> WeightPlan:
        """The moves of `rank`. Errors: LayoutError when this is the part of another rank."""
        if self.rank == rank:
            return self
        if self.rank is not None:
            raise LayoutError(f"rank {rank} was given the part of the plan that is rank {self.rank}'s.")
        return replace(self, rank=rank, moves=tuple(m for m in self.moves if rank in (m.source, m.destination)))

    def only(self, tensors: Collection[str]) -> WeightPlan:
        """The plan's moves of these tensors, equal on every rank; rounds stay those of the whole plan."""
        return replace(self, moves=tuple(move for move in self.moves if move.box.tensor in tensors))

    def routing_table(self) -> tuple[Broadcast, ...]:
        """Root, tensors and receivers of each broadcast.

        PUZZLE's Algorithm 1 computes this table for a change that keeps D, divides P and multiplies T by the same
        factor: each rank broadcasts its shard to the ranks whose new shard contains or cuts it (as printed, it is
        correct for these pairs only). Here the plan gives the table, for any two layouts on any ranks. Errors:
        LayoutError when this is one rank's part of a plan."""
        if self.rank is not None:
            raise LayoutError(
                f"this is rank {self.rank}'s part of a plan; the routing table needs the whole. Call plan(source, "
                "destination) without a rank."
            )
        receivers: dict[tuple[Box, int], list[int]] = {}
        for move in self.moves:
            if not move.local:
                root = move.root[0] if move.root else move.source
                receivers.setdefault((move.box, root), []).append(move.destination)
        lines: dict[tuple[int, tuple[int, ...]], list[Box]] = {}
        for (box, root), ranks in receivers.items():
            lines.setdefault((root, tuple(sorted(ranks))), []).append(box)
        return tuple(
            Broadcast(*ends, tuple(dict.fromkeys(box.tensor for box in boxes)), sum(box.numel for box in boxes))
            for ends, boxes in sorted(lines.items())
        )


def _messages(moves: Sequence[Move], itemsize: int) -> list[tuple[int, int, int]]:
    """Source, destination and bytes of each message of a round."""
    alone, shared = [], Counter[tuple[int, int]]()
    for move in moves:
        size = move.box.numel * itemsize
        if travels_alone(size):
            alone.append((move.source, move.destination, size))
        else:
            shared[move.source, move.destination] += size
    return alone + [(*ends, size) for ends, size in shared.items()]


def plan(
    source: Layout,
    destination: Layout,
    node_of: Callable[[int], int] | None = None,
    *,
    rank: int | None = None,
    exact: bool = False,
) -> WeightPlan:
    """Fill every region of `destination` from the regions of `source`, each element once.

    A rank keeps an element that it holds; otherwise a rank of the same node (`node_of(rank)`, when given) sends it, and
    of several holders the one that has sent least of their common pieces. So a rank receives exactly the elements that
    it needs and does not hold, and an element enters a node at most once. In the smaller layout the remaining ranks
    hold nothing. With `rank` the plan is that rank's part, equal to its moves in the whole plan. `exact` requires the
    same whole tensors on both sides; else the source may have more (a head that a critic lacks), and the destination
    may need parts of tensors. Errors: LayoutError when a destination tensor is not in the source or has another shape
    there, when no rank holds some of its elements, for a box or an offset that does not fit its tensor, and for a rank
    outside the group; with `exact` also when the source has another tensor, or the destination has no place for some
    elements."""
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
    """All pieces with their positions; moves are derived for one rank at a time."""

    def __init__(
        self, held: LayoutParts, wanted: LayoutParts, nodes: tuple[int, ...], tensors: tuple[str, ...]
    ) -> None:
        self.held, self.wanted = held, wanted
        self.routes: dict[tuple[int, ...], Routes] = {}  # by the source parts that hold a piece
        self.pieces: list[tuple[Intersection, Routes, FanOut | None, int]] = []
        fans: dict[tuple[tuple[int, ...], tuple[int, ...]], FanOut | None] = {}
        for tensor in tensors:
            for piece in pieces(tensor, held, wanted):
                holders, asking = tuple(piece.have), tuple(piece.need)
                if (routes := self.routes.get(holders)) is None:
                    routes = self.routes[holders] = Routes(held.ranks(piece.have), nodes, wanted.part)
                if (holders, asking) not in fans:
                    needers = frozenset(wanted.ranks(piece.need)).difference(routes.holders)
                    fans[holders, asking] = routes.fan(needers) if needers else None
                fan = fans[holders, asking]
                self.pieces.append((piece, routes, fan, fan.add(piece.box.numel) if fan else 0))

    def pace(self) -> Pace:
        elements, copies = Counter[int](), Counter[int]()
        for fan in (fan for routes in self.routes.values() for fan in routes.fans.values()):
            for rank, count in fan.copies().items():
                elements[rank] += count * fan.length
                copies[rank] += count
        return Pace(max(elements.values(), default=0), max(copies.values(), default=0))

    def moves(self, rank: int | None) -> Iterator[Move]:
        """Moves that touch `rank` (None: all), in order."""
        held, wanted = self.held.part, self.wanted.part
        mine = {id(routes): rank is None or routes.concern(rank) for routes in self.routes.values()}
        for piece, routes, fan, at in self.pieces:
            box, have, need = piece.box, piece.have, piece.need
            for keeper in sorted(self.wanted.ranks(need)) if rank is None else (rank,):
                if held[keeper] not in have or wanted[keeper] not in need:  # else it needs the piece and holds it
                    continue
                yield Move(box, keeper, keeper, have[held[keeper]][0], need[wanted[keeper]])
            if fan and mine[id(routes)]:
                for sender, receiver, hop, root in fan.sends(box.numel, rank):
                    origin = need[wanted[sender]][0] if hop else have[held[sender]][0]
                    first = (root, have[held[root]][0].storage) if hop else None
                    yield Move(box, sender, receiver, origin, need[wanted[receiver]], at, fan.length, hop, first)


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
