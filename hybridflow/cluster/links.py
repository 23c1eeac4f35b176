"""Links: which groups' ranks exchange weights, as the driver knows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions

from hybridflow.cluster.columns import Issued, Origin, Part
from hybridflow.cluster.exchange import Exchange, News
from hybridflow.cluster.future import Future
from hybridflow.cluster.placed import Placed, numbered
from hybridflow.cluster.store import Status
from hybridflow.cluster.weight_link import Cargo, LinkSpec, Process
from hybridflow.engine3d.layout import Layout

if TYPE_CHECKING:
    from hybridflow.cluster.session import Session


@dataclass
class _Link:
    """From the ranks of `source` to those of `destination`; `hosts` and `origins` are those of the link's ranks."""

    spec: LinkSpec
    source: Placed
    destination: Placed
    hosts: list[Any]
    origins: list[tuple[str, int]]
    known: set[str] = field(default_factory=set)
    last: Issued | None = None

    def failed(self) -> bool:
        """Whether the latest exchange is over and failed, after which its ranks may be out of step."""
        refs = [] if self.last is None else [status.ref for status in self.last.statuses]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        try:
            return any(isinstance(status, Status) and status.failure is not None for status in ray.get(ready))
        except ray.exceptions.RayError:  # a host that is gone
            return True

    def open(self, method: str) -> tuple[Part, ...]:
        """Ask every host for its end; what they answer."""
        origins = [Origin(*origin, method) for origin in self.origins]
        refs = [host.open_link.remote(self.spec, at) for host, at in zip(self.hosts, origins, strict=True)]
        return tuple(Part(ref, None, at) for ref, at in zip(refs, origins, strict=True))

    def close(self) -> None:
        for host in self.hosts:
            host.close_link.remote(self.spec.name)


class Links:
    """The links of a session, each made for its first exchange and kept until the ranks of one of its sides go."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._links: dict[tuple[str, str], _Link] = {}

    def send(
        self,
        source: Placed,
        destination: Placed,
        cargo: str,
        layouts: Callable[[], tuple[Layout, Layout]],
        method: str = "sync_weights",
        due: bool = False,
    ) -> Future:
        """Issue an exchange to every host of both sides; returns at once with a future of its figures.

        `layouts` are asked for those of both sides when this cargo travels here for the first time; what they raise
        ends it before anything is issued. With `due` the destination makes no call if it fails.
        """
        link, news = self._known(source, destination), None
        if link is None or cargo not in link.known:
            told = Cargo(cargo, *layouts())  # first: what it raises leaves nothing behind
            opened = ()
            if link is None:
                link = self._links[source.key, destination.key] = self._make(source, destination)
                opened = link.open(method)
            news = ray.put(News(told, opened))  # one object for all hosts
        task = Exchange(self._session.sequence(), method, link.spec.name, source.key, destination.key, cargo, due)
        issued = Issued([], self._session.iterations.reported)
        parts = []
        for host, origin in zip(link.hosts, link.origins, strict=True):
            ref, status = host.exchange.remote(task, news)
            issued.statuses.append(Part(status, None, Origin(*origin, method), issued))
            parts.append(Part(ref, None, Origin(*origin, method), issued))
        self._session.iterations.issued(issued.statuses)
        link.known.add(cargo)
        link.last = issued
        return Future(tuple(parts[:1]), None, self._session.deadlines.peers)

    def failed(self, source: Placed, destination: Placed) -> bool:
        """Whether the latest exchange between them is over and failed."""
        link = self._links.get((source.key, destination.key))
        return link is not None and link.failed()

    def _known(self, source: Placed, destination: Placed) -> _Link | None:
        key = (source.key, destination.key)
        if (found := self._links.get(key)) is not None and found.failed():
            self._links.pop(key).close()
        return self._links.get(key)

    def _make(self, source: Placed, destination: Placed) -> _Link:
        at: dict[Process, int] = {}
        hosts, origins = [], []
        for placed in (source, destination):
            for rank, (host, member) in enumerate(zip(placed.hosts, placed.members, strict=True)):
                if at.setdefault((placed.pool_name, member), len(hosts)) == len(hosts):
                    hosts.append(host)
                    origins.append((placed.name, rank))
        pools = {pool.name: pool for pool in self._session.pools}
        machines = [pools[name].part([member]).machines[0] for name, member in at]
        spec = LinkSpec(
            name=f"link/{source.key}/{destination.key}/{self._session.sequence()}",
            processes=tuple(at),
            nodes=numbered(machines),
            senders=tuple(at[source.pool_name, member] for member in source.members),
            receivers=tuple(at[destination.pool_name, member] for member in destination.members),
            store_pool=source.pool_name,
            store=pools[source.pool_name].store_address(),
        )
        return _Link(spec, source, destination, hosts, origins)

    def close(self, key: str) -> None:
        """Close the links of these ranks."""
        for pair in [pair for pair in self._links if key in pair]:
            self._links.pop(pair).close()
