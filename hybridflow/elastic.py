"""Elastic: devices that generate or train as a policy says, inside an iteration (RLinf, 2025; verl's hybrid pools).

    rows finish, a mini-batch is done -> state -> policy -> actions -> switch: hand rows over, resize, join
    after the last mini-batch: the static placement again, and the new weights

The policy is a pure function (`planner/elastic/`). A switch changes the placement when all of it has happened; a part
that fails leaves the actor in its old size, and from then on devices stay where they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from hybridflow.admission import StreamOptions
from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.future import Future
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.pool import ResourcePool
from hybridflow.config import Until
from hybridflow.data.prompts import PromptSource
from hybridflow.driver import sync_weights
from hybridflow.errors import ConfigError, HostLostError, HybridFlowError
from hybridflow.planner.elastic.measured import Measured
from hybridflow.planner.elastic.policies import POLICIES, static
from hybridflow.planner.elastic.state import (
    Action,
    Component,
    Event,
    Finalize,
    Policy,
    RunningGroup,
    State,
    Switch,
    Wait,
)
from hybridflow.planner.elastic.transitions import applied
from hybridflow.replica_calls import ReplicaCalls
from hybridflow.resizing import Sizes
from hybridflow.settings import require
from hybridflow.streams import ResponseStream

logger = logging.getLogger(__name__)
_LOOKS = 32  # per iteration, as rows finish


class Elastic:
    """The groups that share the devices of `pool`, and the policy that moves devices between them.

    `actor`, without generation, lies on the first devices of the pool; `rollout` from its first device on, over the
    actor's and more; `inference` groups are either on the actor's devices and follow its size, or on the last devices,
    which the rollout does not have. `policy` is "gain" (the default), "rlinf", "lend", "static", or a function from a
    `State` to actions. `sizes` are the data parallel sizes that the actor may have (default: all multiples of its own
    by a power of two, and the largest); the groups of all sizes are made here.

    A policy that raises or answers what is not possible is refused with a warning, and devices stay where they are.
    Errors: ConfigError, PlacementError for groups that lie elsewhere; those of `resizing.Sizes`.
    """

    def __init__(
        self,
        pool: ResourcePool,
        *,
        actor: WorkerGroup,
        rollout: WorkerGroup,
        inference: Sequence[WorkerGroup] = (),
        policy: str | Policy = "gain",
        sizes: Iterable[int] | None = None,
    ) -> None:
        pool.check_open()
        for group in (actor, rollout, *inference):
            require(isinstance(group, WorkerGroup), f"Elastic takes groups such as hf.ActorWorker.on(...), got {group!r}.")
            group.check_open()
        if isinstance(policy, str):
            require(policy in POLICIES, f"Elastic(policy={policy!r}): known are {', '.join(POLICIES)}, or a function.")
        self.policy: Policy = POLICIES[policy] if isinstance(policy, str) else policy
        self.pool, self.actor, self.rollout = pool, actor, rollout
        self.events: list[Switch] = []
        """Every switch so far."""
        self.measured = Measured()
        if actor.session.traces:
            return
        followers = [group for group in inference if group.members == actor.members]
        self._check(pool, [group for group in inference if group not in followers])
        per_actor, per_rollout = actor.grid.p * actor.grid.t, rollout.grid.size // self._replicas
        own = sum(group.grid.size for group in inference if group not in followers)
        initial, most = actor.grid.d, pool.size // per_actor
        wanted = {initial, *(sizes if sizes is not None else _doubled(initial, most))}
        self._sizes = [Sizes(group, pool, wanted) for group in (actor, *followers)]
        held = -(-initial * per_actor // per_rollout)  # rollout instances on the actor's devices
        self.static = State(
            event="start",
            devices=pool.size,
            rollout=Component(
                per_rollout, self._replicas - held, self._replicas - held, tuple(range(1, self._replicas + 1))
            ),
            inference=Component(1, own, own, (own,) if own else ()),
            actor=Component(per_actor, initial, initial, tuple(sorted(wanted))),
            rows=0, n=1, minibatches=1, done=0, finished=0, ready=0, running={}, speeds=self.measured.speeds(),
        )  # fmt: skip

    @property
    def _replicas(self) -> int:
        return self.rollout.grid.generation().replicas

    def _check(self, pool: ResourcePool, apart: Sequence[WorkerGroup]) -> None:
        actor, rollout = self.actor, self.rollout
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
        require("advance_rows" in rollout.operations and not rollout.training, f"{rollout.name} is no RolloutWorker.")
        rest = sorted(at for group in apart for at in places[group.name])
        require(
            rest == list(range(rollout.grid.size, pool.size)) or (not rest and rollout.grid.size == pool.size),
            f"Elastic: the pool has {pool.size} devices, {rollout.name} the first {rollout.grid.size}, and inference "
            f"groups of their own {rest}: each device needs exactly one of them.",
        )

    def stream(
        self,
        loader: PromptSource,
        *,
        n: int = 1,
        minibatches: int = 1,
        call_seconds: float = 0.1,
        copy_seconds: float = 10.0,
        **sampling: Any,
    ) -> ElasticStream:
        """Iterates over the mini-batches of iterations: `minibatches` of them have the `n` responses to each prompt of
        a batch of `loader`, in whole groups, as they finish.

        All responses of an iteration are of the policy at its start: rollouts get the new weights after the last
        mini-batch, from here. Update the actor once with each mini-batch. Otherwise as `hf.stream`.
        """
        size = loader.batch_size * n
        require(
            minibatches >= 1 and loader.batch_size % minibatches == 0,
            f"stream(minibatches={minibatches}): a batch of {loader.batch_size} prompts is not divided by it.",
        )
        options = StreamOptions(rows=size // minibatches, n=n, max_staleness=minibatches - 1)
        return ElasticStream(self, loader, options, Until(seconds=call_seconds), {"n": n, **sampling}, copy_seconds)

    def resize(self, instances: int) -> float:
        """The actor and the groups that follow it get this data parallel size; returns seconds."""
        start = time.monotonic()
        done: list[tuple[Sizes, int]] = []
        try:
            for one in self._sizes:
                if one.size != instances:
                    done.append((one, one.size))
                    one.resize(instances)
        except HybridFlowError as error:
            for one, before in done[:-1]:  # the last one has its old size
                if not isinstance(error.__cause__, HostLostError):
                    one.resize(before)
            raise
        return time.monotonic() - start


def _doubled(initial: int, most: int) -> set[int]:
    sizes = {most}
    while initial <= most:
        sizes.add(initial)
        initial *= 2
    return sizes


class ElasticStream(ResponseStream):
    """The mini-batches of `Elastic.stream`."""

    def __init__(
        self,
        elastic: Elastic,
        loader: PromptSource,
        options: StreamOptions,
        until: Until,
        sampling: Mapping[str, Any],
        copy_seconds: float,
    ) -> None:
        self.elastic, self._minibatches = elastic, options.max_staleness + 1
        self._refused = False
        group = elastic.rollout
        function = partial(group.generate_sequences, **sampling)
        super().__init__(loader, [group], options, function, until, sampling, copy_seconds)

    def _reset(self) -> None:
        super()._reset()
        if self.elastic.actor.session.traces:
            return
        self._now = self.elastic.static
        self._tokens = 0  # of the last mini-batch
        self._report: list[tuple[int, Future]] = []
        self._reported: dict[int, tuple[float, int, int]] = {}
        self._running: dict[int, tuple[RunningGroup, ...]] = {}
        self._look_below, self._begun, self._given_at = 0, time.monotonic(), time.monotonic()
        self._switched = {"elastic/switches": 0.0, "elastic/switch_seconds": 0.0, "elastic/moved_rows": 0.0}
        for number in set(range(self.elastic.static.rollout.most)) - set(self._now.rollout.ids):
            self._admission.lost(self._chain(number)[0])

    def _chain(self, number: int) -> tuple[str, ReplicaCalls]:
        name = f"{self.elastic.rollout.name}/{number}"
        return name, self._chains[name]

    def metrics(self) -> dict[str, float]:
        """Those of `ResponseStream`, and of the iteration so far `elastic/switches`, `elastic/switch_seconds` and
        `elastic/moved_rows`, and `elastic/actor_instances`, `elastic/rollout_instances` now."""
        now = {f"elastic/{name}_instances": float(getattr(self._now, name).instances) for name in ("actor", "rollout")}
        return super().metrics() | self._switched | now

    # Events

    def _may_train(self) -> bool:
        return self._now.actor.instances > 0

    def _admit(self, source: Iterator[Batch]) -> None:
        before = self._admission.admitted
        super()._admit(source)
        if (admitted := self._admission.admitted - before) == 0 or self._admission.taken % self._minibatches:
            return
        self._begun = time.monotonic()
        self._switched = dict.fromkeys(self._switched, 0.0)
        rows = admitted * self.options.n
        self._now = replace(self._now, rows=rows, n=self.options.n, minibatches=self._minibatches)
        self._look_below = rows
        self._look("start")

    def _advance(self) -> None:
        if not self._may_train() and not self._admission.under_way:
            self._act([Finalize()], "all rows are generated")
            return
        super()._advance()
        left = sum(chain.unfinished for chain in self._chains.values())
        if self._report and all(answer.done() for _, answer in self._report):
            self._read_report()
            self._look("rows")
        elif not self._report and left < self._look_below:
            self._look_below = left - max(1, self._now.rows // _LOOKS)
            self._ask_report()

    def _after_batch(self) -> None:
        """The mini-batch is trained: the policy looks, or the iteration ends."""
        elastic = self.elastic
        elastic.actor.session.backend.calls(elastic.actor.ranks)  # waits for them, while rollouts go on
        elastic.measured.trained(time.monotonic() - self._given_at, self._tokens, self._now.actor.instances)
        if self._admission.taken % self._minibatches:
            self._ask_report()
            self._read_report()
            self._look("minibatch")
            return
        self._act([Finalize()], "the iteration ends")
        sync_weights(elastic.actor, elastic.rollout)

    def _take_up(self, chains: Iterable[ReplicaCalls]) -> None:
        super()._take_up(chains)

    def _assembled(self, batch: Any) -> BatchRef:
        found = [one.tokens for number in batch.groups for one in self._found[number].values()]
        for tokens in found:
            self.elastic.measured.response(tokens)
        self._tokens = sum(found)
        self._given_at = time.monotonic()
        return super()._assembled(batch)

    # What the policy sees

    def _ask_report(self) -> None:
        group = self.elastic.rollout
        self._report = [(number, group.row_tokens(replica=number)) for number in self._now.rollout.ids]

    def _read_report(self) -> None:
        for number, answer in self._report:
            groups: dict[int, list[tuple[int, int]]] = {}
            tokens = 0
            for row_id, prompt, length in answer.get():
                groups.setdefault(row_id - self._prompts.offset, []).append((prompt, length))
                tokens += length
            self._running[number] = tuple(
                RunningGroup(group, rows[0][0], tuple(length for _, length in rows)) for group, rows in groups.items()
            )
            self._measure_decoding(number, tokens)
        self._report = []
        self._take_up(self._chains.values())
