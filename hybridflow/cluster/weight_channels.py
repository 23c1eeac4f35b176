"""Weight channels: which groups' ranks exchange weights, as the driver knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.failure import Status
from hybridflow.cluster.future import Future
from hybridflow.cluster.iterations import Iterations
from hybridflow.cluster.row_refs import CallOrigin, IssuedCall, RankOutput
from hybridflow.cluster.weight_transfer import ChannelSpec, Process, Setup, TransferTask
from hybridflow.engine3d.layout import Layout


@dataclass
class _Channel:
    """The lists are in the order of the channel's ranks; `known` are the payloads whose setup hosts have."""

    spec: ChannelSpec
    hosts: list[Any]
    addresses: list[Any]
    origins: list[tuple[str, int]]
    known: set[str] = field(default_factory=set)
    last: IssuedCall | None = None

    def failed(self) -> bool:
        """Whether the latest transfer is over and failed, after which its ranks may be out of step."""
        refs = [] if self.last is None else [status.ref for status in self.last.statuses]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        try:
            return any(isinstance(status, Status) and status.failure is not None for status in ray.get(ready))
        except ray.exceptions.RayError:  # a host that is gone
            return True

    def open(self, method: str) -> tuple[RankOutput, ...]:
        """Ask every host for its end; what they answer."""
        origins = [CallOrigin(*origin, method) for origin in self.origins]
        refs = [host.open_channel.remote(self.spec, at) for host, at in zip(self.hosts, origins, strict=True)]
        return tuple(RankOutput(ref, None, at) for ref, at in zip(refs, origins, strict=True))

    def close(self) -> None:
        if ray.is_initialized():
            for host in self.hosts:
                host.close_channel.remote(self.spec.name)


class WeightChannels:
    """The channels of a session, each made for its first transfer and kept until the ranks of one of its sides go."""

    def __init__(self, iterations: Iterations) -> None:
        self._iterations = iterations
        self._channels: dict[tuple[str, str], _Channel] = {}

    def send(
        self,
        source: RankGroup,
        destination: RankGroup,
        payload: str,
        layouts: Callable[[], tuple[Layout, Layout]],
        method: str = "sync_weights",
        required: bool = False,
    ) -> Future:
        """Issue a transfer to every host of both sides; returns at once with a future of its `bytes` and `seconds`.

        `layouts` gives those of both sides when this payload travels here for the first time; what it raises ends it
        before anything is issued. With `required` the destination makes no call if it fails.
        """
        key, setup = (source.key, destination.key), None
        if self.failed(source, destination):
            self._channels.pop(key).close()
        channel = self._channels.get(key)
        if channel is None or payload not in channel.known:
            sides = layouts()  # first: what it raises leaves nothing behind
            opened = ()
            if channel is None:
                channel = self._channels[key] = self._make(source, destination)
                opened = channel.open(method)
            setup = ray.put(Setup(*sides, opened))  # one object for all hosts
        seq = self._iterations.sequence()
        task = TransferTask(seq, method, channel.spec.name, source.key, destination.key, payload, required)
        issued, results = self._iterations.new_call(), []
        for host, address, origin in zip(channel.hosts, channel.addresses, channel.origins, strict=True):
            ref, status = host.transfer.remote(task, setup)
            issued.statuses.append(RankOutput(status, None, CallOrigin(*origin, method), issued, address))
            results.append(RankOutput(ref, None, CallOrigin(*origin, method), issued, address))
        self._iterations.issued(issued.statuses)
        channel.known.add(payload)
        channel.last = issued
        return Future(tuple(results[:1]))

    def failed(self, source: RankGroup, destination: RankGroup) -> bool:
        """Whether the latest transfer between them is over and failed."""
        channel = self._channels.get((source.key, destination.key))
        return channel is not None and channel.failed()

    def _make(self, source: RankGroup, destination: RankGroup) -> _Channel:
        at: dict[Process, int] = {}
        hosts, addresses, origins, machines = [], [], [], []
        for ranks in (source, destination):
            for rank, member in enumerate(ranks.members):
                if at.setdefault((ranks.pool_name, member), len(hosts)) == len(hosts):
                    hosts.append(ranks.hosts[rank])
                    addresses.append(ranks.addresses[rank])
                    machines.append(ranks.machines[rank])
                    origins.append((ranks.name, rank))
        spec = ChannelSpec(
            name=f"channel/{source.key}/{destination.key}/{self._iterations.sequence()}",
            processes=tuple(at),
            nodes=node_numbers(machines),
            senders=tuple(at[source.pool_name, member] for member in source.members),
            receivers=tuple(at[destination.pool_name, member] for member in destination.members),
        )
        return _Channel(spec, hosts, addresses, origins)

    def close(self, key: str) -> None:
        """Close the channels of these ranks."""
        for pair in [pair for pair in self._channels if key in pair]:
            self._channels.pop(pair).close()


def node_numbers(machines: Sequence[str]) -> tuple[int, ...]:
    """A number for each machine, counted from 0 in order of appearance."""
    numbers = {machine: i for i, machine in enumerate(dict.fromkeys(machines))}
    return tuple(numbers[machine] for machine in machines)
