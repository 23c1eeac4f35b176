"""Handshake: exchanges the ranks' reports before weights move, and derives the transfer dtypes.

A rank knows its own storages, and perhaps only its own part of the plan. One collective reports storages that do not
fit, the pieces that both ends of every pair expect, and the dtype of every storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from hybridflow.engine3d.plan import Move, WeightPlan
from hybridflow.engine3d.transfer.peer_memory import PeerProcess
from hybridflow.errors import HybridFlowError, LayoutError, WaitTimeoutError

Dtypes = Mapping[str, torch.dtype]
T = TypeVar("T")
Key = TypeVar("Key")

# widest first
DTYPES = (
    *(torch.float64, torch.int64, torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool),
)
CONVERTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # into each other; the rest need equal dtypes


def check_dtype(dtype: torch.dtype) -> None:
    """Errors: LayoutError for a dtype that cannot travel."""
    if dtype not in DTYPES:
        raise LayoutError(f"weights of dtype {dtype} cannot be moved. Known: {', '.join(map(str, DTYPES))}.")


def converts(source: torch.dtype, destination: torch.dtype) -> bool:
    """Whether values are converted on the way. Quantised and integer values mean nothing in another dtype."""
    return source == destination or (source in CONVERTED and destination in CONVERTED)


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `dtype` can represent every value of `other`."""
    return dtype == other or (converts(dtype, other) and dtype.itemsize > other.itemsize)


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which `group` sends and receives."""
    if group is not None and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_complete(group: dist.ProcessGroup | None) -> None:
    """Check that NCCL has aborted no operation of `group`, after the host has waited for the device.

    An NCCL operation whose peer does not come is aborted by the watchdog after the group's timeout. The host's wait
    then ends as if the operation were done, and what it wrote is undefined. Errors: WaitTimeoutError."""
    if group is None or dist.get_backend(group) != "nccl":
        return
    state = group._get_backend(torch.device("cuda")).get_error()  # pyright: ignore[reportAttributeAccessIssue]
    if state.name != "SUCCESS":
        raise WaitTimeoutError(
            f"NCCL aborted an operation of {group.group_desc or group.group_name!r} on rank {group.rank()} of "
            f"{group.size()} ({state.name.lower()}): another rank did not take part within the group's timeout. This "
            "group cannot be used any more; look for an earlier error on the other ranks."
        )


@dataclass(frozen=True)
class _Report:
    """One rank's report: its part of the plan, the dtypes of its storages, and their errors."""

    failure: str | None
    plan: tuple[int, int]  # ranks, bytes of a bucket
    pairs: Mapping[tuple[int, int], tuple[int, int]]  # by sender and receiver: pieces and elements
    source: Dtypes
    destination: Dtypes
    process: PeerProcess | None  # whose memory may be read


class Handshake:
    """The dtypes of all ranks that take part in `plan`. Building is collective over `group`.

    `dtypes` are those of this rank's source and destination storages that its moves use, all of which can travel;
    `failure` says why they cannot be used. `readable` maps ranks to the process ids whose memory this rank reads,
    `readers` are the ranks that read its own. Errors: the `failure` itself on its rank, and LayoutError on all others.
    LayoutError on every rank when a dtype has no conversion, and when the ranks' plans differ. WaitTimeoutError when a
    rank does not take part."""

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
        report = _Report(reason, (plan.ranks, bucket_bytes), _pairs(plan, rank), *dtypes, process)
        self._reports: Sequence[_Report] = _gather(report, group)
        if failure:
            raise failure
        _check_alike(self._reports)
        self._sources = {dtype for report in self._reports for dtype in report.source.values()}
        self._destinations = {dtype for report in self._reports for dtype in report.destination.values()}
        self._check_conversions(plan, rank, group)
        self.readable, self.readers = self._find_readable(rank, group)

    @property
    def itemsize(self) -> int:
        """Bytes of the widest element that any rank puts on the wire."""
        sides = (self._sources, self._destinations)
        return min(max((dtype.itemsize for dtype in side), default=1) for side in sides)

    def wire(self, move: Move) -> torch.dtype:
        """A piece's transfer dtype, equal on both ranks: the narrower one, or the destination's if both are equally
        wide. A relayed piece travels no wider than at its root."""
        source = self._root(move)
        ends = [self._reports[move.destination].destination[region.storage] for region in move.into]
        destination = max(ends, key=lambda dtype: dtype.itemsize)
        return source if source.itemsize < destination.itemsize else destination

    def _root(self, move: Move) -> torch.dtype:
        """The dtype of the source storage at the piece's root."""
        rank, storage = move.root or (move.source, move.origin.storage)
        return self._reports[rank].source[storage]

    def _find_readable(self, rank: int, group: dist.ProcessGroup | None) -> tuple[dict[int, int], list[int]]:
        """A second collective, of all ranks or none, where several are on one host."""
        hosts = Counter(report.process.host for report in self._reports if report.process)
        if not hosts or max(hosts.values()) == 1:
            return {}, []
        own, found = self._reports[rank].process, dict[int, int]()
        for peer in {end for pair in self._reports[rank].pairs for end in pair} - {rank}:
            other = self._reports[peer].process
            if own and other and own.host == other.host and other.readable():
                found[peer] = other.pid
        everyone = _gather(frozenset(found), group)
        return found, [peer for peer, readable in enumerate(everyone) if rank in readable]

    def _check_conversions(self, plan: WeightPlan, rank: int, group: dist.ProcessGroup | None) -> None:
        """A second collective, of all ranks or none, only where the reported dtypes leave a doubt."""
        relays_differ = len(self._destinations) > 1
        if not relays_differ and all(converts(a, b) for a in self._sources for b in self._destinations):
            return
        doubts = (self._doubt(move) for move in plan.moves if rank in (move.source, move.destination))
        wrong = next((text for text in doubts if text), None)
        failed = [peer for peer, doubt in enumerate(_gather(wrong, group)) if doubt]
        if wrong:
            raise LayoutError(wrong)
        if failed:
            raise LayoutError(f"rank {failed[-1]} cannot take part in moving these weights; its error says why.")

    def _doubt(self, move: Move) -> str | None:
        reported, root = self._reports[move.destination].destination, self._root(move)
        origin = self._reports[move.source].destination[move.origin.storage] if move.hop else root
        for into in {reported[region.storage] for region in move.into}:
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


def _pairs(plan: WeightPlan, rank: int) -> dict[tuple[int, int], tuple[int, int]]:
    """By sender and receiver, of which one is `rank`: pieces and elements."""
    pieces, elements = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for move in plan.moves:
        ends = (move.source, move.destination)
        if rank in ends and not move.local:
            pieces[ends] += 1
            elements[ends] += move.box.numel
    return {ends: (count, elements[ends]) for ends, count in pieces.items()}


def _gather(mine: T, group: dist.ProcessGroup | None) -> Sequence[T]:
    """The values of all ranks, in rank order. Errors: WaitTimeoutError."""
    if group is None:
        return [mine]
    everyone: list[T] = [mine] * group.size()
    try:
        dist.all_gather_object(everyone, mine, group=group)
    except Exception as error:  # an aborted NCCL operation gives anything to unpickle
        check_complete(group)
        if not isinstance(error, RuntimeError):
            raise
        raise WaitTimeoutError(
            f"rank {group.rank()} prepares to move weights with {group.size() - 1} other ranks, and not all of them "
            f"came: {error}. All ranks of the group have to take part; look for an earlier error on the others."
        ) from error
    check_complete(group)
    return everyone


def _check_alike(reports: Sequence[_Report]) -> None:
    """Every rank checks all pairs, so all find the same error."""
    for rank, other in enumerate(reports):
        if other.failure is not None:
            raise LayoutError(f"rank {rank}, another rank, cannot take part in moving these weights: {other.failure}")
    ranks = reports[0].plan[0]
    if ranks > len(reports):
        raise LayoutError(f"the plan is for {ranks} ranks, the process group has {len(reports)}.")
    for rank, other in enumerate(reports):
        if other.plan != reports[0].plan:
            raise LayoutError(
                f"rank {rank} has a plan of {other.plan[0]} ranks and {other.plan[1]} bytes per bucket, rank 0 one of "
                f"{ranks} ranks and {reports[0].plan[1]} bytes. All ranks have to be given the same."
            )
        for sender, receiver in other.pairs:
            (pieces, elements), (expected, wanted) = (
                reports[end].pairs.get((sender, receiver), (0, 0)) for end in (sender, receiver)
            )
            if (pieces, elements) != (expected, wanted):
                raise LayoutError(
                    f"rank {sender} would send rank {receiver} {elements} elements in {pieces} pieces, but rank "
                    f"{receiver} expects {wanted} in {expected}: their plans were made from different layouts. Make "
                    "the plan of every rank from the same two layouts."
                )
