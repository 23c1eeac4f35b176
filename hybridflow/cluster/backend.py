"""SessionBackend: what a session asks of the side that runs its calls.

There are two: Ray's processes (`ray_backend.py`), and a trace, which only writes calls down
(`tracing/trace_backend.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridflow.cluster.future import Failure
from hybridflow.cluster.row_refs import RankOutput
from hybridflow.protocols import Operation
from hybridflow.topology import RankGrid


@dataclass(frozen=True)
class Deadlines:
    """Seconds: to wait for inputs and peers, and to be inside a collective."""

    peers: float = 1800.0
    collective: float = 600.0


@dataclass(frozen=True)
class HostProcess:
    """The process of one device: its `handle`, a reference to the `address` of its `LivenessServer`, the index of its
    node in the pool, and the cluster's own name of that node."""

    handle: Any = field(repr=False)
    address: Any = field(default=None, repr=False)
    node: int = 0
    machine: str = ""


@dataclass(frozen=True)
class PoolHosts:
    """The host processes of a pool by device. `reserved` is what the backend holds for them."""

    name: str
    hosts: tuple[HostProcess, ...]
    reserved: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class RankGroup:
    """Where the ranks of the group `name` are: rank i runs in the process `hosts[i]`, of rank `members[i]` in its pool.

    `settings` are those of the worker class, all of them; with `own_grid` the grid was given beside them. Hosts know
    these ranks by `key`, which is never used again.
    """

    name: str
    worker_class: type
    settings: Mapping[str, Any]
    grid: RankGrid
    pool_name: str
    members: tuple[int, ...]
    hosts: tuple[HostProcess, ...]
    key: str
    own_grid: bool = False

    def __str__(self) -> str:
        return f"(p,t,d)=({self.grid.p},{self.grid.t},{self.grid.d})"


@dataclass(frozen=True)
class RankCall:
    """One call on one rank. `rows` are due in its result; `span` is where its input rows lie in the call's batch.

    The ranks in `agree` tell each other whether they have their inputs before any of them begins.
    """

    seq: int
    group: str
    method: str
    settings: dict[str, Any]
    writes: tuple[str, ...]
    agree: tuple[int, ...] = ()
    rows: int | None = None
    span: tuple[int, int] | None = None


class SessionBackend(Protocol):
    """Starts host processes, builds ranks in them and issues calls. `traces` says that nothing is run."""

    name: str
    deadlines: Deadlines
    traces: bool
    has_cuda: bool
    iterations: Any
    """Which calls are under way: `iterations.Iterations`."""
    channels: Any
    """How weights travel between ranks: `weight_channels.WeightChannels`."""

    def start_hosts(self, pool: str, per_node: Sequence[int]) -> PoolHosts:
        """One process for each device of each node; without nodes one process that has no device.

        Errors: PlacementError when the cluster has not got the devices."""
        ...

    def stop_hosts(self, hosts: PoolHosts) -> None: ...

    def operations(self, worker_class: type, settings: Mapping[str, Any]) -> dict[str, Operation]:
        """The operations of a group with these settings, by name."""
        ...

    def build(self, ranks: RankGroup, uninitialized: bool = False) -> None:
        """Build the worker on every rank and wait for it; `uninitialized`: its weights will be written from outside.

        Errors: WorkerError when a rank cannot be built, ConfigError for a setting that cannot be sent."""
        ...

    def issue(self, ranks: RankGroup, calls: Sequence[RankCall | None]) -> list[RankOutput | None]:
        """Issue a call on each rank that has one, in rank order; returns at once with what each will return."""
        ...

    def ask(self, ranks: RankGroup, method: str, *arguments: Any) -> list[Any]:
        """`worker.method(*arguments)` of every rank; waits. Errors: WorkerError of a rank where it raised."""
        ...

    def drop(self, ranks: RankGroup, wait: float) -> Failure | None:
        """Free the ranks and the channels of their weights; wait at most `wait` seconds.

        Returns the failure of a rank that could not free its model, which is logged too."""
        ...

    def close(self) -> None: ...
