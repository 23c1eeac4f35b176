"""Executes a weight plan with torch.distributed: pieces are packed per peer and round, sent, and unpacked.

A `Transfer` is built once for a plan and two storages and run whenever the weights change (every RL iteration);
building makes all decisions. Local pieces are copied directly, or not at all if source and destination share memory.

Rounds overlap: round k+1 is packed and posted while round k is in flight, so two buffers alternate. Local copies of a
tensor run beside the round that carries its other pieces. This order determines the last read of each source tensor and
the first write of each destination tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.copy_stream import CopyStream
from hybridflow.engine3d.layout import Box, Region
from hybridflow.engine3d.offloadable import Memory, TrackedMemory
from hybridflow.engine3d.plan import BUCKET_BYTES, Move, WeightPlan
from hybridflow.engine3d.routing import IN_FLIGHT
from hybridflow.engine3d.transfer.buffers import Copies, Message, Parcel, Round, messages, same_memory
from hybridflow.engine3d.transfer.handshake import Handshake, check_dtype, converts, wire_device
from hybridflow.engine3d.transfer.peer_memory import PeerMemory
from hybridflow.errors import LayoutError, WaitTimeoutError

Storage = Mapping[str, Tensor]
"""A rank's tensors by the names that its regions use."""


@dataclass
class LocalCopies(Copies):
    """The copies of one canonical tensor's pieces that stay on the rank, and the storages that they touch."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)


class LocalPlan:
    """The moves of `plan` that touch `rank` over its storages, of which `sources` and `destinations` are used.

    `failure` is a misfit, or any error of a storage that is read from a file on access. It is not raised here, because
    the other ranks must learn of it.
    Storages must have memory now; views that were made stay valid when it goes and comes."""

    def __init__(self, plan: WeightPlan, source: Storage, destination: Storage, rank: int) -> None:
        self.sources: dict[str, Tensor] = {}
        self.destinations: dict[str, Tensor] = {}
        self.failure: Exception | None = None
        self._plan, self._rank, self._given = plan, rank, (source, destination)
        self._written: Counter[str] = Counter()
        try:
            self._plan = plan.part(rank)
            self._check()
        except Exception as error:  # the others must not wait for this rank
            self.failure = error

    def dtypes(self) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
        """Dtypes of source and destination storages, by name."""
        sides = [{name: tensor.dtype for name, tensor in side.items()} for side in (self.sources, self.destinations)]
        return sides[0], sides[1]

    def gaps(self) -> set[str]:
        """Destination storages that the plan does not fill completely: padding."""
        return {name for name, tensor in self.destinations.items() if self._written[name] < tensor.numel()}

    def local(self) -> dict[str, LocalCopies]:
        """Local copies by canonical tensor, in plan order."""
        out: dict[str, LocalCopies] = {}
        for move in self._plan.local(self._rank):
            from_ = move.origin.view(self.sources[move.origin.storage], move.box)
            for region in move.into:
                into = region.view(self.destinations[region.storage], move.box)
                if not same_memory(into, from_):
                    group = out.setdefault(move.box.tensor, LocalCopies())
                    group.add(into, from_)
                    group.reads.add(move.origin.storage)
                    group.writes.add(region.storage)
        return out

    def parcels(self, moves: Sequence[Move], handshake: Handshake) -> Iterator[tuple[int, bool, Parcel]]:
        """This rank's sends and receives for `moves`: peer, whether sent, and the parcel."""
        for move in moves:
            tensor, dtype = move.box.tensor, handshake.wire(move)
            if move.source == self._rank:
                side = self.destinations if move.hop else self.sources
                views = (move.origin.view(side[move.origin.storage], move.box),)
                read = () if move.hop else (move.origin.storage,)
                yield move.destination, True, Parcel(tensor, dtype, views, read)
            else:
                views = tuple(region.view(self.destinations[region.storage], move.box) for region in move.into)
                written = tuple(region.storage for region in move.into)
                yield move.source, False, Parcel(tensor, dtype, views, written)

    def _check(self) -> None:
        for move in self._plan.moves:
            origin = self._view(move.origin, move.box, sent=not move.hop) if move.source == self._rank else None
            for region in move.into if move.destination == self._rank else ():
                into = self._view(region, move.box, sent=False)
                self._written[region.storage] += move.box.numel
                if origin is not None and not converts(origin.dtype, into.dtype):
                    raise LayoutError(
                        f"{move.box} is {origin.dtype} in the source and {into.dtype} in the destination of rank "
                        f"{self._rank}, and there is no conversion between them."
                    )

    def _view(self, region: Region, box: Box, sent: bool) -> Tensor:
        """A checked view: slicing beyond the end would silently return less."""
        side, kept = ("source", self.sources) if sent else ("destination", self.destinations)
        storage = self._given[0 if sent else 1]
        if region.storage not in storage:
            raise LayoutError(
                f"the {side} layout of rank {self._rank} names {region.storage!r}, its storage has "
                f"{sorted(storage)[:8]}."
            )
        if (tensor := kept.get(region.storage)) is None:
            check_dtype(storage[region.storage].dtype)
            tensor = kept[region.storage] = storage[region.storage].detach()
        check_resident(side, region.storage, tensor, self._rank)
        return region.view(tensor, box)


def check_resident(side: str, name: str, tensor: Tensor, rank: int) -> None:
    """Errors: LayoutError for a tensor without memory."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise LayoutError(f"{side} tensor {name!r} of rank {rank} has no memory. Acquire it before weights move.")


def execute(
    plan: WeightPlan,
    source: Storage,
    destination: Storage,
    group: dist.ProcessGroup | None = None,
    rank: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Run `plan` once. Collective over `group`; arguments and errors are those of `Transfer`."""
    Transfer(plan, source, destination, group, rank, bucket_bytes).run()


class Transfer:
    """`plan` bound to the storages of this rank; `run()` moves the current values.

    `source[name]` and `destination[name]` are this rank's tensors by the names that its regions use. `rank` is the rank
    in `group`, which executes the plan (None: a plan of one rank); the plan may be the part of this rank only. Values
    are converted to the destination's dtype, and travel in the narrower of both dtypes.

    Extra memory is two buffers of at most `bucket_bytes` together, kept between runs until `release()`. The storages
    must have memory when a Transfer is built and stay the same tensors; between runs their memory may be released. With
    `acquire` each destination tensor gets memory just before its first write (zeros in gaps of the plan), and with
    `release` each source tensor is freed just after its last read: layer by layer, so two full copies of the model
    never coexist. Source tensors that this rank does not read are left alone.

    Building is collective over `group` (ranks report their dtypes), and so is `run()`.

    Errors: LayoutError on every rank when on one of them a storage is missing or too small or has a dtype without
    a conversion, and when the ranks' plans differ. Any other error of accessing a storage (an unreadable file) is
    raised on its rank, and LayoutError on the others. WaitTimeoutError when a rank does not take part.

    Attributes: `sent_bytes` and `received_bytes` over the wire in all runs so far; `peak_bytes`, the peak of buffer
    memory in a run, and `kept_bytes`, what buffers have now: they stay for the next run."""

    def __init__(
        self,
        plan: WeightPlan,
        source: Storage,
        destination: Storage,
        group: dist.ProcessGroup | None = None,
        rank: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        release: Memory | TrackedMemory | None = None,
        acquire: Memory | TrackedMemory | None = None,
    ) -> None:
        self.plan, self.group, self.rank = plan, group, rank
        self.sent_bytes = self.received_bytes = self.peak_bytes = self.kept_bytes = 0
        self._release, self._acquire = release, acquire
        self._device = wire_device(group)
        bound = LocalPlan(plan, source, destination, rank)
        self._sources, self._destinations, self._gaps = bound.sources, bound.destinations, bound.gaps()
        tensors = (*bound.sources.values(), *bound.destinations.values())
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), self._device)
        self._memory = PeerMemory()
        process = self._memory.process() if device.type == "cpu" and group is not None else None
        handshake = Handshake(plan, rank, bound.dtypes(), bucket_bytes, group, bound.failure, process)
        self._memory.readable, self._memory.readers = handshake.readable, handshake.readers
        rounds = plan.part(rank).buckets(bucket_bytes, handshake.itemsize)
        parcels = (bound.parcels(moves, handshake) for moves in rounds)
        self._rounds = [Round(messages(parts, self._device), self._memory, group) for parts in parcels]
        local = bound.local()
        self._copies = list(local.values())
        self._steps = make_steps(rounds, [one.messages for one in self._rounds], local)
        self._stream = CopyStream(device, group)
        self._arenas: list[Tensor] = []

    @property
    def buffer_bytes(self) -> int:
        """Extra memory that a run uses on this rank."""
        return sum(self._arena_sizes())

    @property
    def messages(self) -> int:
        """Messages that a run sends and receives."""
        return sum(len(one.messages) for one in self._rounds)

    @property
    def memory_steps(self) -> list[tuple[Sequence[str], Sequence[str]]]:
        """The destinations that get memory and the sources that lose it, in order."""
        return [(step.acquire, step.release) for step in self._steps]

    @property
    def received(self) -> Counter[str]:
        """Bytes received from other ranks in all runs so far, by canonical tensor."""
        out: Counter[str] = Counter()
        for one in self._rounds:
            for parcel in (parcel for message in one.messages if not message.sent for parcel in message.parcels):
                out[parcel.tensor] += parcel.nbytes * one.runs
        return +out

    @torch.no_grad()
    def run(self, timeout: float | None = None) -> None:
        """Move the weights; they have arrived when this returns, on CUDA too.

        `timeout` in seconds bounds the wait for each round (None: the process group's own). Errors: WaitTimeoutError
        when a peer is late or gone; the process group is unusable afterwards. LayoutError when a tensor has no memory.
        """
        self.prepare()
        self._memory.advance()
        try:
            self._run(timeout)
        finally:
            self._stream.join()  # what was queued before a failure still runs
            self._memory.advance()  # peers that still read after this rank's failure detect it

    def prepare(self) -> None:
        """What `run` does before ranks wait for each other: takes its buffers and the first tensors' memory. Errors:
        LayoutError, or out of memory."""
        self._check_memory("source", self._sources)
        if self._acquire is None:
            self._check_memory("destination", self._destinations)
        self._bind()
        self._give_memory(next((step.acquire for step in self._steps if step.acquire), ()))

    def _run(self, timeout: float | None) -> None:
        leaving: deque[tuple[torch.cuda.Event | None, list[str]]] = deque()
        self._stream.follow()
        for step in self._steps:
            self._give_memory(step.acquire)
            with self._stream.queued():
                self._do(step, timeout)
            if step.release and self._release:
                leaving.append((self._stream.mark(), step.release))
                if len(leaving) > self._stream.behind:
                    self._take_memory(*leaving.popleft(), timeout)
        while leaving:
            self._take_memory(*leaving.popleft(), timeout)
        self._stream.reached(self._stream.mark(), timeout)

    def release(self) -> None:
        """Give the buffers back; the next run allocates them again."""
        self._arenas, self.kept_bytes = [], 0
        for one in self._rounds:
            one.unbind()

    def _do(self, step: Step, timeout: float | None) -> None:
        if step.kind == "copy":
            self._copies[step.index].run()
            return
        one = self._rounds[step.index]
        try:
            one.post() if step.kind == "post" else one.finish(timeout)
        except (RuntimeError, OSError) as error:
            raise WaitTimeoutError(
                f"ranks {one.late_peers()} did not take part in moving weights with rank {self.rank}: {error}. All "
                "ranks of the group have to run the transfer together; look for an earlier error on the others."
            ) from error
        if step.kind == "finish":
            self.sent_bytes += one.nbytes(sent=True)
            self.received_bytes += one.nbytes(sent=False)

    def _bind(self) -> None:
        if not self._arenas:
            self._arenas = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in self._arena_sizes()]
            for i, one in enumerate(self._rounds):
                one.bind(self._arenas[i % IN_FLIGHT])
        self.kept_bytes = sum(arena.nbytes for arena in self._arenas)
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes)

    def _arena_sizes(self) -> list[int]:
        return [
            max((one.staged_bytes for one in self._rounds[first::IN_FLIGHT]), default=0) for first in range(IN_FLIGHT)
        ]

    def _give_memory(self, names: Sequence[str]) -> None:
        if self._acquire and names:
            fresh = self._acquire.acquire(names)
            for name in fresh & self._gaps:
                self._destinations[name].zero_()
            self._check_memory("destination", {name: self._destinations[name] for name in names})
            self._stream.follow()  # the memory may have been in use on the caller's stream

    def _take_memory(self, mark: torch.cuda.Event | None, names: list[str], timeout: float | None) -> None:
        assert self._release
        self._stream.reached(mark, timeout)
        self._release.release(names)

    def _check_memory(self, side: str, tensors: Storage) -> None:
        for name, tensor in tensors.items():
            check_resident(side, name, tensor, self.rank)


def received_by_tensor(transfers: Iterable[Transfer]) -> Counter[str]:
    """Bytes that all runs of `transfers` received from other ranks, by canonical tensor."""
    return sum((transfer.received for transfer in transfers), Counter[str]())


@dataclass
class Step:
    """One action of a run: "post" or "finish" round `index`, or "copy" tensor number `index` locally.

    `reads` are its source storages and `writes` its destination storages. `acquire` are the destination storages first
    written here, `release` the source storages last read here."""

    kind: str
    index: int
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    acquire: Sequence[str] = ()
    release: list[str] = field(default_factory=list)


def make_steps(
    rounds: Sequence[Sequence[Move]], messages: Sequence[Iterable[Message]], local: Mapping[str, LocalCopies]
) -> list[Step]:
    """All steps of a run for the rounds (their moves and messages) and the local copies by canonical tensor."""
    first: dict[str, int] = {}
    for at, moves in enumerate(rounds):
        for move in moves:
            first.setdefault(move.box.tensor, at)
    copies, at = defaultdict[int, list[Step]](list), 0
    for i, (tensor, group) in enumerate(local.items()):
        at = max(at, first.get(tensor, 0))
        copies[at].append(Step("copy", i, group.reads, group.writes))
    posted = [_message_steps(i, parts) for i, parts in enumerate(messages)]
    out = [post for post, _ in posted[:1]] or copies[0]
    for i, (_, finish) in enumerate(posted):
        out += [*(post for post, _ in posted[i + 1 : i + 2]), *copies[i], finish]
    last, seen = dict[str, Step](), set[str]()
    for step in out:
        step.acquire = sorted(step.writes - seen)
        seen |= step.writes
        last |= dict.fromkeys(step.reads, step)
    for name, step in last.items():
        step.release.append(name)
    return out


def _message_steps(index: int, messages: Iterable[Message]) -> tuple[Step, Step]:
    """Posting and finishing a round. A message without a buffer uses the storage while it is under way."""
    post, finish = Step("post", index), Step("finish", index)
    for message in messages:
        names = {name for parcel in message.parcels for name in parcel.storages}
        if message.sent:
            (finish if message.flat is not None else post).reads.update(names)
        else:
            (post if message.flat is not None else finish).writes.update(names)
    return post, finish
