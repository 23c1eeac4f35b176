"""Weight channels: transfer weights from the ranks of one group to those of another.

    driver: WeightChannels --TransferTask(channel, payload)--> every host of it, in the order of all calls
    host:   WeightChannel: plan -> agree -> resident, storages -> agree -> move -> on_weights_loaded -> agree

A channel joins the host processes of two groups, which may overlap and may belong to pools with different torch worlds.
Only its members form its process groups, in the session's store. Plans and transfers are built on first use and kept.

The first agreement comes before `resident`, which may be a collective of a group: a rank that cannot take part would
not join it. After the second, when all ranks have their storages, the transfer starts writing. The receiving group's
weights then count as incomplete until the third agreement that everything has arrived, so no call computes with half of
an update.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
import ray.exceptions
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.cluster.backend import HostProcess, RankGroup, node_numbers
from hybridflow.cluster.future import Failure, Future, Status
from hybridflow.cluster.interactive import uninterrupted
from hybridflow.cluster.iterations import Iterations
from hybridflow.cluster.member import Member
from hybridflow.cluster.row_refs import CallOrigin, IssuedCall, RankOutput
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.overlapped_move import Final, OverlappedMove, beside
from hybridflow.engine3d.plan import WeightPlan, plan
from hybridflow.engines.agreement import agree_on
from hybridflow.engines.process_groups import ProcessGroups
from hybridflow.errors import ConfigError, LayoutError, WaitTimeoutError

WEIGHTS = "weights"
"""The payload of `sync_weights`; any other is a kind of optimizer state."""

Process = tuple[str, int]
"""A host process: its pool's name and its rank there."""


@dataclass(frozen=True)
class ChannelSpec:
    """Channel rank i is the process `processes[i]` on node `nodes[i]`.

    Rank i of the group that sends is channel rank `senders[i]`, rank i of the one that receives `receivers[i]`. `at` is
    the driver's time when none of the processes was known to be lost.
    """

    name: str
    processes: tuple[Process, ...]
    nodes: tuple[int, ...]
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    at: float

    def lost(self, losses: Mapping[Process, float]) -> bool:
        """Whether one of these losses, with their times, is of its processes, and not of those before them."""
        return any(self.at <= losses.get(process, -1.0) for process in self.processes)


@dataclass(frozen=True)
class Setup:
    """Sent with the first use of a payload: its layouts on both sides; with `by_parts` the parts of an optimizer step
    travel one after the other.

    The first use of a channel also carries its hosts' answers to `open`.
    """

    source: Layout
    destination: Layout
    by_parts: bool = False
    opened: tuple[RankOutput, ...] = ()


@dataclass(frozen=True)
class TransferTask:
    """Move `payload` (`WEIGHTS` or a kind of optimizer state) over `channel`, from the ranks with the key `source` to
    those of `destination`. `required`: after a failure, calls must not use the receiver's outdated weights."""

    seq: int
    method: str
    channel: str
    source: str
    destination: str
    payload: str
    required: bool = False
    step: int | None = None

    @property
    def meeting(self) -> str:
        """The key in the session's store that counts the senders that are there."""
        return f"{self.channel}/{self.seq}"


@dataclass(frozen=True)
class HostTransfer:
    """A transfer in one process, with its ranks on both sides; `failed` makes a failure of an error. Weights of a
    sender with `parts` travel as these become final."""

    task: TransferTask
    setup: Setup | None
    sender: Member | None
    receiver: Member | None
    failed: Callable[[Exception], Failure]
    parts: Iterator[Final] | None = None

    @property
    def sides(self) -> list[Member]:
        return [side for side in (self.sender, self.receiver) if side is not None]

    @property
    def marks(self) -> list[Any]:
        """By which its sides say what has been written into their fixed weights."""
        return [side.worker.fixed_weights()[1] for side in self.sides]


@dataclass
class WeightChannel:
    """One process's end of a channel. `timeout` bounds a collective, `patience` the wait for busy peers, in seconds.

    An end that has lost a peer is closed: the others, which may wait for this one, lose it then and do not wait for
    their deadlines. Later transfers fail; the driver opens another channel.
    """

    spec: ChannelSpec
    process: Process
    store: dist.Store
    device: torch.device
    timeout: float
    patience: float
    span: tuple[float, float] = (0.0, 0.0)  # of the latest transfer
    _plans: dict[str, WeightPlan] = field(default_factory=dict)
    _by_parts: set[str] = field(default_factory=set)
    _fixed = False  # the last part of moves is what both sides keep; `_marks`: of the sides that have it
    _marks: Any = None
    _moves: dict[str, OverlappedMove] = field(default_factory=dict)
    _sent: dict[int, dict[str, float] | Failure] = field(default_factory=dict)  # by `send_beside`
    _broken: Failure | None = None
    _waits_since: float | None = None  # for its peers, in the present transfer

    def __post_init__(self) -> None:
        self.rank, self.size = self.spec.processes.index(self.process), len(self.spec.processes)
        # torch finds this process by the rank in its own world; the other numbers only need to be distinct
        own, size = dist.get_rank(), dist.get_world_size()
        ranks = [own if i == self.rank else size + i for i in range(self.size)]
        self._groups = ProcessGroups(self.store, self.spec.name, ranks, self.rank, self.device, self.timeout)

    def run(self, transfer: HostTransfer) -> dict[str, float] | Failure:
        """Collective over the channel: `bytes` over the wire, `seconds` and `pause` of the slowest, or a Failure."""
        task = transfer.task
        if (sent := self._sent.pop(task.seq, None)) is not None:
            return sent
        start, self._waits_since = time.time(), None
        if transfer.sender is not None:  # even if it fails: the others must not wait for it
            self.store.add(task.meeting, 1)
            self._waits_since = time.monotonic()
        if self._broken is not None:
            return self._broken
        result = self._run(transfer)
        self.span = start, time.time()
        if isinstance(result, Failure) and isinstance(cause := result.error.cause, WaitTimeoutError):
            for error in filter(None, (result.error, cause, cause.__cause__, cause.__context__)):
                error.__traceback__ = None  # its frames have the process group, which would stay open
            self._broken = result
            self.close()
        return result

    def send_beside(
        self, task: TransferTask, sender: Member, failed: Callable[[Exception], Failure], steps: Iterable[int]
    ) -> None:
        """Send each part of the weights while the optimizer `steps` further ones; `run` then returns what came of it.
        Errors: those of `steps`; the parts that they leave out travel as they are; ConfigError the second time."""
        if task.seq in self._sent:
            raise ConfigError(
                "an update stepped again after its weights had left for hf.sync_weights, which would not have the last "
                "step. With overlap=True make one update in a call."
            )

        def send(parts: Iterator[Final]) -> None:
            try:
                self._sent[task.seq] = self.run(HostTransfer(task, None, sender, None, failed, parts))
            except Exception as error:  # of the move, not of the step
                self._sent[task.seq] = failed(error)

        beside(steps, send, self.device)

    def _run(self, transfer: HostTransfer) -> dict[str, float] | Failure:
        with ExitStack() as resident:
            try:
                for prepare in (self._plan, partial(_storages, resident)):
                    try:
                        mine, storages = None, prepare(transfer)
                    except Exception as error:  # the other ranks must learn of any error
                        mine, storages = transfer.failed(error), None
                    if (failure := self._agree(mine)) is not None:
                        return failure
                assert storages is not None
                self._bind(transfer, *storages)
                kept = transfer.task.payload == WEIGHTS and self._keeps(transfer)
            except Exception as error:
                return transfer.failed(error)
            result = self._move(transfer, kept)
            if self.rank == 0:
                self.store.delete_key(transfer.task.meeting)
            return result

    def _plan(self, transfer: HostTransfer) -> None:
        """Plan a new payload even if this rank cannot take part: its setup is sent once. A rank that only receives has
        work of its own until all senders are here. Errors: those of a rank that cannot take part, LayoutError when the
        two sides do not match."""
        task, sender, receiver, payload = transfer.task, transfer.sender, transfer.receiver, transfer.task.payload
        if (setup := transfer.setup) is not None:
            source = setup.source.placed(self.spec.senders, self.size)
            destination = setup.destination.placed(self.spec.receivers, self.size)
            self._plans[payload] = plan(source, destination, self.spec.nodes.__getitem__, rank=self.rank, exact=True)
            self._moves.pop(payload, None)
            self._marks = None
            self._by_parts |= {payload} if setup.by_parts else set()
        if payload not in self._plans:
            raise LayoutError(
                f"how {payload} travel was not planned on this rank: the first transfer failed. Repeat it."
            )
        unfit = [side.failure for side in transfer.sides]
        if failure := next(filter(None, [*unfit, sender and sender.incomplete]), None):
            raise failure.error
        if receiver is None or payload != WEIGHTS or {*self.spec.senders} & {*self.spec.receivers}:
            return
        end, senders = time.monotonic() + self.patience, len({*self.spec.senders})

        def waits() -> bool:
            with suppress(RuntimeError):  # without the store, the agreement fails next
                return time.monotonic() < end and self.store.add(task.meeting, 0) < senders
            return False

        if receiver.incomplete is None and receiver.worker.while_waiting(waits):
            self._waits_since = time.monotonic()

    def _agree(self, mine: Failure | None) -> Failure | None:
        """None when no rank of the channel has failed, else the first failure. Collective."""
        return mine if self.size == 1 else agree_on(self._control(), mine)[0]

    def _control(self) -> dist.ProcessGroup:
        return self._groups.new("control", range(self.size), "gloo", self.patience)

    def _bind(self, transfer: HostTransfer, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> None:
        """Bind a payload to the storages, once. Collective. Errors: LayoutError on all ranks, before a byte moves."""
        if (payload := transfer.task.payload) in self._moves:
            return
        sender, receiver, planned = transfer.sender, transfer.receiver, self._plans[payload]
        parts = [frozenset(move.box.tensor for move in planned.moves)]
        if payload in self._by_parts:
            parts = self._said(self.spec.senders[0], lambda: sender and sender.worker.engine.step_groups())
        if payload == WEIGHTS:
            sides = (self.spec.senders[0], sender), (self.spec.receivers[0], receiver)
            sets = [self._said(rank, lambda side=side: side and side.worker.fixed_weights()[0]) for rank, side in sides]
            self._fixed = bool(fixed := frozenset.intersection(*sets))
            parts = [*(part - fixed for part in parts), *([fixed] if fixed else [])]
        group = self._groups.everyone() if self.size > 1 else None
        self._moves[payload] = OverlappedMove(planned, parts, source, destination, group, self.rank)

    def _said(self, rank: int, value: Callable[[], Any]) -> Any:
        """What `value` is on this rank of the channel, on all. Collective. Errors: LayoutError on all for its own."""
        said: list[Any] = [None]
        try:
            said = [value() if self.rank == rank else None]
        except Exception as error:  # the others wait below
            said = [LayoutError(f"{type(error).__name__}: {error}")]
        if self.size > 1:
            dist.broadcast_object_list(said, group=self._control(), group_src=rank)
        if isinstance(said[0], Exception):
            raise said[0]
        return said[0]

    def _keeps(self, transfer: HostTransfer) -> bool:
        """Whether every receiver has the fixed weights from a transfer of this channel, after which nothing has written
        into them on either side. Collective."""
        if not self._fixed:
            return False
        receiver = transfer.receiver
        own = (receiver is None or receiver.incomplete is None) and self._marks == transfer.marks
        return own if self.size == 1 else agree_on(self._control(), None, float(own))[1] == 1.0

    def _move(self, transfer: HostTransfer, kept: bool) -> dict[str, float] | Failure:
        """Move, without fixed weights that are `kept`, and agree that everything has arrived, which completes the
        receiver's weights."""
        payload, receiver, parts, failed = transfer.task.payload, transfer.receiver, transfer.parts, transfer.failed
        mine, start, self.received = None, time.monotonic(), 0
        try:
            moves = self._moves[payload]
            before = moves.received_bytes
            moves.move(one for one in moves.all(parts or ()) if not (kept and one.part == len(moves.transfers) - 1))
            self.received = moves.received_bytes - before
            if parts is not None and transfer.sender is not None:
                transfer.sender.worker.weights_storage()  # raises if the step has broken the model
        except Exception as error:
            mine = failed(error)
        total = {}
        try:
            if payload == WEIGHTS and (mine := self._agree(mine)) is None and receiver is not None:
                receiver.worker.on_weights_loaded()  # averages and versions count what has arrived everywhere
        except Exception as error:
            mine = mine or failed(error)
        try:
            if (failure := self._agree(mine)) is None:
                total = self._total(self.received, time.monotonic() - start)
        except Exception as error:
            failure = mine or failed(error)
        if receiver is not None:
            receiver.incomplete = None if failure is None else incomplete(failure)
        if payload == WEIGHTS and self._fixed:
            self._marks = transfer.marks if failure is None else None
        return total if failure is None else failure

    def _total(self, received: int, seconds: float) -> dict[str, float]:
        """The bytes of all ranks, the seconds of the slowest, the longest pause. Collective."""
        pause = time.monotonic() - (self._waits_since or time.monotonic())
        row = torch.tensor([received, seconds, pause], dtype=torch.float64)
        rows = [row.clone() for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(rows, row, group=self._control())
        _, longest, pause = torch.stack(rows).amax(0).tolist()
        return {"bytes": float(sum(one[0] for one in rows)), "seconds": longest, "pause": pause}

    def abort(self) -> None:
        """A process of the channel is gone: this one does not wait for the others."""
        self._groups.abort()

    def close(self) -> None:
        """Free buffers and process groups. Call on every member."""
        self._moves.clear()
        self._groups.close()


def _storages(resident: ExitStack, transfer: HostTransfer) -> list[Mapping[str, Tensor]]:
    """This process's storages of both sides, at work until the stack closes."""
    found, payload = list[Mapping[str, Tensor]](), transfer.task.payload
    for side in transfer.sides:
        resident.enter_context(side.worker.resident())
    for side in (transfer.sender, transfer.receiver):
        if side is None:
            found.append({})
        elif payload == WEIGHTS:
            found.append(side.worker.weights_storage())
        else:
            found.append(side.worker.optimizing_engine().optimizer_storage(side is transfer.receiver)[payload])
    return found


def incomplete(failure: Failure) -> Failure:
    """The failure of every later call on the receiving group; the driver raises it once."""
    why, error = failure.error, copy.copy(failure.error)
    error.args = (
        f"these weights are incomplete: the last {why.method or 'transfer'} into them failed on the way "
        f"({str(why.args[0])[:400]}). Repeat it until it succeeds, or place the group again.",
    )
    return Failure(error)


@dataclass
class _OpenChannel:
    """The driver's record of a channel: for each channel rank the process and a (role, rank) for messages; `known` are
    the payloads whose setup the hosts have."""

    spec: ChannelSpec
    hosts: list[tuple[HostProcess, tuple[str, int]]]
    known: set[str] = field(default_factory=set)
    last: IssuedCall | None = None

    def failed(self) -> bool:
        """Whether the latest transfer has failed, after which the ranks may be out of step."""
        refs = [] if self.last is None else [status.ref for status in self.last.statuses]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        try:
            return any(isinstance(status, Status) and status.failure is not None for status in ray.get(ready))
        except ray.exceptions.RayError:  # a host that is gone
            return True

    def open(self, origins: Sequence[CallOrigin]) -> tuple[RankOutput, ...]:
        """Ask every host to open its end; returns their answers."""
        asked = zip([host.handle for host, _ in self.hosts], origins, strict=True)
        return tuple(RankOutput(handle.open_channel.remote(self.spec, at), None, at) for handle, at in asked)

    def close(self) -> None:
        if ray.is_initialized():
            for host, _ in self.hosts:
                host.handle.close_channel.remote(self.spec.name)


class WeightChannels:
    """The channels of a session, opened at the first transfer and kept until one side's ranks are freed."""

    def __init__(self, iterations: Iterations) -> None:
        self._iterations, self._channels = iterations, dict[tuple[str, str], _OpenChannel]()

    def send(
        self,
        source: RankGroup,
        destination: RankGroup,
        payload: str,
        layouts: Callable[[], tuple[Layout, Layout]],
        method: str = "sync_weights",
        required: bool = False,
    ) -> Future:
        """Issue a transfer to every host of both sides; returns at once with a future of bytes, seconds and pause.

        `layouts` returns both sides' layouts at a payload's first transfer; an error in it is raised before anything is
        issued. With `required`, the destination runs no calls after a failure.
        """
        key, setup, now, held = (source.key, destination.key), None, time.time(), self._iterations.held
        by_parts = payload == WEIGHTS and source.spec.sends_parts and not {*source.hosts} & {*destination.hosts}
        if not by_parts:
            held.send()
        for ranks in (source, destination):
            self._iterations.check_hosts(ranks.name, method, ranks.hosts, deferrable=True)
        if self.failed(source, destination):
            self._channels.pop(key).close()
        channel = self._channels.get(key)
        if channel is None or payload not in channel.known:
            sides, opened = layouts(), ()  # first: an error leaves nothing behind
            if channel is None:
                channel = self._channels[key] = self._make(source, destination, now)
                opened = channel.open(self._origins(channel, method))
            setup = ray.put(Setup(*sides, by_parts, opened))  # one object for all hosts
        names = (channel.spec.name, source.key, destination.key, payload)
        task = TransferTask(self._iterations.sequence(), method, *names, required, step=self._iterations.step)
        issued, results = self._iterations.new_call(), []
        with uninterrupted():
            if by_parts and setup is None and (update := held.alone(source.key)) is not None:
                for host in source.hosts:
                    host.handle.follow.remote(update, task)
            unsent: Exception | None = None
            try:
                held.send()
            except Exception as error:  # the receivers of what a held update sends have to be there all the same
                unsent = error
            for (host, _), at in zip(channel.hosts, self._origins(channel, method), strict=True):
                ref, status = host.handle.transfer.remote(task, setup)
                issued.statuses.append(RankOutput(status, None, at, issued, host.address))
                results.append(RankOutput(ref, None, at, issued, host.address))
            self._iterations.issued(issued.statuses)
        if unsent is not None:
            raise unsent
        channel.known.add(payload)
        channel.last = issued
        return Future(tuple(results[:1]))

    def _origins(self, channel: _OpenChannel, method: str) -> list[CallOrigin]:
        return [self._iterations.origin(*origin, method, host) for host, origin in channel.hosts]

    def failed(self, source: RankGroup, destination: RankGroup) -> bool:
        """Whether the latest transfer between them has failed."""
        channel = self._channels.get((source.key, destination.key))
        return channel is not None and channel.failed()

    def _make(self, source: RankGroup, destination: RankGroup, now: float) -> _OpenChannel:
        at: dict[Process, int] = {}
        hosts = []
        for ranks in (source, destination):
            for rank, (member, host) in enumerate(zip(ranks.members, ranks.hosts, strict=True)):
                if at.setdefault((ranks.pool_name, member), len(hosts)) == len(hosts):
                    hosts.append((host, (ranks.name, rank)))
        spec = ChannelSpec(
            name=f"channel/{source.key}/{destination.key}/{self._iterations.sequence()}",
            processes=tuple(at),
            nodes=node_numbers([host.machine for host, _ in hosts]),
            senders=tuple(at[source.pool_name, member] for member in source.members),
            receivers=tuple(at[destination.pool_name, member] for member in destination.members),
            at=now,
        )
        return _OpenChannel(spec, hosts)

    def close(self, key: str) -> None:
        """Close the channels of these ranks."""
        for pair in [pair for pair in self._channels if key in pair]:
            self._channels.pop(pair).close()
