"""Placed: the ranks of a group where they are, as the driver builds, asks and frees them."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from ray import cloudpickle

from hybridflow.cluster.columns import Issued, Origin, Part
from hybridflow.cluster.host import GroupSpec
from hybridflow.cluster.store import Failure, fetch, first_failure
from hybridflow.errors import ConfigError, PlacementError
from hybridflow.topology import RankGrid

if TYPE_CHECKING:
    from hybridflow.cluster.session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placed:
    """Rank i of the group `name` runs in the process `hosts[i]`, which has rank `members[i]` in its pool.

    `settings` are those of the worker class, all of them; with `own_grid` the grid was given beside them.
    Hosts know these ranks by `key`, which is never used again.
    Errors: PlacementError when the grid does not fit.
    """

    session: Session = field(repr=False)
    name: str
    worker_class: type
    hosts: tuple[Any, ...] = field(repr=False)
    members: tuple[int, ...]
    pool_name: str
    settings: Mapping[str, Any]
    grid: RankGrid
    own_grid: bool = False
    key: str = ""

    def __post_init__(self) -> None:
        if (grid := self.grid).size != len(self.members):
            raise PlacementError(
                f"{self.name} has a grid of p*t*d = {grid.p}*{grid.t}*{grid.d} = {grid.size} ranks, "
                f"the pool has {len(self.members)} devices."
            )
        object.__setattr__(self, "key", f"{self.pool_name}/{self.name}/{self.session.sequence()}")

    @property
    def machines(self) -> list[str]:
        """The cluster's own name of the node of each rank; none for processes outside of pools."""
        pool = next((pool for pool in self.session.pools if pool.name == self.pool_name), None)
        return pool.part(self.members).machines if pool else []

    def build(self, unset: bool = False) -> None:
        """Build the worker on every rank and wait for it; with `unset`, its weights will be written from outside.

        Errors: WorkerError when a rank cannot be built, ConfigError for a setting that cannot be sent.
        """
        spec = GroupSpec(self.key, self.name, self.grid, self.members, numbered(self.machines))
        seq, settings = self.session.sequence(), dict(self.settings)
        with arguments_sent(self.name, settings | {"worker_class": self.worker_class}):
            built = [host.create.remote(seq, spec, self.worker_class, settings, unset) for host in self.hosts]
        self._results("__init__", built)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(worker, *arguments)` of every rank; waits. Errors: WorkerError of a rank where it raised."""
        refs = [host.apply.remote(self.key, function, *arguments) for host in self.hosts]
        return self._results(function.__name__, refs)

    def _results(self, method: str, refs: Sequence[Any]) -> list[Any]:
        call = Issued([], self.session.iterations.reported)
        call.statuses += [Part(ref, 0, Origin(self.name, rank, method), call) for rank, ref in enumerate(refs)]
        return fetch(refs, call.statuses, self.session.deadlines.peers)

    def drop(self, wait: float) -> Failure | None:
        """Free the ranks, and the links over which their weights travelled; wait at most so many seconds.

        The failure of a rank that could not free its model, which is logged too.
        """
        self.session.links.close(self.key)
        dropping = [host.drop.remote(self.key) for host in self.hosts]
        done, _ = ray.wait(dropping, num_returns=len(dropping), timeout=wait)
        answers = []
        for ref in done:
            with contextlib.suppress(ray.exceptions.RayError):  # a host that is gone holds nothing
                answers.append(ray.get(ref))
        if (failure := first_failure(answers)) is not None:
            logger.warning("%s was not freed everywhere: %s", self.name, failure.error)
        return failure


def numbered(machines: Sequence[str]) -> tuple[int, ...]:
    """A number for each machine, counted from 0 in order of appearance."""
    numbers = {machine: i for i, machine in enumerate(dict.fromkeys(machines))}
    return tuple(numbers[machine] for machine in machines)


@contextlib.contextmanager
def arguments_sent(where: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Name the setting that cannot be pickled, where Ray shows everything around it."""
    try:
        yield
    except TypeError:
        for name, value in settings.items():
            try:
                cloudpickle.dumps(value)
            except (TypeError, ValueError, AttributeError, pickle.PicklingError) as reason:
                raise ConfigError(f"{where}: {name}={value!r} cannot be sent to a host: {reason}.") from None
        raise
