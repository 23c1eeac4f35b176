"""Host: the process of one device. It holds any number of models and runs the calls on them one after the other.

    driver --Call(seq, group, method, inputs by reference)--> Host --> worker.method(Batch) --> Manifest of references

A call never raises through Ray: inputs are resolved here, the ranks of a group agree that all have them before the
first collective, and a failure travels as a value. So no rank ever skips a call that its peers run.
"""

from __future__ import annotations

import datetime
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist

from hybridflow.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.columns import Origin
from hybridflow.cluster.exchange import Exchange, News, exchange, incomplete
from hybridflow.cluster.failure import failure_of
from hybridflow.cluster.store import Failure, Manifest, Reader, Status, fetch, first_failure, write
from hybridflow.cluster.weight_link import LinkSpec, WeightLink, agreed_failure
from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.errors import BatchError, HybridFlowError, MissingColumnError, PlacementError
from hybridflow.topology import RankGrid

logger = logging.getLogger(__name__)
_CONNECT = datetime.timedelta(seconds=60)  # to a store that runs already
_CHATTY = ("megatron", "torch.distributed")  # warn at import and on every collective about what we chose on purpose


@dataclass(frozen=True)
class Deadlines:
    """Seconds: to wait for inputs and peers, and to be inside a collective."""

    peers: float = 1800.0
    collective: float = 600.0


@dataclass(frozen=True)
class HostSpec:
    """One device of a pool: rank in the pool's torch world, the world's size (0: no torch world), and deadlines."""

    pool: str
    rank: int
    size: int
    use_cuda: bool
    threads: int
    deadlines: Deadlines


@dataclass(frozen=True)
class GroupSpec:
    """A model group as its members see it: `members[i]` is the pool rank of group rank i, on the node `nodes[i]`."""

    name: str
    role: str
    grid: RankGrid
    members: tuple[int, ...]
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call on one rank. `rows` are due in its result; `span` is where its input rows lie in the call's batch.

    The ranks in `agree` (none: nobody) tell each other whether they have their inputs before any of them begins.
    """

    seq: int
    group: str
    method: str
    settings: dict[str, Any]
    writes: tuple[str, ...]
    agree: tuple[int, ...]
    rows: int | None = None
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Event:
    """When a host ran a call: seconds since the epoch; `ready` is when its inputs were there."""

    seq: int
    role: str
    method: str
    rank: int
    start: float
    ready: float
    end: float


@dataclass
class _Member:
    spec: GroupSpec
    rank: int
    groups: ProcessGroups | None
    worker: Any = None
    failure: Failure | None = None
    incomplete: Failure | None = None  # of an exchange that left its weights half written


@dataclass(repr=False)
class Host:
    """Runs in a Ray actor; see the module's text. Methods are called by the session, the pool and groups only."""

    spec: HostSpec
    _members: dict[str, _Member] = field(default_factory=dict)
    _links: dict[str, WeightLink | Failure] = field(default_factory=dict)
    _events: deque[Event] = field(default_factory=lambda: deque(maxlen=10_000))
    _store: Any = None
    _joined: bool = False

    def __repr__(self) -> str:  # Ray prefixes the process's output with it
        return f"host {self.spec.rank}"

    def __post_init__(self) -> None:
        for package in _CHATTY:
            warnings.filterwarnings("ignore", module=package)
        if not self.spec.use_cuda:
            torch.set_num_threads(self.spec.threads)
        self.device = torch.device("cuda", 0) if self.spec.use_cuda else torch.device("cpu")
        self.reader = Reader(self.spec.deadlines.peers)

    def open_store(self) -> tuple[str, int]:
        """Start the pool's rendezvous store here; returns its address."""
        address = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(
            address, 0, self.spec.size, True, self._peers, wait_for_workers=False, multi_tenant=True
        )
        return address, self._store.port

    def join(self, address: tuple[str, int]) -> None:
        """Join the torch world of the pool."""
        if self._store is None:
            self._store = dist.TCPStore(*address, self.spec.size, False, self._peers)
        backend = "cpu:gloo,cuda:nccl" if self.spec.use_cuda else "gloo"
        # without device_id: torch would make every later nccl group by splitting this one, with all of its processes
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(self.spec.pool, self._store),
            rank=self.spec.rank,
            world_size=self.spec.size,
            timeout=self._peers,
        )
        self._joined = True

    @property
    def _peers(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.spec.deadlines.peers)

    def create(
        self, seq: int, spec: GroupSpec, worker_class: type, settings: dict[str, Any], unset: bool = False
    ) -> Failure | None:
        """Build one rank of a group, with `unset` to have its weights written from outside.

        A failure is kept and returned by every later call as well.
        """
        rank = spec.members.index(self.spec.rank)
        groups = None
        if self.spec.size:
            groups = ProcessGroups(
                self._store, spec.name, spec.members, rank, self.device, self.spec.deadlines.collective
            )
        member = self._members[spec.name] = _Member(spec, rank, groups)
        start = time.time()
        try:
            if self.spec.size and not self._joined:
                raise PlacementError("this host could not join the others of its pool; its log says why.")
            worker = member.worker = object.__new__(worker_class)  # known at once: `drop` closes half-built ones too
            if groups is not None:
                worker.context = RankContext(
                    spec.role, rank, spec.grid, self.device, groups, unset=unset, nodes=spec.nodes
                )
            worker.__init__(**settings)
        except Exception as error:
            member.failure = self._failure(member, "__init__", None, error)
        self._events.append(Event(seq, spec.role, "__init__", rank, start, start, time.time()))
        return member.failure

    @ray.method(num_returns=2)
    def call(self, call: Call) -> tuple[Any, Status]:
        """Run one method: (Manifest, value or Failure; and the status, which outlives the data)."""
        member = self._members[call.group]
        start = ready = time.time()
        if (failure := member.failure or member.incomplete) is not None:
            return failure, Status(failure)
        result = self._inputs(member, call)
        if not isinstance(result, Failure):
            ready = time.time()
            result = self._run(member, call, result)
        seconds = self._record(member, call, start, ready)
        return result, Status(result if isinstance(result, Failure) else None, seconds)

    def _record(self, member: _Member, call: Call, start: float, ready: float) -> tuple[tuple[str, float], ...]:
        role, rank = member.spec.role, member.rank
        context = getattr(member.worker, "context", None)
        stages = [] if context is None else context.stages
        events = [Event(call.seq, role, f"{call.method}/{name}", rank, a, a, b) for name, a, b in stages]
        events.append(Event(call.seq, role, call.method, rank, start, ready, time.time()))
        self._events.extend(events)
        stages.clear()
        return tuple((event.method, event.end - event.ready) for event in events)

    def _inputs(self, member: _Member, call: Call) -> dict[str, Any] | Failure:
        """Read the inputs; agree with the other ranks that all have them, or return the error that one of them met."""
        try:
            outcome: dict[str, Any] | Failure = {name: self._resolve(v) for name, v in call.settings.items()}
        except Exception as error:
            outcome = self._failure(member, call.method, call, error, upstream=True)
        if not call.agree or member.groups is None:
            return outcome
        try:
            return self._agree(member, call.agree, outcome)
        except Exception as error:
            return self._failure(member, call.method, call, error)

    def _agree(self, member: _Member, ranks: tuple[int, ...], outcome: Any) -> Any:
        assert member.groups is not None
        control = member.groups.new("control", ranks, "gloo", self.spec.deadlines.peers)
        return agreed_failure(control, outcome if isinstance(outcome, Failure) else None) or outcome

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, BatchRef):
            return self.reader.read(value.column_refs, value.chunk_rows)
        return value

    def _run(self, member: _Member, call: Call, settings: dict[str, Any]) -> Any:
        try:
            result = getattr(member.worker, call.method)(**settings)
            return self._written(result, call) if call.writes else result
        except Exception as error:
            return self._failure(member, call.method, call, error)

    def _written(self, result: Any, call: Call) -> Manifest:
        if result is None:  # a rank whose output no protocol collects, e.g. not the last pipeline stage
            return Manifest(0, {})
        if not isinstance(result, Batch):
            raise BatchError(
                f"{call.method} writes {call.writes} and must return a Batch, got {type(result).__name__}."
            )
        if missing := [name for name in call.writes if name not in result]:
            raise MissingColumnError(
                f"{call.method} declares the columns {missing}, but returned only {list(result.columns)}."
            )
        if call.rows is not None and result.rows != call.rows:
            raise BatchError(
                f"{call.method} returned {result.rows} rows where {call.rows} were due. "
                f"Declare @register(..., resizes=True) if it changes the number of rows."
            )
        return write(result)

    def _failure(
        self, member: _Member, method: str, call: Call | None, error: Exception, upstream: bool = False
    ) -> Failure:
        rows = call.span if call is not None else None
        return failure_of(error, member.spec.role, member.rank, method, rows, upstream)

    @ray.method(num_returns=2)
    def exchange(self, task: Exchange, news: News | None) -> tuple[Any, Status]:
        """Take part in moving weights from one group to another: (figures or Failure; and the status)."""
        start = time.time()
        sender, receiver = self._members.get(task.source), self._members.get(task.destination)
        mine = sender or receiver
        assert mine is not None
        failed = partial(self._failure, mine, task.method, None)
        try:
            link = self._link(task, news, failed)
            result = link if isinstance(link, Failure) else exchange(link, task, news, sender, receiver, failed)
        except Exception as error:
            result = failed(error)
        if task.due and receiver is not None and isinstance(result, Failure):
            receiver.incomplete = receiver.incomplete or incomplete(result)
        end = time.time()
        self._events.append(Event(task.seq, mine.spec.role, task.method, mine.rank, start, start, end))
        return result, Status(result if isinstance(result, Failure) else None, ((task.method, end - start),))

    def open_link(self, spec: LinkSpec, origin: Origin) -> Failure | None:
        """Make this host's end of a link, with the store that all its ranks share; `origin` is whom a failure names."""
        store, deadlines = self._store, self.spec.deadlines
        try:
            if spec.store_pool != self.spec.pool:
                store = dist.TCPStore(*spec.store, None, False, _CONNECT, wait_for_workers=False)
                store.set_timeout(self._peers)
            process = (self.spec.pool, self.spec.rank)
            link = WeightLink(spec, process, store, self.device, deadlines.collective, deadlines.peers)
        except Exception as error:
            return failure_of(error, origin.role, origin.rank, origin.method)
        self._links[spec.name] = link
        return None

    def _link(self, task: Exchange, news: News | None, failed: Callable[[Exception], Failure]) -> WeightLink | Failure:
        """The link of an exchange, or why it does not exist. A rank without one cannot tell its peers by the link, so
        every rank asks all of them at the first exchange, and remembers the answer."""
        if news is not None and news.opened:
            try:
                failure = first_failure(
                    fetch([part.ref for part in news.opened], news.opened, self.spec.deadlines.peers, follow=False)
                )
            except HybridFlowError as error:  # a host that is gone
                failure = failed(error)
            if failure is not None:
                self.close_link(task.link)
                self._links[task.link] = failure
        return self._links[task.link]

    def close_link(self, name: str) -> None:
        """Forget a link and its process groups."""
        if isinstance(link := self._links.pop(name, None), WeightLink):
            link.close()

    def apply(self, group: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(worker, *arguments)` on this rank of a group; a failure is a value, as of a call."""
        member = self._members[group]
        try:
            return function(member.worker, *arguments)
        except Exception as error:
            return self._failure(member, function.__name__, None, error)

    def events(self) -> list[Event]:
        return list(self._events)

    def drop(self, name: str) -> Failure | None:
        """Forget a group and free its model; a failure of its `close` is a value, and logged."""
        member = self._members.pop(name, None)
        if member is None:
            return None
        try:
            try:
                if (close := getattr(member.worker, "close", None)) is not None:
                    close()
            finally:
                if member.groups is not None:
                    member.groups.close()
        except Exception as error:
            logger.warning("%s could not be freed", name, exc_info=True)
            return self._failure(member, "close", None, error)
        return None

    def close(self) -> None:
        """Free all models and leave the torch world."""
        for name in list(self._links):
            self.close_link(name)
        for name in list(self._members):
            self.drop(name)
        if dist.is_initialized():
            dist.destroy_process_group()
