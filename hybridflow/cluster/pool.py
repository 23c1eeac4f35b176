"""ResourcePool: devices, and one host process for each (paper, section 4.1)."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.cluster.future import Deadline
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.helper import Helper
from hybridflow.cluster.host import Event, Host, HostSpec
from hybridflow.cluster.leftovers import MARK
from hybridflow.cluster.placed import Placed
from hybridflow.cluster.session import Session
from hybridflow.cluster.traced import TracedSession
from hybridflow.errors import PlacementError
from hybridflow.topology import RankGrid

_PLACE_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_RETURN_SECONDS = 4.0
RemoteHost = ray.remote(max_restarts=0, max_task_retries=0)(Host)


@dataclass
class _Reserved:
    """What all slices of a pool share."""

    name: str
    hosts: list[Any]
    node_of: list[int]
    placement: PlacementGroup | None
    store: Any
    session: Session
    machine_of: list[str] = field(default_factory=list)
    shared: bool = False
    closed: bool = False


class ResourcePool:
    """`ResourcePool([8, 8])`: eight devices on each of two nodes, each with a host process that holds any models.

    Groups on one pool take turns in call order; groups on different pools run at the same time. `pool[0:4]` is a
    slice that shares its hosts with the pool. On a local machine without CUDA, devices are logical.

    Errors: PlacementError when the cluster has not got the devices.
    """

    def __init__(self, devices: Sequence[int] | int) -> None:
        per_node = [devices] if isinstance(devices, int) else list(devices)
        if not per_node or any(type(n) is not int or n < 1 for n in per_node):
            raise PlacementError(f"ResourcePool({devices!r}): give devices per node, like ResourcePool([8, 8]).")
        assignment = Session.current().assignment
        found = self._open(per_node) if assignment is None else self.over(assignment.nodes)
        self._reserved, self.members = found._reserved, found.members

    @classmethod
    def over(cls, nodes: Sequence[int]) -> ResourcePool:
        """The pool over these devices of each node that all groups of a placement share: the session has one of it.

        It is opened by the first that asks. Errors: PlacementError when the cluster has not got the devices.
        """
        pools = Session.current().pools
        found = next((p for p in pools if p._reserved.shared and p.devices_of_nodes == tuple(nodes)), None)
        return found or cls._open(list(nodes), shared=True)

    @classmethod
    def _open(cls, per_node: list[int], shared: bool = False) -> ResourcePool:
        session = Session.current()
        pool = object.__new__(cls)
        pool._reserved = _reserved(per_node, session)
        pool._reserved.shared = shared
        pool.members = tuple(range(sum(per_node)))
        session.pools.append(pool)
        if not session.has_helper:
            session.set_helper(_start_helper(session))
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
    def hosts(self) -> list[Any]:
        """Handles of this pool's (or slice's) host processes."""
        return [self._reserved.hosts[i] for i in self.members]

    @property
    def nodes(self) -> list[int]:
        """Index of the node of each device."""
        return [self._reserved.node_of[i] for i in self.members]

    @property
    def machines(self) -> list[str]:
        """The cluster's own name of the node of each device; nodes of a local pool may be one machine."""
        if not self._reserved.machine_of:
            assert self._reserved.placement is not None  # a trace has no machines, and nobody who asks for them
            where = placement_group_table(self._reserved.placement)["bundles_to_node_id"]
            self._reserved.machine_of += [where[node] for node in self._reserved.node_of]
        return [self._reserved.machine_of[i] for i in self.members]

    def store_address(self) -> tuple[str, int]:
        """Where the pool's rendezvous store listens; waits for its first host to start it."""
        return ray.get(self._reserved.store, timeout=self.session.deadlines.peers)

    def part(self, members: Sequence[int]) -> ResourcePool:
        """The slice with these ranks of the whole pool."""
        found = object.__new__(ResourcePool)
        found._reserved, found.members = self._reserved, tuple(members)
        return found

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int | slice) -> ResourcePool:
        """A slice of the pool: the same host processes, fewer of them."""
        if self._reserved.shared and self.session.assignment is not None:
            return self  # which devices each group has, the placement says
        picked = self.members[key] if isinstance(key, slice) else (self.members[key],)
        if not picked:
            raise PlacementError(f"the slice {key} of a pool of {self.size} devices is empty.")
        return self.part(picked)

    def check_open(self) -> None:
        if self._reserved.closed:
            raise PlacementError("this pool is closed: make a new ResourcePool.")

    def events(self) -> list[Event]:
        """What the hosts of this pool ran and when, by start time; waits for calls under way."""
        self.check_open()
        found = ray.get([host.events.remote() for host in self.hosts], timeout=self.session.deadlines.peers)
        return sorted({event for host in found for event in host}, key=lambda e: (e.start, e.rank))

    def close(self) -> None:
        """Free all models and devices of the whole pool. Can be called again."""
        reserved = self._reserved
        if reserved.closed:
            return
        reserved.closed = True
        if reserved.placement is None:  # a trace
            return
        for group in [g for g in reserved.session.groups.values() if g.pool_name == reserved.name]:
            group.forget_hosts()
        with contextlib.suppress(ray.exceptions.RayError):
            closing = [host.close.remote() for host in reserved.hosts]
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
        for host in reserved.hosts:
            ray.kill(host)
        remove_placement_group(reserved.placement)
        reserved.session.pools = [pool for pool in reserved.session.pools if pool.name != reserved.name]

    @property
    def devices_of_nodes(self) -> tuple[int, ...]:
        return tuple(self.nodes.count(node) for node in dict.fromkeys(self.nodes))

    def __repr__(self) -> str:
        return f"ResourcePool({list(self.devices_of_nodes)}{', closed' if self._reserved.closed else ''})"

    def __enter__(self) -> ResourcePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _reserved(per_node: list[int], session: Session) -> _Reserved:
    """The devices and their host processes; in a trace, what stands for them."""
    name = f"{session.name}-{uuid.uuid4().hex[:6]}"
    node_of = [node for node, count in enumerate(per_node) for _ in range(count)]
    if isinstance(session, TracedSession):
        return _Reserved(name, session.hosts(len(node_of)), node_of, None, None, session)
    placement = _reserve(per_node, session)
    hosts, store = _start_hosts(name, node_of, placement, session)
    return _Reserved(name, hosts, node_of, placement, store, session)


def _reserve(per_node: list[int], session: Session) -> PlacementGroup:
    """A placement group with one bundle per node, after checking that it can ever be placed."""
    kind = "GPU" if session.has_cuda else "CPU"
    wanted = sum(per_node)
    total = int(ray.cluster_resources().get(kind, 0))
    asked = f"ResourcePool({per_node}) asks for {wanted} devices ({kind}s)"
    if wanted > total:
        more = "Make the pool smaller" + (
            f", or open the session with hybridflow.init(devices={wanted})."
            if session.started_ray and kind == "CPU"
            else " or add nodes to the cluster."
        )
        raise PlacementError(f"{asked}, the cluster has {total}. {more}")
    if (free := _free(kind, wanted)) < wanted:
        raise PlacementError(f"{asked}, {free} of the cluster's {total} are free. Close a pool or share this one.")
    nodes = [node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]]
    logical = session.started_ray and kind == "CPU"
    fitting = sorted(nodes, reverse=True)[: len(per_node)]
    fits = len(fitting) == len(per_node) and all(
        n >= k for n, k in zip(fitting, sorted(per_node, reverse=True), strict=True)
    )
    if not logical and not fits:
        raise PlacementError(f"{asked} on {len(per_node)} nodes, the cluster's nodes have {[int(n) for n in nodes]}.")
    bundles = [{kind: float(count)} for count in per_node]
    placement = placement_group(bundles, strategy="PACK" if logical or len(per_node) == 1 else "STRICT_SPREAD")
    if not placement.wait(timeout_seconds=_PLACE_SECONDS):
        remove_placement_group(placement)
        raise PlacementError(f"{asked}; the cluster did not place them within {_PLACE_SECONDS:g} s.")
    return placement


def _free(kind: str, wanted: int) -> int:
    """Free devices; those of a pool that was just closed come back only after a moment."""
    deadline = Deadline(_RETURN_SECONDS)
    while (free := int(ray.available_resources().get(kind, 0))) < wanted and deadline.left:
        time.sleep(0.05)
    return free


def _start_hosts(name: str, node_of: list[int], placement: PlacementGroup, session: Session) -> tuple[list[Any], Any]:
    """The host processes, and a reference to the address of their rendezvous store."""
    cores = os.cpu_count() or 1
    hosts = []
    for rank, node in enumerate(node_of):
        threads = 1 if session.started_ray else max(1, cores // len(node_of))
        spec = HostSpec(name, rank, len(node_of), session.has_cuda, threads, session.deadlines)
        hosts.append(
            RemoteHost.options(
                num_cpus=0 if session.has_cuda else 1,
                num_gpus=1 if session.has_cuda else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=node),
                runtime_env={"env_vars": _environment(session, threads)},
            ).remote(spec)
        )
    address = hosts[0].open_store.remote()
    for host in hosts:
        host.join.remote(address)
    return hosts, address


def _environment(session: Session, threads: int) -> dict[str, str]:
    names = {
        MARK: session.name,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path and os.path.isdir(path)),
        "TOKENIZERS_PARALLELISM": "false",
        # results above this size stay in the object store of their node; Ray would send up to 100 kB to the driver
        "RAY_max_direct_call_object_size": "8192",
        # joined columns come from memory that the process already has: new pages cost more than the copy
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "268435456",
    }
    if not session.has_cuda:
        names |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return names


def _start_helper(session: Session) -> WorkerGroup:
    """A process without a device; it outlives pools, so that a notebook can close one and make the next."""
    spec = HostSpec(f"{session.name}-helper", 0, 0, False, 1, session.deadlines)
    host = RemoteHost.options(num_cpus=0, runtime_env={"env_vars": _environment(session, 1)}).remote(spec)
    return WorkerGroup(Placed(session, "hybridflow", Helper, (host,), (0,), spec.pool, {}, RankGrid()))
