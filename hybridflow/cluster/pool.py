"""ResourcePool: devices, and one host process for each (paper, section 4.1)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from hybridflow.cluster.backend import HostProcess, RankGroup
from hybridflow.cluster.controller_worker import ControllerWorker
from hybridflow.cluster.future import fetch
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.interactive import current_cell, pool_table
from hybridflow.cluster.row_refs import RankOutput
from hybridflow.cluster.session import CONTROLLER, Session
from hybridflow.cluster.startup import stage
from hybridflow.engines.call_events import Event
from hybridflow.errors import PlacementError
from hybridflow.topology import RankGrid


@dataclass
class _Reserved:
    """State shared by all slices of a pool: the host processes by device, the backend's reservation for them, the names
    of their `machines` if given, and by address what each process told `about` its device, or a reference to that."""

    session: Session
    name: str
    hosts: tuple[HostProcess, ...]
    reservation: Any
    machines: tuple[str, ...] = ()
    shared: bool = False
    closed: bool = False
    about: dict[Any, Any] = field(default_factory=dict)


class ResourcePool:
    """`ResourcePool([8, 8])`: eight devices on each of two nodes, each with a host process that holds any models.

    Groups on one pool take turns in call order; groups on different pools run at the same time.

    `pool[0:4]` is a slice with the same host processes. On a local machine without CUDA, devices are logical. `nodes`
    says which machine each node is: its host name, its address, or a label of Ray, `key=value`; by default nodes of
    one size are in the order of their addresses. Errors: PlacementError when the cluster lacks the devices.
    """

    def __init__(self, devices: Sequence[int] | int, nodes: Sequence[str] = ()) -> None:
        per_node = [devices] if isinstance(devices, int) else list(devices)
        if not per_node or any(type(n) is not int or n < 1 for n in per_node):
            raise PlacementError(f"ResourcePool({devices!r}): give devices per node, like ResourcePool([8, 8]).")
        named = not isinstance(nodes, str) and all(isinstance(node, str) and node for node in nodes)
        plain = [node for node in nodes if "=" not in node] if named else []
        if not named or (nodes and len(nodes) != len(per_node)) or len(plain) != len(set(plain)):
            raise PlacementError(
                f"ResourcePool({devices!r}, nodes={nodes!r}): name {len(per_node)} machines, each once, like nodes="
                f"['10.0.0.1', '10.0.0.2']."
            )
        assignment = Session.current().assignment
        if nodes and assignment is not None:
            raise PlacementError(f"nodes={list(nodes)}: this placement has devices of its own. Leave nodes out.")
        found = self._open(per_node, tuple(nodes)) if assignment is None else self.over(assignment.nodes)
        self._reserved, self.members = found._reserved, found.members

    @classmethod
    def over(cls, nodes: Sequence[int]) -> ResourcePool:
        """The pool over these devices of each node, shared by all groups of a placement: one per session, opened on
        first use.

        Errors: PlacementError when the cluster lacks the devices.
        """
        pools = Session.current().pools
        found = next((p for p in pools if p._reserved.shared and p.devices_of_nodes == tuple(nodes)), None)
        return found or cls._open(list(nodes), shared=True)

    @classmethod
    def _open(cls, per_node: list[int], machines: tuple[str, ...] = (), shared: bool = False) -> ResourcePool:
        session, cell = Session.current(), None if shared else current_cell()
        session.replace_earlier(cell)
        name = f"{session.name}-{uuid.uuid4().hex[:6]}"
        hosts, reservation = session.backend.start_hosts(name, per_node, machines)
        if cell is not None:
            session.cells[name] = cell
        pool = _part(_Reserved(session, name, hosts, reservation, machines, shared), range(sum(per_node)))
        session.pools.append(pool)
        if CONTROLLER not in session.groups:
            try:
                _start_controller(session)
            except BaseException:
                pool.close()
                raise
        return pool

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def name(self) -> str:
        return self._reserved.name

    @property
    def session(self) -> Session:
        return self._reserved.session

    @property
    def nodes(self) -> list[int]:
        """Index of the node of each device."""
        return [self._reserved.hosts[i].node for i in self.members]

    @property
    def hosts(self) -> tuple[HostProcess, ...]:
        """The host processes of the whole pool."""
        return self._reserved.hosts

    @property
    def devices_of_nodes(self) -> tuple[int, ...]:
        return tuple(self.nodes.count(node) for node in dict.fromkeys(self.nodes))

    def part(self, members: Sequence[int]) -> ResourcePool:
        """The slice with these ranks of the whole pool."""
        return _part(self._reserved, members)

    def ranks(self, name: str, worker_class: type, settings: Any, grid: RankGrid, own_grid: bool = False) -> RankGroup:
        """One rank of a group on every device of this pool or slice, not built yet."""
        hosts = tuple(self._reserved.hosts[i] for i in self.members)
        key = f"{self.name}/{name}/{self.session.iterations.sequence()}"
        return RankGroup(name, worker_class, settings, grid, self.name, self.members, hosts, key, own_grid)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int | slice) -> ResourcePool:
        """A slice of the pool: the same host processes, fewer of them."""
        if self._reserved.shared and self.session.assignment is not None:
            return self  # the placement decides the devices of each group
        picked = self.members[key] if isinstance(key, slice) else (self.members[key],)
        if not picked:
            raise PlacementError(f"the slice {key} of a pool of {self.size} devices is empty.")
        return self.part(picked)

    def rebuild(self) -> None:
        """Replace all host processes, on devices of the cluster that answer. Their groups are not built again here.

        Errors: PlacementError when the cluster no longer has as many devices.
        """
        reserved, session = self._reserved, self.session
        whole = self.part(range(len(reserved.hosts)))
        per_node = list(whole.devices_of_nodes) if self is not session.controller_pool else []
        session.backend.stop_hosts(reserved.hosts, reserved.reservation)
        reserved.hosts, reserved.reservation = session.backend.start_hosts(self.name, per_node, reserved.machines)

    def check_open(self) -> None:
        if self._reserved.closed:
            raise PlacementError("this pool is closed: make a new ResourcePool.")

    def events(self) -> list[Event]:
        """Calls that this pool's hosts ran, by start time; waits for running calls. Errors: WorkerError of a lost host,
        WaitTimeoutError."""
        self.check_open()
        iterations, hosts = self.session.iterations, [self._reserved.hosts[i] for i in self.members]
        methods = [host.handle.events for host in hosts]  # a trace has no processes, and no held calls either
        iterations.held.send()
        outputs = [
            RankOutput(method.remote(), 0, iterations.origin("pool", rank, "events", host))
            for rank, host, method in zip(self.members, hosts, methods, strict=True)
        ]
        found = fetch([output.ref for output in outputs], outputs, self.session.backend.deadlines.peers)
        return sorted({event for host in found for event in host}, key=lambda e: (e.start, e.rank))

    def devices(self) -> list[dict[str, Any]]:
        """Of each device of the whole pool: `pool`, `rank`, `node`, `device`, `name` and `memory` in bytes. Does not
        wait: the last three are empty until the process has answered, after the calls that it was given before."""
        about, found = self._reserved.about, []
        for rank, host in enumerate(self.hosts):
            if host.address not in about:
                about[host.address] = host.handle.about.remote()
            if isinstance(about[host.address], ray.ObjectRef) and ray.wait([about[host.address]], timeout=0)[0]:
                try:
                    about[host.address] = ray.get(about[host.address])
                except ray.exceptions.RayError:
                    about[host.address] = _unknown(host)  # it is lost
            known = about[host.address]
            found.append({"pool": self.name, "rank": rank, **(known if isinstance(known, dict) else _unknown(host))})
        return found

    def device_memory(self) -> int | None:
        """Bytes of the smallest device, once its host has started. None where unknown, and on the CPU."""
        if not self.session.has_cuda:
            return None
        self.devices()  # asks
        if refs := [ref for ref in self._reserved.about.values() if isinstance(ref, ray.ObjectRef)]:
            with stage("starting host processes"):
                ray.wait(refs, num_returns=len(refs), timeout=self.session.backend.deadlines.peers)
        return min(one["memory"] or 0 for one in self.devices()) or None

    def close(self) -> None:
        """Free all models and devices of the whole pool. Can be called again."""
        session = self.session
        if self._reserved.closed:
            return
        self._reserved.closed = True
        for group in [g for g in session.groups.values() if g.pool_name == self.name]:
            group.forget_hosts()
        session.backend.stop_hosts(self._reserved.hosts, self._reserved.reservation)
        session.pools = [pool for pool in session.pools if pool.name != self.name]

    def __repr__(self) -> str:
        return f"ResourcePool({list(self.devices_of_nodes)}{', closed' if self._reserved.closed else ''})"

    def _repr_html_(self) -> str:
        return pool_table(self)

    def __enter__(self) -> ResourcePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _unknown(host: HostProcess) -> dict[str, Any]:
    return {"node": host.node_name, "device": "", "name": "", "memory": None}


def _part(reserved: _Reserved, members: Sequence[int]) -> ResourcePool:
    pool = object.__new__(ResourcePool)
    pool._reserved, pool.members = reserved, tuple(members)
    return pool


def _start_controller(session: Session) -> None:
    """Start a process without a device; it outlives pools, so a notebook can close one and open the next."""
    name = f"{session.name}-controller"
    session.controller_pool = pool = _part(_Reserved(session, name, *session.backend.start_hosts(name, ())), (0,))
    try:
        WorkerGroup(session, pool.ranks(CONTROLLER, ControllerWorker, {}, RankGrid()))
    except BaseException:
        pool.close()
        raise
