"""Process groups built by their members only, under explicit names and explicit timeouts.

`torch.distributed.new_group` must be called by every process of the world, names groups by a per-process counter and
ignores the default timeout. Here only its members form a group, from a store and a name, so groups on slices of a pool,
and several models in the same processes, need no other process.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hybridflow.engine3d.transfer.handshake import check_complete
from hybridflow.engines.call_events import Stage, memory_used
from hybridflow.errors import WaitTimeoutError
from hybridflow.topology import Coords, RankGrid

# NCCL's watchdog aborts a late collective, which ends its kernel, and not the process: see `ProcessGroups.check`
os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1")  # of four such waits, which last a minute otherwise

T = TypeVar("T")
_BACKENDS = re.compile(r"\bgloo/|\bNCCL\b|caused pair closure")  # plain RuntimeErrors; most of gloo begin with a file


def is_communication_error(error: BaseException | None) -> bool:
    """Whether torch.distributed or one of its backends raised `error`, or the error that it came from."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _BACKENDS.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def gather(mine: T, group: dist.ProcessGroup) -> list[T]:
    """The values of all ranks of the group, in their order. Collective."""
    everyone = [mine] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


class _SharedGloo(c10d.ProcessGroupGloo):
    """A gloo group on devices that all of this process share.

    torch gives each group a device of its own, whose thread wakes 100 times a second: 80 groups took 0.13 of a core
    while nothing ran (torch 2.13), on shared devices 0.005.
    """

    opened: ClassVar[set[tuple[int, str]]] = set()
    """The sockets of the group that was made last: torch keeps no Python object of one."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        options: Any = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  the stubs lack these names
        (options._devices, listening), options._timeout = _gloo_devices(), timeout
        options._threads = 2 * len(options._devices)
        store.set(f"listening/{rank}", json.dumps(listening))
        before = _sockets()
        super().__init__(store, rank, size, options)
        found = store.multi_get([f"listening/{each}" for each in range(size)])  # all have come
        ends = {tuple(address) for each in found for address in json.loads(each)}
        opened = _SharedGloo.opened = set()

        def mark(descriptor: tuple[int, str], connection: socket.socket) -> None:
            if not ends.isdisjoint((connection.getsockname()[:2], connection.getpeername()[:2])):
                opened.add(descriptor)
                if gloo_address != _LOOPBACK:
                    fail_with_machine(connection)

        for descriptor in _sockets() - before:  # other threads may have opened some, too
            _with_socket(descriptor, partial(mark, descriptor))


def _sockets() -> set[tuple[int, str]]:
    """The descriptors of this process's sockets, each with its inode: a number alone may be used again."""
    found = set()
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):  # the listing's own
            if (target := os.readlink(f"{_DESCRIPTORS}/{name}")).startswith("socket:"):
                found.add((int(name), target))
    return found


def _with_socket(found: tuple[int, str], use: Callable[[socket.socket], object]) -> None:
    """Give `use` one of gloo's sockets, unless gloo has closed it."""
    with suppress(OSError):
        if os.readlink(f"{_DESCRIPTORS}/{found[0]}") == found[1]:
            with socket.socket(fileno=os.dup(found[0])) as connection:
                use(connection)


def end_waits(connection: socket.socket) -> None:
    """Have other threads that wait for this connection, and its other end, fail."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _attempts() -> Iterator[tuple[str, tuple[str, int]]]:
    """The inodes of sockets that wait for an answer to their first packet, and the addresses that they sent it to."""
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError), open(f"{_SOCKETS}/{name}") as table:
            for _, _, remote, state, *_, inode in (line.split()[:10] for line in [*table][1:]):
                if state == _SYN_SENT:
                    host, port = remote.split(":")
                    words = (bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
                    yield f"socket:[{inode}]", (socket.inet_ntop(family, b"".join(words)), int(port, 16))


def fail_with_machine(connection: socket.socket, idle: int = 3, interval: int = 2, seconds: float = 30.0) -> None:
    """Have a connection fail `seconds` after its other machine vanished: a collective would wait for its deadline. A
    stopped process answers by its kernel, unless it leaves more data unread than its buffers hold."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in zip(_GONE, (idle, interval, 3, int(1000 * seconds)), strict=True):
        if (option := getattr(socket, name, None)) is not None:  # systems have some of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


_DESCRIPTORS, _SOCKETS = "/proc/self/fd", "/proc/self/net"
_LOOPBACK = "127.0.0.1"
_SYN_SENT, _ATTEMPT_SECONDS = "02", 0.2
_GONE = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
gloo_address = _LOOPBACK
"""Where peers reach this process: a host sets its node's. Gloo would take that of the machine's name, or loopback."""


@cache
def _gloo_devices() -> tuple[list[Any], list[tuple[str, int]]]:
    """One for each interface in `GLOO_SOCKET_IFNAME`, or that of `gloo_address`; and the addresses that they listen
    at."""
    before, listening = _sockets(), list[tuple[str, int]]()

    def look(connection: socket.socket) -> None:
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listening.append(connection.getsockname()[:2])

    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    create = c10d.ProcessGroupGloo.create_device
    devices = [create(interface=name) for name in names] or [create(hostname=gloo_address)]
    for found in _sockets() - before:
        _with_socket(found, look)
    return devices, listening


c10d.ProcessGroupGloo = _SharedGloo  # type: ignore[misc]  torch has no option for it


class Meeting:
    """Where this process meets others with whom it forms a group: in `store`, over a connection of its own. A backend
    would wait for one that is lost until its timeout; `abort`, called by another thread, ends the connection, and with
    it every wait in the store, a backend's own, too."""

    def __init__(self, store: dist.Store) -> None:
        self.lost = False
        self._shared = store

    @cached_property
    def store(self) -> dist.Store:
        return self._shared.clone()  # type: ignore[attr-defined]  the stubs lack it

    def enter(self, name: str, rank: int, members: int, seconds: float, says: str = "") -> list[bytes]:
        """Wait until all have, and return what they say. Errors: those of `ending`."""
        with self.ending():
            self.store.set(f"{name}/here/{rank}", says)
            keys = [f"{name}/here/{each}" for each in range(members)]
            self.store.wait(keys, datetime.timedelta(seconds=seconds))
            return self.store.multi_get(keys)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Inside waits for others end with `abort`. Errors: WaitTimeoutError when one of them is lost, those of the
        waits."""
        lost, _ = WaitTimeoutError("a rank was lost before all had formed a group."), self.store
        if self.lost:  # looked at after the connection is there to be ended: `abort` does it the other way round
            raise lost
        try:
            yield
        except (RuntimeError, OSError, ValueError) as error:  # of the store, a backend, sockets, and an empty text
            if self.lost:
                raise lost from error
            raise

    def close(self) -> None:
        """All have met: the connection is not needed any more, but made again where it is."""
        self.__dict__.pop("store", None)

    def abort(self) -> None:
        """One of the others is lost: waits end."""
        self.lost = True
        store = self.__dict__.get("store")
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if (found := _CONNECTION.search(repr(store))) is not None:  # torch says it nowhere else
            with suppress(OSError), socket.socket(fileno=os.dup(int(found[1]))) as connection:
                end_waits(connection)


_CONNECTION = re.compile(r"^TCPStore\(client=TCPClient\(SocketImpl\(fd=(\d+)")


@dataclass
class ProcessGroups:
    """Builds the process groups of one model group.

    `ranks[i]` is the rank of member i in the host processes' torch world, `rank` this process's index in `ranks`,
    `name` is unique per model group, `timeout` in seconds bounds every collective.
    """

    store: dist.Store
    name: str
    ranks: Sequence[int]
    rank: int
    device: torch.device
    timeout: float = 600.0
    _built: dict[tuple[str, str], dist.ProcessGroup] = field(default_factory=dict)
    _holders: list[Callable[[], object]] = field(default_factory=list)
    _connections: set[tuple[int, str]] = field(default_factory=set)
    _connecting: bool = False
    _listening: set[tuple[str, int]] = field(default_factory=set)  # others of a gloo group; NCCL's are not known
    between_stages: set[dist.ProcessGroup] = field(default_factory=set)
    """Groups of messages, which gloo counts as collectives."""
    meeting: Meeting = field(init=False)

    def __post_init__(self) -> None:
        self.meeting = Meeting(self.store)

    def new(
        self,
        name: str,
        members: Sequence[int],
        backend: str | None = None,
        timeout: float | None = None,
        priority: bool = False,
    ) -> dist.ProcessGroup:
        """The process group `name` of `members` (ranks of the model group, this one among them), built once.

        Every member must ask for it, and no other process. `backend` defaults to gloo on CPU and nccl on CUDA, whose
        communicators take device memory: a group of one rank makes none before its first collective. Without a reason
        for a group of its own, such as another thread, take the one `of` these members. With `priority` no group
        without it has its stream on CUDA: torch gives the 33rd of a process the place of the first.
        """
        backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        if (found := self._built.get((full := self.full_name(name, members), backend))) is not None:
            return found
        world, rank = [self.ranks[m] for m in members], list(members).index(self.rank)
        named, seconds = f"{full}/{backend}", timeout or self.timeout
        mine = json.dumps(_gloo_devices()[1] if backend == "gloo" else [])
        said = self.meeting.enter(named, rank, len(world), seconds, mine)
        self._listening = {tuple(address) for each in said for address in json.loads(each)}
        if (options := dist.ProcessGroupNCCL.Options(True) if priority and backend == "nccl" else None) is not None:
            options._timeout = datetime.timedelta(seconds=seconds)  # torch warns about another one
        self._connecting = True
        try:
            with self.meeting.ending():
                group, _ = c10d._new_process_group_helper(
                    len(world),
                    rank,
                    world,
                    c10d.Backend(backend),
                    dist.PrefixStore(named, self.meeting.store),
                    backend_options=options,
                    group_name=c10d.GroupName(named),
                    timeout=datetime.timedelta(seconds=seconds),
                    device_id=self.device if backend == "nccl" and len(world) > 1 else None,
                )
        finally:
            self._connecting = False
        assert isinstance(group, dist.ProcessGroup)
        c10d._world.pg_group_ranks[group] = {world_rank: i for i, world_rank in enumerate(world)}
        self._built[(full, backend)] = group
        self._connections |= _SharedGloo.opened if backend == "gloo" else set()
        if self.meeting.lost:
            self.abort()
        return group

    def full_name(self, name: str, members: Sequence[int]) -> str:
        """The key in the store of what only these members share."""
        return f"{self.name}/{name}/{'-'.join(map(str, members)) if len(members) < 64 else hash(tuple(members))}"

    def of(self, members: Sequence[int]) -> dist.ProcessGroup:
        """The group in which these members compute together."""
        return self.new("computing", members)

    def everyone(self, backend: str | None = None) -> dist.ProcessGroup:
        return self.new("computing", range(len(self.ranks)), backend)

    def check(self) -> None:
        """Errors: WaitTimeoutError when NCCL has aborted one of the groups: results since then are undefined."""
        if self.device.type == "cuda":
            for group in self._built.values():
                check_complete(group)

    def collectives(self) -> dict[str, int]:
        """How many operations this rank has begun in each group. Ranks that make equal collectives add equal numbers;
        messages between two of them count, too."""
        groups: dict[str, Any] = {f"{name}/{backend}": group for (name, backend), group in self._built.items()}
        counted = {name: group for name, group in groups.items() if group not in self.between_stages}
        return {name: group._get_sequence_number_for_group() for name, group in counted.items()}

    def when_closed(self, forget: Callable[[], object]) -> None:
        """Call `forget` when the groups are closed: a reference to a gloo group keeps its threads running."""
        self._holders.append(forget)

    def abort(self) -> None:
        """A member is gone: what this process does in the groups fails, now and later. Called by another thread."""
        self.meeting.abort()
        while self._connecting:  # to the lost one: a machine that vanished answers nothing
            own = {inode for inode, to in _attempts() if not self._listening or to in self._listening}
            for found in _sockets():
                if found[1] in own:
                    _with_socket(found, end_waits)
            time.sleep(_ATTEMPT_SECONDS)
        for found in list(self._connections):
            _with_socket(found, end_waits)
        for (_, backend), group in list(self._built.items()):
            if backend == "nccl":
                with suppress(RuntimeError):
                    group._get_backend(self.device).abort()  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        """Destroy the groups that were built. Call on every member."""
        for forget in self._holders:
            forget()
        for group in self._built.values():
            dist.destroy_process_group(group)
        self._built.clear()
        self.between_stages.clear()
        self._holders.clear()


@dataclass(frozen=True)
class SkippedStep:
    """An optimizer step that all ranks skipped: `number` of the call, `row_ids` of its mini-batch on all ranks (empty
    where the batch has none)."""

    role: str
    method: str
    step: int | None
    call: int
    number: int
    reason: str
    row_ids: tuple[int, ...] = ()


@dataclass
class RankContext:
    """Context of a worker: role, rank in the group's grid, device and process groups.

    `nodes[i]` numbers the machine on which rank i of the group runs (empty where it is unknown): ranks of equal numbers
    are close to each other. `method` is the operation that runs, `failed_stage` the part of it that raised, `node` this
    machine and `step` the driver's iteration, for messages; `call` is the call's number, `compares` as in `Operation`,
    `skipped` the steps that it skipped, `peak` the most bytes that a CUDA device had before it, and `schedule` the last
    one of shared stages, with its works (`time_sharing`). `send_beside(steps)` sends the weights that the call's last
    optimizer step makes, part by part; None where no transfer follows. `row_number(i)` is the row of the call's batch
    that is row i of this rank's part. With `uninitialized` the weights will be written from outside: engines neither
    read nor draw any.
    """

    role: str
    rank: int
    grid: RankGrid
    device: torch.device
    groups: ProcessGroups
    stages: list[Stage] = field(default_factory=list)
    method: str = ""
    failed_stage: str = ""
    uninitialized: bool = False
    nodes: tuple[int, ...] = ()
    node: str = ""
    step: int | None = None
    call: int = 0
    compares: bool = False
    skipped: list[SkippedStep] = field(default_factory=list)
    peak: int = 0
    schedule: tuple[Any, Any] = (None, None)
    send_beside: Callable[[Iterator[int]], None] | None = None
    row_number: Callable[[int], int] = int

    @contextmanager
    def stage(
        self,
        name: str,
        copied: Callable[[], tuple[int, int]] = lambda: (0, 0),
        since: tuple[int, int] | None = None,
    ) -> Iterator[None]:
        """Record when a named part of a call ran, for the timeline. `copied` are all bytes so far that were copied from
        and to host memory, `since` those before the ones to count (default: before the part)."""
        start, before, known = time.time(), memory_used(self.device), since or copied()
        try:
            yield
        except BaseException:
            self.failed_stage = self.failed_stage or name
            raise
        finally:
            moved = [now - then for now, then in zip(copied(), known, strict=True)]
            self.stages.append(Stage(name, start, time.time(), before, memory_used(self.device), *moved))

    @property
    def coords(self) -> Coords:
        return self.grid.coords(self.rank)

    @cached_property
    def step_stream(self) -> torch.cuda.Stream | None:
        """Of reductions and optimizer steps beside what others compute (`PipelineTurn`); None on the CPU. Of high
        priority, because all others come from a pool, in which it could be the stream of a group, too."""
        return torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
