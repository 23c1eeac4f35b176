"""Executes a weight plan with torch.distributed: pieces are packed per peer and round, sent, and unpacked.

A `Transfer` is built once for a plan and two storages and run as often as the weights change (every RL iteration):
everything that can be decided is decided when it is built. Local pieces are copied directly, or not at all where
source and destination are the same memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.offloadable import Memory
from hybridflow.engine3d.plan.chunks import IN_FLIGHT
from hybridflow.engine3d.plan.order import Step, make_steps
from hybridflow.engine3d.plan.plan import BUCKET_BYTES, WeightPlan
from hybridflow.engine3d.transfer.buffers import Round, messages
from hybridflow.engine3d.transfer.copies import Lane
from hybridflow.engine3d.transfer.handshake import Terms
from hybridflow.engine3d.transfer.local_plan import Binding, Storage
from hybridflow.engine3d.transfer.peer_memory import Epoch, PeerMemory
from hybridflow.engine3d.transfer.wire import wire_device
from hybridflow.errors import LayoutError, WaitTimeoutError


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

    `source[name]` and `destination[name]` are this rank's tensors by the names that its regions use. `rank` is the
    rank in `group`, which executes the plan (None: a plan of one rank); the plan may be the part of this rank only.
    Values are converted to the destination's dtype, and travel in the narrower of both dtypes.

    Extra memory is two buffers of at most `bucket_bytes` together, kept between runs until `release()`. The storages
    must have memory when a Transfer is built, and stay the same tensors; their memory may go and come between runs.
    With `acquire` each destination tensor gets memory right before its first write (zeros where the plan leaves gaps
    in it), and with `release` that of each source tensor is given back right after its last read: layer by layer, so
    that both copies of the model never stand side by side. Source tensors that this rank does not read are left alone.

    Building is collective over `group` (ranks tell each other their dtypes), and so is `run()`.

    Errors: LayoutError on every rank when on one of them a storage is missing or too small or has a dtype without
    a conversion, and when the ranks' plans differ. Any other error that looking at a storage raises on one rank (a
    file that cannot be read) is raised there, and LayoutError on the others. WaitTimeoutError when a rank does not
    come.

    Attributes: `sent_bytes` and `received_bytes`, what went over the wire in all runs so far; `peak_bytes`, the most
    buffer memory in use in a run.
    """

    def __init__(
        self,
        plan: WeightPlan,
        source: Storage,
        destination: Storage,
        group: dist.ProcessGroup | None = None,
        rank: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        release: Memory | None = None,
        acquire: Memory | None = None,
    ) -> None:
        self.plan, self.group, self.rank = plan, group, rank
        self.sent_bytes = self.received_bytes = self.peak_bytes = 0
        self._release, self._acquire = release, acquire
        self._device = wire_device(group)
        bound = Binding(plan, source, destination, rank)
        self._sources, self._destinations, self._gaps = bound.sources, bound.destinations, bound.gaps()
        tensors = (*bound.sources.values(), *bound.destinations.values())
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), self._device)
        epoch = Epoch()
        process = epoch.process() if device.type == "cpu" and group is not None else None
        terms = Terms(plan, rank, bound.dtypes(), bucket_bytes, group, bound.failure, process)
        self._memory = PeerMemory(epoch, terms.readable, terms.readers)
        rounds = plan.part(rank).buckets(bucket_bytes, terms.itemsize)
        self._rounds = [Round(messages(bound.parcels(moves, terms), self._device)) for moves in rounds]
        local = bound.local()
        self._copies = [group.copies for group in local.values()]
        self._steps = make_steps(rounds, [one.messages for one in self._rounds], local)
        self._lane = Lane(device)
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
    def received(self) -> dict[str, int]:
        """Bytes received from other ranks in all runs so far, by canonical tensor."""
        out: dict[str, int] = {}
        for one in self._rounds:
            for parcel in (parcel for message in one.messages if not message.sent for parcel in message.parcels):
                out[parcel.tensor] = out.get(parcel.tensor, 0) + parcel.nbytes * one.runs
        return {tensor: size for tensor, size in out.items() if size}

    @torch.no_grad()
    def run(self, timeout: float | None = None) -> None:
        """Move the weights. `timeout` in seconds bounds the wait for each round (None: the process group's own).

        Errors: WaitTimeoutError when a peer does not take part in time or is gone; the process group cannot be used
        any more then. LayoutError when a tensor has no memory.
        """
        self._check_memory("source", self._sources)
        if self._acquire is None:
            self._check_memory("destination", self._destinations)
        self._bind()
        self._memory.epoch.advance()
        try:
            self._run(timeout)
        finally:
            self._memory.epoch.advance()  # who still reads from here, because this rank has failed, learns of it

    def _run(self, timeout: float | None) -> None:
        leaving: deque[tuple[torch.cuda.Event | None, list[str]]] = deque()
        self._lane.follow()
        for step in self._steps:
            self._give_memory(step.acquire)
            with self._lane.queued():
                self._do(step, timeout)
            if step.release and self._release:
                leaving.append((self._lane.mark(), step.release))
                if len(leaving) > self._lane.behind:
                    self._take_memory(*leaving.popleft(), timeout)
        while leaving:
            self._take_memory(*leaving.popleft(), timeout)
        if timeout is not None:
            self._lane.reached(self._lane.mark(), timeout)
        self._lane.join()

    def release(self) -> None:
        """Give the buffers back; the next run allocates them again."""
        self._arenas = []
        for one in self._rounds:
            one.unbind()

    def _do(self, step: Step, timeout: float | None) -> None:
        if step.kind == "copy":
            self._copies[step.index].run()
            return
        one = self._rounds[step.index]
        with self._explained(one):
            one.post() if step.kind == "post" else one.finish(timeout)
        if step.kind == "finish":
            self.sent_bytes += one.nbytes(sent=True)
            self.received_bytes += one.nbytes(sent=False)

    @contextmanager
    def _explained(self, one: Round) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise WaitTimeoutError(
                f"ranks {one.late_peers()} did not take part in moving weights with rank {self.rank}: {error}. All "
                "ranks of the group have to run the transfer together; look for an earlier error on the others."
            ) from error

    def _bind(self) -> None:
        if not self._arenas:
            self._arenas = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in self._arena_sizes()]
            for i, one in enumerate(self._rounds):
                one.bind(self._arenas[i % IN_FLIGHT], self.group, self._memory)
        self.peak_bytes = max(self.peak_bytes, sum(arena.nbytes for arena in self._arenas))

    def _arena_sizes(self) -> list[int]:
        return [
            max((one.staged_bytes for one in self._rounds[first::IN_FLIGHT]), default=0) for first in range(IN_FLIGHT)
        ]

    def _give_memory(self, names: list[str]) -> None:
        if self._acquire and names:
            fresh = self._acquire.acquire(names)
            for name in fresh & self._gaps:
                self._destinations[name].zero_()
            self._check_memory("destination", {name: self._destinations[name] for name in names})
            self._lane.follow()  # the memory may have been in use on the caller's stream

    def _take_memory(self, mark: torch.cuda.Event | None, names: list[str], timeout: float | None) -> None:
        assert self._release
        self._lane.reached(mark, timeout)
        self._release.release(names)

    def _check_memory(self, side: str, tensors: Storage) -> None:
        for name, tensor in tensors.items():
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                raise LayoutError(
                    f"{side} tensor {name!r} of rank {self.rank} has no memory. Acquire it, or give the transfer the "
                    "residency that does."
                )


def received_by_tensor(transfers: Iterable[Transfer]) -> Counter[str]:
    """Bytes that all runs of `transfers` took from the wire, by canonical tensor."""
    total: Counter[str] = Counter()
    for transfer in transfers:
        total.update(transfer.received)
    return total
