"""The groups of `hf.Elastic`: where they may lie, the sizes that they can have, and what was measured of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.pool import ResourcePool
from hybridflow.errors import ConfigError, HostLostError, HybridFlowError
from hybridflow.planner.elastic.gain import POLICIES
from hybridflow.planner.elastic.measured import Measured
from hybridflow.planner.elastic.state import Component, Policy, State
from hybridflow.planner.elastic.transitions import Switch
from hybridflow.settings import require
from hybridflow.streams.resizing import GroupSizes


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
        sizes: Iterable[int] | None = None,
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
        require(
            good,
            f"Elastic(policy={policy!r}): known are {', '.join(POLICIES)}, or a function.",
        )
        self.policy: Policy = POLICIES[policy] if isinstance(policy, str) else policy
        self.pool, self.actor, self.rollout, self.inference = pool, actor, rollout, tuple(inference)
        self.events: list[Switch] = []
        """Every switch so far."""
        self._written, self._sizes = 0, list[GroupSizes]()
        self.measured = Measured(slots=getattr(rollout.settings.get("generate"), "max_sequences", 256))
        if actor.session.traces:
            return
        followers = [group for group in inference if group.members == actor.members]
        self._check(pool, [group for group in inference if group not in followers], followers)
        per_actor, per_rollout = actor.grid.p * actor.grid.t, rollout.grid.size // self._replicas
        own = sum(group.grid.size for group in inference if group not in followers)
        initial, most = actor.grid.d, pool.size // per_actor
        require(
            sizes is None or isinstance(sizes, Iterable), f"Elastic(sizes={sizes!r}): give several, such as (1, 2, 4)."
        )
        wanted = {initial, *(sizes if sizes is not None else _doubled(initial, most))}
        held = -(-initial * per_actor // per_rollout)  # rollout instances on the actor's devices
        require(
            held < self._replicas,
            f"Elastic: {actor.name} covers all {self._replicas} replicas of {rollout.name}: leave one beside it.",
        )
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
        self._build((actor, *followers), wanted)

    @property
    def _replicas(self) -> int:
        return self.rollout.grid.generation().replicas

    def _build(self, groups: Sequence[WorkerGroup], sizes: set[int]) -> None:
        """All sizes of the groups, and the transfers between each and the present one, which are planned once."""
        initial = self.actor.grid.d
        try:
            for group in groups:
                self._sizes.append(GroupSizes(group, self.pool, sizes))
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
        good = "advance_rows" in rollout.operations and not rollout.training
        good = good and not rollout.has_replica_for("generate_sequences")
        require(good, f"Elastic(rollout={rollout.name}): give hf.RolloutWorker.on(pool, ...).")
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
