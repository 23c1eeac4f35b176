"""The groups of `hf.Elastic`: where they may lie, the sizes that they can have, and what was measured of them.

    sizes 1, 2, 4 of p*t = 1 on a pool of 4:   [0]  [0 1]  [0 1 2 3]     each built once, all but one asleep

    resize(4):  wake up the ranks of 4  ->  optimizer state travels  ->  the group is there  ->  its old ranks sleep

A switch has two phases. Until all state has arrived, the old ranks are the group: they are only read, and a failure
sends the new ranks back to sleep. The driver then moves the group in one assignment; what fails later costs nothing but
ranks that have to be built again. Ranks that sleep keep their process groups, plans and tensor objects, without memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.pool import ResourcePool
from hybridflow.config import TrainStrategy, is_strategy
from hybridflow.driver import check_group, move_state
from hybridflow.errors import ConfigError, HostLostError, HybridFlowError, PlacementError, add_outcome
from hybridflow.planner.elastic.policies import POLICIES
from hybridflow.planner.elastic.simulation import Measured
from hybridflow.planner.elastic.state import Component, Policy, State, Switch
from hybridflow.settings import require
from hybridflow.workers.model_worker import ModelWorker
from hybridflow.workers.placing import check_memory, ranks_on

logger = logging.getLogger(__name__)
_DROP_SECONDS = 1.0  # peers of a lost rank may still wait for it


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

    The group must be at one of `sizes`. With a mapping, such as `{1: hf.Megatron(tp=2), 2: hf.Megatron(tp=2, pp=2)}`,
    a size has a strategy of its own, and s counts the p * t devices that the group has for d = 1 now. The ranks of all
    others are built here, with all process groups of their own, and sleep; those between two sizes are made at the
    first switch between them. While a switch runs, devices of both sizes hold the state twice.

    A group that does not train keeps its weights in each size that it has visited, and receives them again only when
    they have changed; with its `offload=True` they are in host memory between calls.

    Errors, before anything is built: PlacementError when sizes, devices or their memory do not fit, ConfigError for
    groups that generate, train adapters or have no model, ModelError when the model does not divide. WorkerError of a
    rank that cannot be built.
    """

    def __init__(
        self, group: WorkerGroup, pool: ResourcePool, sizes: Iterable[int] | Mapping[int, TrainStrategy]
    ) -> None:
        self.group, self.pool, self.sizes = group, pool, _checked(group, pool, sizes)
        self._strategies = dict(sizes) if isinstance(sizes, Mapping) else {}
        self._unit, self._start = group.grid.p * group.grid.t, group.settings
        self._current: dict[str, int] = {}  # frozen weights: the version that ranks have, by key
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
        """The present size."""
        return self.group.grid.size // self._unit

    def _settings(self, size: int) -> Mapping[str, Any]:
        return {**self._start, "train": self._strategies[size]} if size in self._strategies else self._start

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
        self._check_place()
        if size == before:
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
        where = self.pool.part(self.pool.members[: size * self._unit])
        grid = replace(now.grid, d=size) if now.own_grid and not self._strategies else None
        return ranks_on(group.worker_class, where, self._settings(size), group.name, grid, instead_of=group)

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
        moved = move_state(group, old, new, "resize")
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
        here = self._settings(self.size) if self.size in self.sizes else None
        if (group.settings, group.pool_name, group.members) != (here, self.pool.name, first):
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
    if group.sleeping:
        raise PlacementError(f"{name} has GroupSizes already: close these first.")
    if group.has_replicas:
        raise PlacementError(f"GroupSizes({name}): its placement has other layouts for some calls.")
    now = settings["train"]
    for strategy in sizes.values() if isinstance(sizes, Mapping) else (now,):
        require(is_strategy(strategy), f"GroupSizes({name}): {strategy!r} is no strategy such as hf.Megatron(tp=2).")
        if getattr(strategy, "dp", None) is not None:
            raise PlacementError(f"GroupSizes({name}): {strategy!r} fixes its size. Leave out dp=.")
    grid, first = group.grid, pool.members[: group.grid.size]
    if (group.pool_name, group.members) != (pool.name, first):
        raise PlacementError(
            f"GroupSizes({name}): the group must lie on the first devices of the pool, {list(first)}; it lies on "
            f"{list(group.members)}{'' if group.pool_name == pool.name else ' of another pool'}."
        )
    if grid.d not in found:
        raise PlacementError(f"{name} has the data parallel size {grid.d}: it must be one of its sizes {found}.")
    if isinstance(sizes, Mapping) and sizes[grid.d] != now:
        raise PlacementError(f"{name} has the strategy {now!r} at its size {grid.d}, not {sizes[grid.d]!r}.")
    if found[-1] * grid.p * grid.t > pool.size:
        raise PlacementError(
            f"{name} at size {found[-1]} asks for p*t*d = {grid.p}*{grid.t}*{found[-1]} devices, the pool has "
            f"{pool.size}."
        )
    return tuple(found)


class NotResizedError(HybridFlowError, RuntimeError):
    """The actor has its old size."""


class ElasticDevices:
    """The groups that share the devices of `pool`, in their sizes; see `hf.Elastic`."""

    def __init__(
        self,
        pool: ResourcePool,
        *,
        actor: WorkerGroup,
        rollout: WorkerGroup,
        inference: Sequence[WorkerGroup] | WorkerGroup = (),
        policy: str | Policy = "gain",
        sizes: Iterable[int] | Mapping[int, TrainStrategy] | None = None,
    ) -> None:
        require(isinstance(pool, ResourcePool), f"Elastic takes a ResourcePool, got {pool!r}.")
        pool.check_open()
        inference = [inference] if isinstance(inference, WorkerGroup) else list(inference)
        for group in (actor, rollout, *inference):
            require(
                isinstance(group, WorkerGroup), f"Elastic takes groups such as hf.ActorWorker.on(...), got {group!r}."
            )
            group.check_open()
        good = policy in POLICIES if isinstance(policy, str) else callable(policy)
        require(good, f"Elastic(policy={policy!r}): known are {', '.join(POLICIES)}, or a function.")
        self.policy: Policy = POLICIES[policy] if isinstance(policy, str) else policy
        self.pool, self.actor, self.rollout, self.inference = pool, actor, rollout, tuple(inference)
        self.events: list[Switch] = []
        """Every switch so far."""
        self._written, self._sizes = 0, list[GroupSizes]()
        self.measured = Measured(slots=getattr(rollout.settings.get("generate"), "max_sequences", 256))
        good = "advance_rows" in rollout.operations and not rollout.training
        good = good and not rollout.has_replica_for("generate_sequences")
        require(good, f"Elastic(rollout={rollout.name}): give hf.RolloutWorker.on(pool, ...).")
        followers = [group for group in inference if group.members == actor.members]
        apart = [group for group in inference if group not in followers]
        per_actor, per_rollout = actor.grid.p * actor.grid.t, rollout.grid.size // self._replicas
        own = sum(group.grid.size for group in apart)
        initial, most = actor.grid.d, pool.size // per_actor
        require(
            sizes is None or isinstance(sizes, Iterable), f"Elastic(sizes={sizes!r}): give several, such as (1, 2, 4)."
        )
        wanted = {initial, *(sizes if sizes is not None else _doubled(initial, most))}
        held = -(-initial * per_actor // per_rollout)  # rollout instances on the actor's devices
        self.static = State(
            event="start",
            devices=pool.size,
            rollout=Component(
                per_rollout, self._replicas - held, self._replicas - held, tuple(range(1, self._replicas + 1))
            ),
            inference=Component(1, own, own, (own,) if own else ()),
            actor=Component(per_actor, initial, initial, tuple(sorted(wanted))),
            rows=0, n=1, minibatches=1, running={}, speeds=self.measured.speeds(),
        )  # fmt: skip
        if not actor.session.traces:
            self._check(pool, apart, followers)
            require(
                held < self._replicas,
                f"Elastic: {actor.name} covers all {self._replicas} replicas of {rollout.name}: leave one beside it.",
            )
            self._build((actor, *followers), wanted, sizes if isinstance(sizes, Mapping) else {})

    @property
    def _replicas(self) -> int:
        return self.rollout.grid.generation().replicas

    def _build(self, groups: Sequence[WorkerGroup], sizes: set[int], strategies: Mapping[int, TrainStrategy]) -> None:
        """All sizes of the groups, of the actor with `strategies`, and the transfers between each and the present one,
        which are planned once."""
        initial = self.actor.grid.d
        try:
            for group in groups:
                own = {size: strategies.get(size, group.settings["train"]) for size in sizes} if strategies else sizes
                self._sizes.append(GroupSizes(group, self.pool, own if group is self.actor else sizes))
            for size in [*sorted(sizes - {initial}), max(sizes)]:
                self.resize(size)
                self.resize(initial)
        except BaseException:
            self.close()
            raise

    def _check(self, pool: ResourcePool, apart: Sequence[WorkerGroup], followers: Sequence[WorkerGroup]) -> None:
        actor, rollout = self.actor, self.rollout
        needed = actor.grid.p * actor.grid.t
        for group in followers:
            found = group.grid.p * group.grid.t
            require(
                found == needed,
                f"Elastic: {group.name} has {found} devices per data parallel rank and {actor.name} {needed}: a group "
                f"that follows its size needs as many.",
            )
        line = {member: at for at, member in enumerate(pool.members)}
        places = {}
        for group in (actor, rollout, *apart):
            if group.pool_name != pool.name or any(member not in line for member in group.members):
                raise ConfigError(f"Elastic: {group.name} lies on other devices than those of the given pool.")
            places[group.name] = [line[member] for member in group.members]
        starts = [places[group.name] == list(range(group.grid.size)) for group in (actor, rollout)]
        require(
            all(starts) and actor.grid.size < rollout.grid.size,
            f"Elastic: {actor.name} is on devices {places[actor.name]} and {rollout.name} on {places[rollout.name]} of "
            f"the pool: place both from its first device on, and the rollout on more devices than the actor.",
        )
        rest = sorted(at for group in apart for at in places[group.name])
        require(
            rest == list(range(rollout.grid.size, pool.size)),
            f"Elastic: the pool has {pool.size} devices, {rollout.name} the first {rollout.grid.size}, and inference "
            f"groups of their own {rest}: each device needs exactly one of them.",
        )

    def resize(self, instances: int) -> None:
        """The actor and the groups that follow it get this data parallel size. Errors: NotResizedError of the one that
        could not, when all have their old sizes; those of a lost host."""
        start = time.monotonic()
        done: list[tuple[GroupSizes, int]] = []
        try:
            for one in self._sizes:
                if one.size != instances:
                    done.append((one, one.size))
                    one.resize(instances)
        except HybridFlowError as error:
            if isinstance(error.__cause__, HostLostError) or self.lost():
                raise
            for one, before in done[:-1]:  # the last one has its old size
                one.resize(before)
            raise NotResizedError(str(error)) from error
        if done:
            self.measured.took("resize", time.monotonic() - start)

    def wait(self) -> None:
        """Wait until inference groups have run all their calls."""
        for group in self.inference:
            group.session.backend.calls(group.ranks)

    def lost(self) -> bool:
        """Whether the pool has lost a host."""
        return bool(self.actor.session.backend.lost(self.pool.hosts))

    def record(self, switch: Switch | None = None) -> None:
        """Keep it, and append what is new to `switches.jsonl` in the run directory, as soon as there is one."""
        incidents = self.actor.session.iterations.incidents
        if switch is not None:
            self.events.append(switch)
            self.measured.switches.append(switch.seconds)
        if incidents.directory() is not None:
            incidents.append("switches.jsonl", [asdict(one) for one in self.events[self._written :]])
            self._written = len(self.events)

    def close(self) -> None:
        """Free the groups of all sizes except the present ones. Can be called again."""
        for one in self._sizes:
            one.close()


def _doubled(initial: int, most: int) -> set[int]:
    sizes = {most}
    while initial <= most:
        sizes.add(initial)
        initial *= 2
    return sizes
