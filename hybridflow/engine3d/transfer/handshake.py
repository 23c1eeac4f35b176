"""Terms: what the ranks of a group tell each other before weights move, and the dtypes that follow from it.

A rank knows its own storages, and perhaps only its own part of the plan. One collective tells everybody whose storages
do not fit, whether both ends of every pair expect the same pieces, and the dtype of every storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from hybridflow.engine3d.plan.plan import Move, WeightPlan
from hybridflow.engine3d.transfer.peer_memory import PeerProcess
from hybridflow.engine3d.transfer.wire import DTYPES, converts, holds, wire_device, wire_dtype
from hybridflow.errors import HybridFlowError, LayoutError, WaitTimeoutError

Dtypes = Mapping[str, torch.dtype]
T = TypeVar("T")


@dataclass(frozen=True)
class _Names:
    """Dtypes (positions in DTYPES) of named storages: nearly all have the usual one, so only others are listed."""

    usual: int
    others: dict[str, int]

    @classmethod
    def of(cls, dtypes: Dtypes) -> _Names:
        codes = {name: DTYPES.index(dtype) for name, dtype in dtypes.items()}
        usual = Counter(codes.values()).most_common(1)[0][0] if codes else -1
        return cls(usual, {name: code for name, code in codes.items() if code != usual})

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.others.get(name, self.usual)]

    def all(self) -> set[torch.dtype]:
        return {DTYPES[code] for code in (self.usual, *self.others.values()) if code >= 0}


@dataclass(frozen=True)
class _Told:
    """What one rank tells the others: its part of the plan, the dtypes of its storages, and what is wrong with them."""

    failure: str | None
    plan: tuple[int, int]  # ranks, bytes of a bucket
    pairs: dict[int, tuple[int, int, int, int]]  # by peer: pieces and elements sent, pieces and elements received
    source: _Names
    destination: _Names
    process: PeerProcess | None  # whose memory may be read


class Terms:
    """The dtypes of all ranks that take part in `plan`. Building is collective over `group`.

    `dtypes` are those of this rank's source and destination storages that its moves use, all of which can travel;
    `failure` says why they cannot be used.

    Errors: the `failure` itself on the rank that comes with it, and LayoutError on all others. LayoutError on every
    rank when a dtype has no conversion, and when the ranks come with plans that do not belong together.
    WaitTimeoutError when one does not come at all.
    """

    def __init__(
        self,
        plan: WeightPlan,
        rank: int,
        dtypes: tuple[Dtypes, Dtypes],
        bucket_bytes: int,
        group: dist.ProcessGroup | None,
        failure: Exception | None = None,
        process: PeerProcess | None = None,
    ) -> None:
        known = failure is None or isinstance(failure, HybridFlowError)
        reason = (str(failure) if known else f"{type(failure).__name__}: {failure}") if failure else None
        source, destination = map(_Names.of, dtypes)
        told = _Told(reason, (plan.ranks, bucket_bytes), _pairs(plan, rank), source, destination, process)
        self._told: Sequence[_Told] = _tell(told, rank, group)
        if failure:
            raise failure
        _check_alike(self._told)
        self._sources = set[torch.dtype]().union(*(told.source.all() for told in self._told))
        self._destinations = set[torch.dtype]().union(*(told.destination.all() for told in self._told))
        self._check_conversions(plan, rank, group)
        self.readable, self.readers = self._find_readable(rank, group)

    @property
    def itemsize(self) -> int:
        """Bytes of the widest element that any rank puts on the wire."""
        sides = (self._sources, self._destinations)
        return min(max((dtype.itemsize for dtype in side), default=1) for side in sides)

    def wire(self, move: Move) -> torch.dtype:
        """The dtype in which a piece travels; both of its ranks find the same.

        A relayed piece may have been widened on the way: it need not travel wider than what it was at its root.
        """
        ends = [self._told[move.destination].destination.dtype(region.storage) for region in move.into]
        return wire_dtype(self._root(move), max(ends, key=lambda dtype: dtype.itemsize))

    def _root(self, move: Move) -> torch.dtype:
        """The dtype of the source storage that the piece comes from in the end."""
        rank, storage = move.root or (move.source, move.origin.storage)
        return self._told[rank].source.dtype(storage)

    def _find_readable(self, rank: int, group: dist.ProcessGroup | None) -> tuple[dict[int, int], list[int]]:
        """Process ids of peers whose memory this rank reads, and the peers that read its own. A second collective, of
        all ranks or none, where several are on one host."""
        hosts = Counter(told.process.host for told in self._told if told.process)
        if not hosts or max(hosts.values()) == 1:
            return {}, []
        own, found = self._told[rank].process, dict[int, int]()
        for peer in self._told[rank].pairs:
            other = self._told[peer].process
            if own and other and own.host == other.host and other.readable():
                found[peer] = other.pid
        everyone = _tell(frozenset(found), rank, group)
        return found, [peer for peer, readable in enumerate(everyone) if rank in readable]

    def _check_conversions(self, plan: WeightPlan, rank: int, group: dist.ProcessGroup | None) -> None:
        """A second collective, of all ranks or none, only where the dtypes that were told leave a doubt."""
        relays_differ = len(self._destinations) > 1
        if not relays_differ and all(converts(a, b) for a in self._sources for b in self._destinations):
            return
        wrong = next((text for move in plan.moves if rank in (move.source, move.destination)
                      and (text := self._doubt(move))), None)  # fmt: skip
        worst = torch.tensor([rank + 1 if wrong else 0], device=wire_device(group))
        if group is not None:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        if wrong:
            raise LayoutError(wrong)
        if who := int(worst):
            raise LayoutError(f"rank {who - 1} cannot take part in moving these weights; its error says why.")

    def _doubt(self, move: Move) -> str | None:
        told, root = self._told[move.destination].destination, self._root(move)
        origin = self._told[move.source].destination.dtype(move.origin.storage) if move.hop else root
        for into in {told.dtype(region.storage) for region in move.into}:
            if not converts(origin, into):
                return (
                    f"{move.box} is {origin} on rank {move.source} and {into} on rank {move.destination}, and there is "
                    "no conversion between them. Use one dtype on both sides, or convert in the engine."
                )
            if move.hop and origin != into and not holds(origin, root):
                return (
                    f"rank {move.destination} wants {move.box} as {into} and gets it through rank {move.source}, which "
                    f"keeps it as {origin}: values would be rounded twice. Use one dtype on all destination ranks."
                )
        return None


def _pairs(plan: WeightPlan, rank: int) -> dict[int, tuple[int, int, int, int]]:
    sums: dict[int, list[int]] = {}
    for moves, at in ((plan.sends(rank), 0), (plan.receives(rank), 2)):
        for move in moves:
            counted = sums.setdefault(move.destination if at == 0 else move.source, [0, 0, 0, 0])
            counted[at] += 1
            counted[at + 1] += move.box.numel
    return {peer: (a, b, c, d) for peer, (a, b, c, d) in sums.items()}


def _tell(mine: T, rank: int, group: dist.ProcessGroup | None) -> Sequence[T]:
    if group is None:
        return [mine]
    told: list[T] = [mine] * group.size()
    try:
        dist.all_gather_object(told, mine, group=group)
    except RuntimeError as error:
        raise WaitTimeoutError(
            f"rank {rank} prepares to move weights with {group.size() - 1} other ranks, and not all of them came: "
            f"{error}. All ranks of the group have to take part; look for an earlier error on the others."
        ) from error
    return told


def _check_alike(told: Sequence[_Told]) -> None:
    """Every rank checks all pairs, so that every rank finds what is wrong."""
    for rank, other in enumerate(told):
        if other.failure is not None:
            raise LayoutError(f"rank {rank}, another rank, cannot take part in moving these weights: {other.failure}")
    ranks = told[0].plan[0]
    if ranks > len(told):
        raise LayoutError(f"the plan is for {ranks} ranks, the process group has {len(told)}.")
    for rank, other in enumerate(told):
        if other.plan != told[0].plan:
            raise LayoutError(
                f"rank {rank} has a plan of {other.plan[0]} ranks and {other.plan[1]} bytes per bucket, rank 0 one of "
                f"{told[0].plan[0]} ranks and {told[0].plan[1]} bytes. All ranks have to be given the same."
            )
        for peer in other.pairs:
            _check_pair(told, rank, peer)
            _check_pair(told, peer, rank)


def _check_pair(told: Sequence[_Told], sender: int, receiver: int) -> None:
    pieces, elements, *_ = told[sender].pairs.get(receiver, (0, 0, 0, 0))
    *_, expected, wanted = told[receiver].pairs.get(sender, (0, 0, 0, 0))
    if (pieces, elements) != (expected, wanted):
        raise LayoutError(
            f"rank {sender} would send rank {receiver} {elements} elements in {pieces} pieces, but rank {receiver} "
            f"expects {wanted} in {expected}: their plans were made from different layouts. Make the plan of every "
            "rank from the same two layouts."
        )
