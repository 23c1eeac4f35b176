"""RayBackend: one Ray actor per device, on a joined or local cluster."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import ray
import ray.exceptions
import torch.distributed as dist
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hybridflow.cluster.backend import (
    CONTROLLER,
    Deadlines,
    HostProcess,
    RankCall,
    RankGroup,
    SessionBackend,
    node_numbers,
)
from hybridflow.cluster.call_request import arguments_sent, requests_of
from hybridflow.cluster.connection import Termination, connect
from hybridflow.cluster.device import check_cuda
from hybridflow.cluster.future import Failure, as_done, fetch, first_failure
from hybridflow.cluster.held_calls import HeldCall
from hybridflow.cluster.host import Host
from hybridflow.cluster.host_monitor import HostMonitor
from hybridflow.cluster.interactive import uninterrupted
from hybridflow.cluster.iterations import Iterations
from hybridflow.cluster.liveness import listening_socket
from hybridflow.cluster.orphan_cleanup import MARK, Watcher
from hybridflow.cluster.reservation import reserve, reserved_machines
from hybridflow.cluster.row_refs import IssuedCall, RankOutput
from hybridflow.cluster.startup import stage
from hybridflow.cluster.weight_channels import WeightChannels
from hybridflow.errors import WaitTimeoutError
from hybridflow.protocols.operation import Operation, operations

logger = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0
RemoteHost = ray.remote(max_restarts=0, max_task_retries=0)(Host)


class RayBackend(SessionBackend):
    """Connects to the cluster at `address` (or `RAY_ADDRESS`), or starts a local one with `devices` logical devices.

    On a local machine without CUDA a device is a logical slot, so a pool may be larger than the number of cores.
    """

    def __init__(
        self,
        address: str | None,
        devices: int | None,
        deadlines: Deadlines,
        deterministic: bool = False,
        prefetch: float | None = None,
    ) -> None:
        self.name, self.deadlines = uuid.uuid4().hex[:8], deadlines
        self._deterministic, self._prefetch = deterministic, prefetch
        self.iterations = Iterations(deadlines.peers)
        self.monitor = HostMonitor(self.iterations.incidents, deadlines.tolerate)
        self.channels = WeightChannels(self.iterations)
        self._latest = dict[Any, int]()  # by host: its last call
        self._store: dist.Store | None = None
        self._connected, self.directory = not ray.is_initialized(), ""
        self.termination = Termination()
        with self.termination.taken(), stage("starting Ray"):
            if self._connected:
                self.directory = connect(self.name, address or os.environ.get("RAY_ADDRESS"), devices)
            self._watcher = Watcher(self.name, self.directory)
            self.accelerators = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
            self.has_cuda = any(self.accelerators)
            atexit.register(self.close)
            if self.has_cuda and self.started_ray:
                check_cuda()

    @property
    def started_ray(self) -> bool:
        """Whether the cluster is this session's own."""
        return bool(self.directory)

    @cached_property
    def _store_address(self) -> tuple[str, int]:
        """Address of the rendezvous store of all process groups.

        The store runs in this process: torch waits at a store without a limit, so a stopped host must not hold it.
        """
        address = ray.util.get_node_ip_address()
        listener = listening_socket(address)  # the store's own socket would listen on all interfaces
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            *(address, port, None, True), wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return address, port

    def start_hosts(
        self, pool: str, per_node: Sequence[int], nodes: Sequence[str] = ()
    ) -> tuple[tuple[HostProcess, ...], PlacementGroup | None]:
        if not per_node:  # on the driver's machine, with which it lives and dies
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            host = self._start({"num_cpus": 0, "scheduling_strategy": here}, pool, 0, 0, False, 1)
            processes = (HostProcess(host, host.address.remote()),)
            self.monitor.watch(pool, processes)
            return processes, None
        kind, deadlines = "GPU" if self.has_cuda else "CPU", self.deadlines
        reserved = reserve(kind, per_node, nodes, self.started_ray, deadlines.devices, deadlines.peers)
        processes: tuple[HostProcess, ...] = ()
        try:
            with uninterrupted():
                processes = self._hosts(pool, per_node, reserved, bool(nodes))
        except BaseException:  # no pool knows them, and they would keep their devices
            self.stop_hosts(processes, reserved)
            raise
        return processes, reserved

    def _hosts(
        self, pool: str, per_node: Sequence[int], reserved: PlacementGroup, named: bool
    ) -> tuple[HostProcess, ...]:
        nodes = [node for node, count in enumerate(per_node) for _ in range(count)]
        bundles, machines = zip(*reserved_machines(reserved, per_node, named), strict=True)
        device = {"num_cpus": 0, "num_gpus": 1} if self.has_cuda else {"num_cpus": 1, "num_gpus": 0}
        hosts = []
        for rank, node in enumerate(nodes):
            where = PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=bundles[node])
            options = {**device, "scheduling_strategy": where}
            threads = self._threads(machines[node]["Resources"], len(nodes))
            hosts.append(self._start(options, pool, rank, len(nodes), self.has_cuda, threads))
        addresses = [host.address.remote() for host in hosts]
        world = f"{pool}/{uuid.uuid4().hex[:6]}"  # hosts that took the place of others meet one another only
        for host in hosts:
            host.join.remote(self._store_address, world)
        processes = tuple(
            HostProcess(host, address, node, machines[node]["NodeID"], machines[node]["NodeManagerHostname"])
            for host, address, node in zip(hosts, addresses, nodes, strict=True)
        )
        self.monitor.watch(pool, processes)
        return processes

    def _start(self, options: dict[str, Any], pool: str, rank: int, size: int, use_cuda: bool, threads: int) -> Any:
        host = RemoteHost.options(runtime_env={"env_vars": self._environment(threads)}, **options)
        return host.remote(pool, rank, size, use_cuda, threads, self.deadlines, self._deterministic, self._prefetch)

    def _threads(self, node: Mapping[str, float], hosts: int) -> int:
        """Threads of a host on a node with these resources; with a GPU for offloaded optimizers, which step there."""
        if not self.has_cuda:
            return 1 if self.started_ray else max(1, (os.cpu_count() or 1) // hosts)
        cores = len(os.sched_getaffinity(0)) if self.started_ray else int(node.get("CPU", 1))
        own = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        return int(own) if own else max(1, cores // int(node["GPU"]))

    def _environment(self, threads: int) -> dict[str, str]:
        names = {
            MARK: self.name,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path and os.path.isdir(path)),
            "TOKENIZERS_PARALLELISM": "false",
            # results above this size stay in the object store of their node, and are lost with it; smaller ones, such
            # as the heads of images (15 kB), go to the driver, to which Ray would send up to 100 kB
            "RAY_max_direct_call_object_size": "32768",
            # reuse memory for joined columns: new pages cost more than the copy
            "MALLOC_MMAP_THRESHOLD_": "33554432",
            "MALLOC_TRIM_THRESHOLD_": "268435456",
        }
        if self.started_ray:  # one machine: else gloo listens at the host name's address, NCCL on its first interface
            loopback = "lo0" if sys.platform == "darwin" else "lo"
            names |= {name: os.environ.get(name, loopback) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        if self.has_cuda:  # hardware queues: streams that share one wait for each other (docs/timesharing.md)
            names["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        else:
            names |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        return names

    def stop_hosts(self, hosts: Sequence[HostProcess], reserved: PlacementGroup | None) -> None:
        self.monitor.forget(hosts)
        for host in hosts:
            self._latest.pop(host.address, None)
        if not ray.is_initialized():
            return
        with contextlib.suppress(ray.exceptions.RayError):
            self.iterations.held.send()
        with contextlib.suppress(ray.exceptions.RayError):
            closing = [host.handle.close.remote() for host in hosts]
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
        with contextlib.suppress(ray.exceptions.RayError):
            for host in hosts:
                ray.kill(host.handle)
            if reserved is not None:
                remove_placement_group(reserved)

    def operations(self, worker_class: type, settings: Mapping[str, Any]) -> dict[str, Operation]:
        return operations(worker_class)

    def lost(self, hosts: Sequence[HostProcess]) -> list[HostProcess]:
        """Those of these host processes that are gone; takes a few seconds at most."""
        return self.monitor.find_lost(hosts)

    def build(self, ranks: RankGroup, uninitialized: bool = False) -> None:
        self.iterations.held.send()
        self.iterations.check_hosts(ranks.name, "__init__", ranks.hosts)
        self.monitor.built(ranks)
        nodes, settings = node_numbers([host.machine for host in ranks.hosts]), dict(ranks.settings)
        sent, seq = replace(ranks, settings=settings, hosts=()), self.iterations.sequence()
        with uninterrupted(), arguments_sent(ranks.name, settings | {"worker_class": ranks.worker_class}):
            built = [host.handle.create.remote(seq, sent, nodes, uninitialized) for host in ranks.hosts]
        with stage(_building(ranks)):
            self._results(ranks, "__init__", built)

    def tell(self, ranks: RankGroup, method: str, *arguments: Any) -> Callable[..., list[Any]]:
        self.iterations.held.send()
        self.iterations.check_hosts(ranks.name, method, ranks.hosts)
        with uninterrupted():
            refs = [host.handle.apply.remote(ranks.key, method, *arguments) for host in ranks.hosts]
        return partial(self._results, ranks, method, refs)

    def calls(self, ranks: RankGroup) -> list[dict[str, int]]:
        """How often each rank has run each method, once all calls so far have ended. Errors: as `ask`."""
        self.iterations.held.send()
        return self._results(ranks, "calls", [host.handle.calls.remote(ranks.key) for host in ranks.hosts])

    def _results(self, ranks: RankGroup, method: str, refs: Sequence[Any], seconds: float | None = None) -> list[Any]:
        call = self.iterations.new_call()
        call.statuses += self._outputs(ranks, method, refs, call)
        try:
            return fetch(refs, call.statuses, seconds)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"{error} Its hosts may still be at it: close the pool and make a new one, or give more time by "
                f"hf.init(peer_timeout=...)."
            ) from None

    def issue(
        self, ranks: RankGroup, calls: Sequence[RankCall | None], partners: frozenset[str] = frozenset()
    ) -> list[RankOutput | None]:
        method, seq = next(((call.method, call.seq) for call in calls if call is not None), ("", 0))
        held = self.iterations.held
        if not (partners and held.accepts(ranks)):
            held.send()
        self.iterations.check_hosts(ranks.name, method, ranks.hosts, deferrable=True)
        issued, out = self.iterations.new_call(), list[RankOutput | None]()
        requests = requests_of(calls, f"{ranks.name}.{method}", self.iterations.step, issued.inputs)
        for host, call in zip(ranks.hosts, calls, strict=True):
            if call is not None:
                before, self._latest[host.address] = self._latest.get(host.address, 0), call.seq
                if ranks.spec.waits:
                    self.monitor.announce(host, call, before)
        if partners:
            out = held.hold(HeldCall(ranks, seq, method, requests, issued), partners, self.iterations.origin)
            self.iterations.issued(issued.statuses)
            return out
        with uninterrupted():
            for rank, (host, call, request) in enumerate(zip(ranks.hosts, calls, requests, strict=True)):
                if call is None or request is None:
                    out.append(None)
                    continue
                origin = self.iterations.origin(ranks.name, rank, method, host)
                if call.writes:
                    ref, status = host.handle.call_writing.remote(*request.arguments)
                    out.append(RankOutput(ref, call.rows, origin, issued, host.address))
                    issued.statuses.append(RankOutput(status, None, origin, issued, host.address))
                else:
                    both = RankOutput(host.handle.call.remote(*request.arguments), None, origin, issued, host.address)
                    out.append(both)
                    issued.statuses.append(both)
            self.iterations.issued(issued.statuses)
        return out

    def drop(self, ranks: RankGroup, wait: float) -> Failure | None:
        self.iterations.held.send()
        self.channels.close(ranks.key)
        self.monitor.dropped(ranks)
        with uninterrupted():
            dropping = [host.handle.drop.remote(ranks.key) for host in ranks.hosts]
        answers = []
        for output in itertools.chain.from_iterable(as_done(self._outputs(ranks, "close", dropping), wait)):
            with contextlib.suppress(ray.exceptions.RayError):  # the host may be gone
                answers.append(ray.get(output.ref))
        if (failure := first_failure(answers)) is not None:
            logger.warning("%s was not freed everywhere: %s", ranks.name, failure.error)
        return failure

    def close(self) -> None:
        """Leave the cluster; stop it if it was started here. Can be called again."""
        atexit.unregister(self.close)
        self.monitor.close()
        if ray.is_initialized() and self._connected:
            ray.shutdown()
        self.iterations = Iterations(self.deadlines.peers)
        self._watcher.sweep()
        self._store = None
        self.termination.give_back()

    def _outputs(
        self, ranks: RankGroup, method: str, refs: Sequence[Any], call: IssuedCall | None = None
    ) -> list[RankOutput]:
        return [
            RankOutput(ref, 0, self.iterations.origin(ranks.name, rank, method, host), call, host.address)
            for rank, (ref, host) in enumerate(zip(refs, ranks.hosts, strict=True))
        ]


def _building(ranks: RankGroup) -> str:
    """The stage in which a group is built."""
    if ranks.name == CONTROLLER:
        return "starting host processes"
    parts = ["loading weights"] * (ranks.settings.get("model") is not None)
    parts += ["starting vLLM"] * (ranks.settings.get("generate") is not None)
    return f"{ranks.name}: {', '.join(parts) or 'starting'}"
