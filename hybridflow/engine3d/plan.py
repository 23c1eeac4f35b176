"""Weight plans: from the boxes of one layout to the boxes of another. Pure.

The ranks of both layouts are the ranks of one process group that will execute the plan. Planning is deterministic and
needs no communication: every rank computes the same whole plan, and bytes moved and peak bytes are known before a
single byte moves (paper, section 5: the transition between training and generation; ReaL: parameter reallocation).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from hybridflow.engine3d.layout import Box, Layout, Region, partition
from hybridflow.errors import LayoutError

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Move:
    """`box` goes from rank `source`, where it lies within `origin`, into every region of `into` on `destination`.

    `into` has more than one region where a rank stores the same elements twice (tied embeddings): they travel once.
    """

    box: Box
    source: int
    destination: int
    origin: Region
    into: tuple[Region, ...]

    @property
    def local(self) -> bool:
        return self.source == self.destination


@dataclass(frozen=True, slots=True)
class Traffic:
    """What executing a plan costs one rank: bytes over the wire, bytes copied locally, messages sent and received.

    `peak_bytes` bounds the extra memory of the transfer: what the fullest bucket sends and receives.
    """

    rank: int
    sent_bytes: int
    received_bytes: int
    local_bytes: int
    messages: int
    peak_bytes: int


@dataclass(frozen=True)
class WeightPlan:
    """Which pieces move between `ranks` ranks, in one order that all ranks share (canonical tensor, destination)."""

    ranks: int
    moves: tuple[Move, ...]

    def local(self, rank: int) -> list[Move]:
        """Pieces that stay on `rank`."""
        return [move for move in self.moves if move.local and move.source == rank]

    def sends(self, rank: int) -> list[Move]:
        return [move for move in self.moves if move.source == rank and not move.local]

    def receives(self, rank: int) -> list[Move]:
        return [move for move in self.moves if move.destination == rank and not move.local]

    def buckets(self, max_bytes: int = BUCKET_BYTES, itemsize: int = 4) -> list[list[Move]]:
        """Pieces that travel, in rounds in each of which no rank sends plus receives more than `max_bytes`.

        Larger pieces are cut (to one element at least). A piece joins the earliest round that neither of its two
        ranks has left behind, so ranks that do not meet fill rounds side by side, and ranks that walk their rounds in
        order, each round as one batch, cannot deadlock.
        """
        rounds: list[list[Move]] = []
        at, used = [0] * self.ranks, [0] * self.ranks  # each rank's latest round, and what it moves in it
        for move in self._pieces(max_bytes // itemsize):
            size, pair = move.box.numel * itemsize, (move.source, move.destination)
            turn = max(at[rank] for rank in pair)
            if any(at[rank] == turn and used[rank] and used[rank] + size > max_bytes for rank in pair):
                turn += 1
            for rank in pair:
                used[rank] = size + (used[rank] if at[rank] == turn else 0)
                at[rank] = turn
            if turn == len(rounds):
                rounds.append([])
            rounds[turn].append(move)
        return rounds

    def _pieces(self, max_numel: int) -> Iterator[Move]:
        # at most half of the bound, so that a rank can receive one large piece while it sends another
        for move in self.moves:
            if not move.local:
                for box in move.box.split(max(1, max_numel // 2)):
                    yield move if box is move.box else replace(move, box=box)

    def traffic(self, itemsize: int = 2, bucket_bytes: int = BUCKET_BYTES) -> list[Traffic]:
        """The cost for every rank when an element takes `itemsize` bytes on the wire."""
        sent, received, local, messages, peak = ([0] * self.ranks for _ in range(5))
        for move in self.moves:
            if move.local:
                local[move.source] += move.box.numel * itemsize * len(move.into)
            else:
                sent[move.source] += move.box.numel * itemsize
                received[move.destination] += move.box.numel * itemsize
        for bucket in self.buckets(bucket_bytes, itemsize):
            held: dict[int, int] = {}
            for move in bucket:
                for rank in (move.source, move.destination):
                    held[rank] = held.get(rank, 0) + move.box.numel * itemsize
            for pair in {(move.source, move.destination) for move in bucket}:
                for rank in pair:
                    messages[rank] += 1
            for rank, size in held.items():
                peak[rank] = max(peak[rank], size)
        return [Traffic(r, sent[r], received[r], local[r], messages[r], peak[r]) for r in range(self.ranks)]


def plan(source: Layout, destination: Layout, node_of: Callable[[int], int] | None = None) -> WeightPlan:
    """Fill every region of `destination` from the regions of `source`, each element once.

    An element comes from the rank itself where it holds it, else from a rank of the same node (`node_of(rank)`, when
    given), and among several from the one that has least to send so far, the nearest rank first. So a rank receives
    exactly the elements that it needs and does not hold. A layout with fewer ranks than the other leaves the rest out.

    Errors: LayoutError when a destination tensor is not in the source or has another shape there, or when nobody
    holds some of its elements.
    """
    _check_tensors(source, destination)
    ranks = max(source.ranks, destination.ranks)
    nodes = [node_of(rank) if node_of else 0 for rank in range(ranks)]
    held, wanted = _by_tensor(source), _by_tensor(destination)
    sent, moves = [0] * ranks, []
    for tensor in destination.tensors:
        holders = _Holders.of(held.get(tensor, {}))
        for rank, regions in wanted.get(tensor, {}).items():
            for box, into in partition((region.box, region) for region in regions):
                for move in _moves(box, rank, tuple(into), holders, sent, nodes):
                    moves.append(move)
                    if not move.local:
                        sent[move.source] += move.box.numel
    return WeightPlan(ranks, tuple(moves))


def _check_tensors(source: Layout, destination: Layout) -> None:
    wrong = []
    for name, shape in destination.tensors.items():
        found = source.tensors.get(name)
        if found is None:
            wrong.append(f"{name} {tuple(shape)} is not in the source")
        elif tuple(found) != tuple(shape):
            wrong.append(f"{name} is {tuple(shape)} in the destination and {tuple(found)} in the source")
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise LayoutError(
            f"the destination layout asks for tensors that the source layout does not have: {'; '.join(wrong[:5])}"
            f"{more}. Build both layouts from the same model spec."
        )


def _by_tensor(layout: Layout) -> dict[str, dict[int, list[Region]]]:
    """Regions by tensor, then by rank (ascending). Errors: LayoutError for a box outside its tensor."""
    out: dict[str, dict[int, list[Region]]] = {}
    for rank in range(layout.ranks):
        for region in layout.regions(rank):
            box, shape = region.box, layout.tensors.get(region.box.tensor)
            if shape is None or len(shape) != len(box.stop) or any(a < 0 or b > n for a, b, n in _extents(box, shape)):
                raise LayoutError(
                    f"rank {rank} stores {box} in {region.storage!r}, but the layout's tensor is {shape}. "
                    "The adapter that made this layout is wrong."
                )
            out.setdefault(box.tensor, {}).setdefault(rank, []).append(region)
    return out


def _extents(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return zip(box.start, box.stop, shape, strict=True)


Holding = tuple[int, Region]  # a rank and its region


@dataclass
class _Holders:
    """Who holds what of one tensor: disjoint boxes sorted by start, each with all ranks that hold it."""

    own: Mapping[int, Sequence[Region]]
    atoms: list[tuple[Box, list[Holding]]]
    starts: list[int]  # first row of each atom
    reach: list[int]  # last row of any atom up to here: never falls, so it can be bisected
    found: dict[Box, list[tuple[Box, list[Holding]]]] = field(default_factory=dict)

    @classmethod
    def of(cls, own: Mapping[int, Sequence[Region]]) -> _Holders:
        atoms = partition((region.box, (rank, region)) for rank, regions in own.items() for region in regions)
        reach = list(accumulate((box.rows[1] for box, _ in atoms), max))
        return cls(own, atoms, [box.rows[0] for box, _ in atoms], reach)

    def overlapping(self, box: Box) -> list[tuple[Box, list[Holding]]]:
        """Disjoint parts of `box` with their holders. Replicas ask for equal boxes, so answers are kept."""
        if (known := self.found.get(box)) is None:
            first, last = bisect_right(self.reach, box.rows[0]), bisect_left(self.starts, box.rows[1])
            near = ((box.intersect(atom), holders) for atom, holders in self.atoms[first:last])
            known = self.found[box] = [(part, holders) for part, holders in near if part is not None]
        return known


def _moves(
    box: Box, rank: int, into: tuple[Region, ...], holders: _Holders, sent: Sequence[int], nodes: Sequence[int]
) -> Iterator[Move]:
    rest = [box]
    for region in holders.own.get(rank, ()):
        for part in rest:
            if (common := part.intersect(region.box)) is not None:
                yield Move(common, rank, rank, region, into)
        rest = [left for part in rest for left in part.subtract(region.box)]
    for needed in rest:
        parts = holders.overlapping(needed)
        if sum(part.numel for part, _ in parts) != needed.numel:
            found = f"only {', '.join(str(part) for part, _ in parts)}" if parts else "nothing"
            raise LayoutError(
                f"rank {rank} of the destination needs {needed}, but the source ranks hold {found} of it. "
                "Every element needs a source."
            )
        for part, having in parts:
            near = [holding for holding in having if nodes[holding[0]] == nodes[rank]] or having
            sender, region = min(near, key=lambda holding: (sent[holding[0]], abs(holding[0] - rank), holding[0]))
            yield Move(part, sender, rank, region, into)
