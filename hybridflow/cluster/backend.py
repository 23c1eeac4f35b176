"""SessionBackend: the interface through which a session runs calls, and what the two exchange.

Ray's processes implement it (`ray_backend.py`), and a trace, which only records calls (`tracing/trace_backend.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from hybridflow.cluster.future import Failure
from hybridflow.cluster.row_refs import RankOutput
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.worker_spec import WorkerSpec, spec_of
from hybridflow.protocols.operation import Operation
from hybridflow.settings import require
from hybridflow.topology import RankGrid

CONTROLLER = "hybridflow"
"""The name of the controller worker's group."""


@dataclass(frozen=True)
class Deadlines:
    """Timeouts in seconds: for inputs and peers, for a collective, for devices that the cluster lacks, and for a
    machine that does not answer."""

    peers: float = 1800.0
    collective: float = 600.0
    devices: float = 0.0
    tolerate: float = 0.0


@dataclass(frozen=True)
class HostProcess:
    """The process of one device: its `handle`, a reference to the `address` of its `LivenessServer`, the index of its
    node in the pool, the cluster's own name of that node, and its host name."""

    handle: Any = field(repr=False)
    address: Any = field(default=None, repr=False)
    node: int = 0
    machine: str = ""
    node_name: str = ""


@dataclass(frozen=True)
class RankGroup:
    """Placement of the group `name`: rank i runs in the process `hosts[i]`, rank `members[i]` of its pool.

    `settings` are all settings of the worker class; `own_grid`: the caller gave the grid. Hosts know these ranks by
    `key`, which is never reused. Sent to a host, it has no `hosts`.
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

    @cached_property
    def spec(self) -> WorkerSpec:
        """What the worker class says about a group with these settings."""
        return spec_of(self.worker_class, self.settings)

    def __str__(self) -> str:
        return f"(p,t,d)=({self.grid.p},{self.grid.t},{self.grid.d})"


@dataclass(frozen=True)
class RankCall:
    """One call on one rank, issued in iteration `step` of the driver's loop. Its result has `rows` rows; `span` is the
    range of its input rows in the call's batch, `phase` the kind of its operation, `compares` see `Operation`.

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
    step: int | None = None
    phase: str = ""
    compares: bool = False


class SessionBackend(Protocol):
    """Starts host processes, builds ranks in them and issues calls. A trace has nothing to stop, to build or to free.

    `iterations` are the calls in flight (`iterations.Iterations`), `channels` the weight transfers between ranks
    (`weight_channels.WeightChannels`).
    """

    name: str
    deadlines: Deadlines
    has_cuda: bool
    iterations: Any
    channels: Any

    def start_hosts(
        self, pool: str, per_node: Sequence[int], nodes: Sequence[str] = ()
    ) -> tuple[tuple[HostProcess, ...], Any]:
        """One process for each device of each node, and their reservation; with `nodes`, which machines these are.
        Without any node one process without a device.

        Errors: PlacementError when the cluster lacks the devices."""
        ...

    def stop_hosts(self, hosts: Sequence[HostProcess], reserved: Any) -> None: ...

    def operations(self, worker_class: type, settings: Mapping[str, Any]) -> dict[str, Operation]:
        """The operations of a group with these settings, by name."""
        ...

    def build(self, ranks: RankGroup, uninitialized: bool = False) -> None:
        """Build the worker on every rank and wait for it; `uninitialized`: its weights will be written from outside.

        Errors: WorkerError when a rank cannot be built, ConfigError for a setting that cannot be sent."""
        ...

    def issue(
        self, ranks: RankGroup, calls: Sequence[RankCall | None], partners: frozenset[str] = frozenset()
    ) -> list[RankOutput | None]:
        """Issue a call on each rank that has one, in rank order; returns references to the results at once. A call of
        the ranks with one of the keys `partners` may run together with it (`held_calls`)."""
        ...

    def ask(self, ranks: RankGroup, method: str, *arguments: Any) -> list[Any]:
        """`worker.method(*arguments)` of every rank; waits. Errors: WorkerError of a rank that raised."""
        return self.tell(ranks, method, *arguments)()

    def tell(self, ranks: RankGroup, method: str, *arguments: Any) -> Callable[..., list[Any]]:
        """`ask` in two parts: issues the calls in the order of all calls, and returns what waits for them, for at most
        as many seconds as it is given."""
        ...

    def weights_layout(self, ranks: RankGroup, built: bool = True) -> Layout:
        """The layout of the ranks' weights; before they are `built`, perhaps only its tensors are known.

        Errors: ConfigError when the class has none; WorkerError of a rank that is asked for its layout."""
        require(ranks.spec.layout is not None, f"{ranks.worker_class.__name__} has no weights that could be moved.")
        layout = ranks.spec.layout(ranks.grid)  # type: ignore[misc]
        return self.ask(ranks, "runtime_layout")[0] if built and not layout.complete else layout

    def place(self, worker_class: type, pool: Any, settings: Mapping[str, Any], name: str, grid: Any) -> Any:
        """The ranks of a new group where the backend has placed it itself: a trace, outside of any pool."""

    def stream(self, stream: Any) -> Iterator[Any]:
        """The batches of a `streams.stream.ResponseStream`."""
        return stream.batches()

    def drop(self, ranks: RankGroup, wait: float) -> Failure | None:
        """Free the ranks and the channels of their weights; wait at most `wait` seconds.

        Returns and logs the failure of a rank that could not free its model."""
        ...

    def close(self) -> None: ...


def node_numbers(machines: Sequence[str]) -> tuple[int, ...]:
    """A number for each machine, from 0 in order of appearance."""
    numbers = {machine: i for i, machine in enumerate(dict.fromkeys(machines))}
    return tuple(numbers[machine] for machine in machines)
