"""GroupSizes: a group that changes its data parallel size between calls, on the first devices of its pool.

    sizes 1, 2, 4 of p*t = 1 on a pool of 4:   [0]  [0 1]  [0 1 2 3]     each built once, all but one asleep

    resize(4):  wake up the ranks of 4  ->  optimizer state travels  ->  the group is there  ->  its old ranks sleep

A switch has two phases. Until all state has arrived, the old ranks are the group: they are only read, and a failure
sends the new ranks back to sleep. The driver then moves the group in one assignment; what fails later costs nothing but
ranks that have to be built again. Ranks that sleep keep their process groups, plans and tensor objects, without memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.pool import ResourcePool
from hybridflow.driver import check_group, move_state
from hybridflow.errors import ConfigError, HybridFlowError, PlacementError, add_outcome
from hybridflow.settings import require
from hybridflow.workers.model_worker import ModelWorker
from hybridflow.workers.placing import check_memory, ranks_on

logger = logging.getLogger(__name__)
_DROP_SECONDS = 1.0  # peers of a lost rank may still wait for it
_METHOD = "resize"


@dataclass(frozen=True)
class Resized:
    """A switch from one data parallel size to another: its seconds, from the end of all earlier calls on both sizes'
    devices, and the bytes that travelled between ranks."""

    from_size: int
    to_size: int
    seconds: float = 0.0
    bytes: int = 0


class GroupSizes:
    """A group in several data parallel sizes, of which one has its state: size s is on `pool[: s * p * t]`.

    The group must be at one of `sizes`. The ranks of all others are built here, with all process groups of their own,
    and sleep; those between two sizes are made at the first switch between them. While a switch runs, devices of both
    sizes hold the state twice.

    A group that does not train keeps its weights in each size that it has visited, and receives them again only when
    they have changed; with its `offload=True` they are in host memory between calls.

    Errors, before anything is built: PlacementError when sizes, devices or their memory do not fit, ConfigError for
    groups that generate, train adapters or have no model, ModelError when the model does not divide. WorkerError of a
    rank that cannot be built.
    """

    def __init__(self, group: WorkerGroup, pool: ResourcePool, sizes: Iterable[int]) -> None:
        self.group, self.pool, self.sizes = group, pool, _checked(group, pool, sizes)
        self._settings = group.settings
        self._current: dict[str, int] = {}  # frozen weights: the version that ranks have, by key
        if group.session.traces:
            return
        planned = {size: self._ranks(size) for size in self.sizes if size != self.size}
        for ranks in planned.values():
            check_memory(pool, [ranks], leaving=group.ranks)
        try:
            for size, ranks in planned.items():
                self._build(size, ranks)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The present data parallel size."""
        return max(self.sizes) if self.group.session.traces else self.group.grid.d

    def resize(self, size: int) -> Resized:
        """Move the group to another of its sizes. Earlier calls run first, at the old size; batches stay valid.

        Blocks until done. Errors, with the group unchanged: PlacementError for an unknown size, a closed group, or
        too little memory; WorkerError of a rank that failed or was lost on the way.
        """
        group = self.group
        group.check_open()
        if type(size) is not int or size not in self.sizes:
            raise PlacementError(f"{group.name} has the data parallel sizes {list(self.sizes)}, asked for {size!r}.")
        before = self.size
        if not group.session.traces:
            self._check_place()
        if size == before or group.session.traces:
            return Resized(before, before)
        backend, old = group.session.backend, group.ranks
        new = group.sleeping.get(size) or self._ranks(size)
        check_memory(self.pool, [new], leaving=old)  # also for groups that were placed since
        if size not in group.sleeping:  # after lost hosts
            self._build(size, new)
        _, ran = (backend.calls(ranks) for ranks in (old, new))  # waits for all earlier calls
        start = time.monotonic()
        try:
            moved = self._fill(old, new)
        except BaseException as error:
            self._undo(size, new)
            add_outcome(error, f"{group.name} was not resized: it is still at {old}, with its state.")
            raise
        del group.sleeping[size]
        group.sleeping[before] = old
        group.move_to(new, ran[0])
        backend.monitor.built(new)
        self._leave(before, old)
        return Resized(before, size, time.monotonic() - start, moved)

    def close(self) -> None:
        """Free the ranks of all sizes except the present one, where the group stays. Can be called again."""
        for size in list(self.group.sleeping):
            self._drop(size)

    @property
    def _trains(self) -> bool:
        return self.group.settings.get("optim") is not None

    def _ranks(self, size: int) -> RankGroup:
        """The ranks of a size, not built, after all checks."""
        group, now = self.group, self.group.ranks
        where = self.pool.part(self.pool.members[: size * now.grid.p * now.grid.t])
        grid = replace(now.grid, d=size) if now.own_grid else None
        return ranks_on(group.worker_class, where, now.settings, group.name, grid, instead_of=group)

    def _build(self, size: int, ranks: RankGroup) -> RankGroup:
        backend = self.group.session.backend
        self.group.sleeping[size] = ranks
        try:
            backend.build(ranks, uninitialized=True)
            backend.ask(ranks, "sleep")
        except BaseException:
            self._drop(size)
            raise
        backend.monitor.dropped(ranks)  # only the group's present ranks are watched
        return ranks

    def _fill(self, old: RankGroup, new: RankGroup) -> int:
        """Give the new ranks memory and the state of the old ones; returns the bytes that travelled."""
        group, version = self.group, self.group.weights_version
        if not self._trains:
            self._current[old.key] = version
            if self._current.get(new.key) == version:
                return 0
            self._current.pop(new.key, None)
        group.session.backend.ask(new, "wake_up")
        moved = move_state(group, old, new, _METHOD)
        if not self._trains:
            self._current[new.key] = version
        return moved

    def _undo(self, size: int, new: RankGroup) -> None:
        """Send the new ranks back to sleep. Their channels are made again: a transfer may have ended half-way."""
        backend = self.group.session.backend
        backend.channels.close(new.key)
        try:
            backend.tell(new, "sleep")
        except HybridFlowError:  # a host is lost
            self._drop(size)

    def _leave(self, size: int, old: RankGroup) -> None:
        """The group has left the old ranks: free their memory. They are dropped if that fails."""
        backend = self.group.session.backend
        backend.monitor.dropped(old)
        if not self._trains:
            return
        try:
            backend.ask(old, "sleep")
        except HybridFlowError:
            logger.warning(
                "%s: its ranks of size %d are lost, and built again when needed", old.name, size, exc_info=True
            )
            self._drop(size)

    def _drop(self, size: int) -> None:
        self.group.session.backend.drop(self.group.sleeping.pop(size), wait=_DROP_SECONDS)

    def _check_place(self) -> None:
        """Errors: PlacementError when the group was moved by other means."""
        group, first = self.group, self.pool.members[: self.group.grid.size]
        if (group.settings, group.pool_name, group.members) != (self._settings, self.pool.name, first):
            raise PlacementError(
                f"{group.name} is at {group.ranks} on the devices {list(group.members)}, moved by other means than its "
                f"sizes {list(self.sizes)}: make new GroupSizes."
            )


def _checked(group: WorkerGroup, pool: ResourcePool, sizes: Any) -> tuple[int, ...]:
    """The sizes, ascending. Errors: see `GroupSizes`."""
    check_group("GroupSizes", group)
    name, worker, settings = group.name, group.worker_class, group.settings
    if not issubclass(worker, ModelWorker) or settings.get("model") is None:
        raise ConfigError(f"GroupSizes({name}): {worker.__name__} has no model whose data parallel size could change.")
    require(not (why := group.ranks.spec.fixed), why)
    if settings.get("generate") is not None:
        raise ConfigError(
            f"GroupSizes({name}): it generates, and its vLLM engine would be built anew at every switch. Give "
            f"{worker.__name__}.on(..., generate=None) and generate with a RolloutWorker."
        )
    if not isinstance(pool, ResourcePool):
        raise ConfigError(f"GroupSizes({name}, {pool!r}): give the ResourcePool that the group is on.")
    pool.check_open()
    asked = list(sizes) if isinstance(sizes, Iterable) else []
    if not asked or any(type(size) is not int or size < 1 for size in asked):
        raise PlacementError(f"GroupSizes({name}, sizes={sizes!r}): give data parallel sizes, like (1, 2, 4).")
    found = sorted({*asked})
    if group.session.traces:
        return tuple(found)
    if group.sleeping:
        raise PlacementError(f"{name} has GroupSizes already: close these first.")
    if group.has_replicas:
        raise PlacementError(f"GroupSizes({name}): its placement has other layouts for some calls.")
    if getattr(settings["train"], "dp", None) is not None:
        raise PlacementError(f"GroupSizes({name}): {settings['train']!r} fixes its size. Leave out dp=.")
    grid, first = group.grid, pool.members[: group.grid.size]
    if (group.pool_name, group.members) != (pool.name, first):
        raise PlacementError(
            f"GroupSizes({name}): the group must lie on the first devices of the pool, {list(first)}; it lies on "
            f"{list(group.members)}{'' if group.pool_name == pool.name else ' of another pool'}."
        )
    if grid.d not in found:
        raise PlacementError(f"{name} has the data parallel size {grid.d}: it must be one of its sizes {found}.")
    if found[-1] * grid.p * grid.t > pool.size:
        raise PlacementError(
            f"{name} at size {found[-1]} asks for p*t*d = {grid.p}*{grid.t}*{found[-1]} devices, the pool has "
            f"{pool.size}."
        )
    return tuple(found)
