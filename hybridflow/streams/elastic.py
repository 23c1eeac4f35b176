"""Elastic: devices that generate or train as a policy says, inside an iteration (RLinf, 2025; verl's hybrid pools).

    rows finish, a mini-batch is done -> state -> policy -> actions -> switch: hand rows over, resize, join
    after the last mini-batch: the static placement again, and the new weights

The policy is a pure function (`planner/elastic/`). A switch changes the placement when all of it has happened; a part
that fails leaves the actor in its old size, and from then on devices stay where they are. A policy that fails is asked
again in the next iteration.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.config import Until
from hybridflow.data.prompts import PromptSource
from hybridflow.driver import sync_weights
from hybridflow.environments.agent import Agent
from hybridflow.errors import HybridFlowError, PlacementError, PromptError
from hybridflow.models.images import PIXELS
from hybridflow.planner.admission import Replica, StreamOptions
from hybridflow.planner.elastic.policies import decide, static
from hybridflow.planner.elastic.simulation import ElasticRun, measured_split
from hybridflow.planner.elastic.state import (
    LOOKS,
    Action,
    Allocate,
    Component,
    Event,
    Finalize,
    Migrate,
    Release,
    RunningGroup,
    State,
    Switch,
    Wait,
)
from hybridflow.settings import require
from hybridflow.streams.elastic_devices import ElasticDevices, NotResizedError
from hybridflow.streams.replica_calls import ReplicaCalls, RowReports
from hybridflow.streams.stream import ResponseStream

T = TypeVar("T")
logger = logging.getLogger(__name__)
_SWITCHES = "elastic/switches"
_OLD_SECONDS = 1.5  # of a report


class Elastic(ElasticDevices):
    """The groups that share the devices of `pool`, and the policy that moves devices between them.

    `actor`, without generation, lies on the first devices of the pool; `rollout` from its first device on, over the
    actor's and more; `inference` groups are either on the actor's devices and follow its size, or on the last devices,
    which the rollout does not have. `policy` is "gain" (the default), "rlinf", "lend", "static", or a function from a
    `State` to actions. `sizes` are the data parallel sizes that the actor may have (default: all multiples of its own
    by a power of two, and the largest), or its sizes and the strategy of each (`GroupSizes`); the groups of all sizes
    are made here.

    A policy that raises or answers what is not possible is refused with a warning; devices stay where they are until
    the next iteration asks it again.
    Errors: ConfigError, PlacementError for groups that lie elsewhere; those of `GroupSizes`.
    """

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
        require(isinstance(loader, PromptSource), f"stream takes a PromptLoader, got {type(loader).__name__}.")
        for name, value in (("n", n), ("minibatches", minibatches)):
            require(type(value) is int and value > 0, f"stream({name}={value!r}): give a whole number above 0.")
        require(copy_seconds > 0, f"stream(copy_seconds={copy_seconds}): give seconds above 0.")
        require(
            Agent.of(sampling) is None,
            "elastic devices generate single turns, because trajectories cannot move to other devices: use hf.stream.",
        )
        size = loader.batch_size * n
        require(
            loader.batch_size % minibatches == 0,
            f"stream(minibatches={minibatches}): a batch of {loader.batch_size} prompts is not divided by it.",
        )
        options = StreamOptions(rows=size // minibatches, n=n, max_staleness=minibatches - 1)
        return ElasticStream(self, loader, options, Until(seconds=call_seconds), {"n": n, **sampling}, copy_seconds)


class ElasticStream(ResponseStream):
    """The mini-batches of `Elastic.stream`. Replicas stop and start; unfinished rows continue on others: `_live` are
    those that decode, the others have no rows. `_numbers`: of the names of all."""

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
        self._refused = self._stopped = False  # until the next iteration; for good
        self._said = set[str]()
        self.seconds: list[float] = []
        """Of each iteration that has ended, up to the start of the next one."""
        group = elastic.rollout
        function = partial(group.generate_sequences, **sampling)
        super().__init__(loader, [group], options, function, until, sampling, copy_seconds)

    def _reset(self) -> None:
        super()._reset()
        self.elastic.resize(self.elastic.static.actor.instances)  # after lost hosts
        self._now = replace(
            self.elastic.static,
            rows=self.options.rows * self._minibatches,
            n=self.options.n,
            minibatches=self._minibatches,
            max_tokens=self._longest(),
        )
        self._tokens = self._trained_tokens = 0  # of the last mini-batch, of this iteration
        self._numbers: dict[Any, int] = {name: number for number, name in enumerate(self._chains)}
        chains = {number: self._chain(number)[1] for number in range(self._now.rollout.most)}
        self._reports = RowReports(chains, self.elastic.measured)
        self._whole = self._moved = False  # the iteration was seen from its start; devices moved
        self._looked = (0, 0)  # mini-batches taken and ready at the latest look
        self._look_below, self._begun, self._given_at = self._now.rows, time.monotonic(), time.monotonic()
        self._switched = {_SWITCHES: 0.0, "elastic/switch_seconds": 0.0, "elastic/moved_rows": 0.0}
        self._live = self._now.rollout.ids
        for name, number in self._numbers.items():
            if number not in self._live:
                self._admission.lost(name)

    def _longest(self) -> int:
        """Tokens of a response, at most."""
        usual = self.elastic.rollout.settings["generate"].sampling
        return replace(usual, max_tokens=self._sampling.get("max_tokens", usual.max_tokens)).longest

    def metrics(self) -> dict[str, float]:
        """Those of `ResponseStream`, and of the iteration so far `elastic/switches`, `elastic/switch_seconds` and
        `elastic/moved_rows`, and `elastic/actor_instances`, `elastic/rollout_instances` now."""
        now = {f"elastic/{name}_instances": float(getattr(self._now, name).instances) for name in ("actor", "rollout")}
        return super().metrics() | self._switched | now

    def best_split(self) -> tuple[ElasticRun, float]:
        """The fastest static placement by what was measured so far: `rollout` and `actor` of a run are the instances
        to place next time. Errors: those of `planner.elastic.simulation.measured_split`."""
        measured = self.elastic.measured
        return measured_split(replace(self._now, speeds=measured.speeds()), measured.in_order)

    def _begin(self, source: Iterator[Batch]) -> None:
        restored = self._restored is not None
        super()._begin(source)
        if restored and self._admission.taken % self._minibatches == 0:  # the state is from before the weight sync
            self._sync()
            self._versions = dict.fromkeys(self._versions, self._admission.trained_batches)
            self._seen = self._weights()
            self._admission.synced()

    def _sync(self) -> None:
        sync_weights(self.elastic.actor, self.elastic.rollout)

    # Events

    def _may_train(self) -> bool:
        """The policy looks at a mini-batch that is ready before the idle actor gets it."""
        ready = self._admission.taken, self._ready // self.options.groups
        if ready[1] and ready != self._looked and self._admission.under_way:
            self._look_now("rows")
        return self._now.actor.instances > 0

    @property
    def _ready(self) -> int:
        """Whole groups that no mini-batch has."""
        return len(self._found) - len(self._admission.under_way)

    def _admit(self, source: Iterator[Batch]) -> None:
        before = self._admission.admitted
        super()._admit(source)
        if (admitted := self._admission.admitted - before) == 0 or self._admission.taken % self._minibatches:
            return
        now = time.monotonic()
        if self._whole:
            self.seconds.append(now - self._begun)
            self.elastic.measured.iteration(now - self._begun, self._trained_tokens, self._moved)
        self._begun, self._trained_tokens, self._whole, self._moved = now, 0, True, False
        self._refused = False
        self._now = replace(self._now, rows=admitted * self.options.n)
        self._look_below = self._now.rows
        self._reports.begin(self._unsubmitted())
        self._look("start")
        self._reports.begin(self._unsubmitted())

    def _place(self, places: Mapping[int, Replica], rows: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        if places and PIXELS in self._prompts.rows(sorted(places)[:1]):
            raise PromptError(f"prompts have images ({PIXELS}), and rows of hf.Elastic move: use hf.stream for them.")
        super()._place(places, rows)

    def _advance(self) -> None:
        if not self._now.actor.instances and not self._admission.under_way:
            self._act(static(self._view("rows")), "all rows are generated")
            if not self._now.actor.instances:
                raise PlacementError(
                    f"{self.elastic.actor.name} did not get its devices back, and all rows wait for it."
                )
            return
        super()._advance()
        self._poll_reports()
        left = sum(chain.unfinished for chain in self._chains.values())
        if 0 < left < self._look_below and self._reports.at > self._begun:
            self._look_below = left - max(1, self._now.rows // LOOKS)
            self._look("rows")

    def _queue_meanwhile(self) -> None:
        super()._queue_meanwhile()
        try:
            self._poll_reports()
        except HybridFlowError as error:
            self._error = self._error or error

    def _poll_reports(self) -> None:
        if self._admission.under_way and self._submitted:
            self._reports.poll(self._live, self._prompts.offset)

    def _after_batch(self) -> None:
        """The mini-batch is trained: the policy looks, or the iteration ends."""
        elastic = self.elastic
        require(
            elastic.rollout.weights_version == self._seen[elastic.rollout.name],
            f"the stream of hf.Elastic gives {elastic.rollout.name} its weights at the end of an iteration, and so did "
            f"the loop: remove hf.sync_weights from it.",
        )
        elastic.actor.session.backend.calls(elastic.actor.ranks)  # waits for them; rollouts decode meanwhile
        elastic.measured.trained(time.monotonic() - self._given_at, self._tokens, self._now.actor.instances)
        if self._admission.taken % self._minibatches:
            self._look_now("minibatch")
            return
        self._switched = dict.fromkeys(self._switched, 0.0)  # the way back counts for the next iteration
        self._act([Finalize()], "the iteration ends")
        elastic.record()
        self._sync()

    def _assembled(self, batch: Any) -> BatchRef:
        found = [one.tokens for number in batch.groups for one in self._found[number].values()]
        for tokens in found:
            self.elastic.measured.response(tokens)
        prompts = sum(self._prompt_tokens(batch.groups))
        self._tokens, self._given_at = sum(found) + self.options.n * prompts, time.monotonic()
        self._trained_tokens += self._tokens
        return super()._assembled(batch)

    def _look_now(self, event: Event) -> None:
        """With reports that are not old."""
        start = time.monotonic()
        if self._admission.under_way and self._reports.at < max(self._begun, start - _OLD_SECONDS):
            self._submit()
            self._reports.wait(self._live, self._prompts.offset)
        self._look(event, start)

    def _look(self, event: Event, start: float | None = None) -> None:
        start = start or time.monotonic()
        self._take_up(self._chains.values())
        state = self._view(event)
        self._looked = self._admission.taken, self._ready // self.options.groups
        actions, error = decide(static if self._refused or self._stopped else self.elastic.policy, state)
        if error is not None:
            self._refused = True
            self._say(f"{error} Devices stay where they are in this iteration, and in each whose policy fails alike.")
        self.elastic.measured.took("look", time.monotonic() - start)
        self._act(actions, error or str(state))

    def _say(self, text: str) -> None:
        """On the console, once."""
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)

    # What the policy sees

    def _view(self, event: Event) -> State:
        done = self._admission.taken % self._minibatches
        measured, waiting = self.elastic.measured, {*self._admission.under_way}
        known = {
            number: tuple(one for one in self._reports.running.get(number, ()) if one.group in waiting)
            for number in self._live
        }
        seen = {one.group for groups in known.values() for one in groups}
        usual = measured.lengths[len(measured.lengths) // 2] if measured.lengths else 0
        for group in sorted(waiting - seen):  # its rows have ended, or moved, since the report
            number = self._numbers[self._admission.place(group)]
            rows = self.options.n - len(self._found[group])
            known[number] += (RunningGroup(group, self._prompt_tokens([group])[0], (usual,) * rows),)
        left = sum(len(one.tokens) for groups in known.values() for one in groups)
        return replace(
            self._now,
            event=event,
            done=done,
            finished=self._now.rows - left,
            ready=self._ready,
            running=known,
            speeds=measured.speeds(),
            lengths=tuple(measured.lengths) if measured.iterations else (),
            switches=tuple(measured.switches),
            iterations=tuple(measured.iterations),
            seconds=time.monotonic() - self._begun,
        )

    def _unsubmitted(self) -> dict[int, tuple[RunningGroup, ...]]:
        """The groups that no replica has yet, where they are placed."""
        found: dict[int, tuple[RunningGroup, ...]] = {}
        for number in self._live:
            if groups := sorted(self._chain(number)[1].new):
                rows = (0,) * self.options.n
                found[number] = tuple(map(RunningGroup, groups, self._prompt_tokens(groups), [rows] * len(groups)))
        return found

    def _prompt_tokens(self, groups: Sequence[int]) -> list[int]:
        """Of each group; 0 for text, which hosts tokenise."""
        prompts = self._prompts.rows(groups)
        return list(map(len, prompts["prompt_ids"].tolist())) if "prompt_ids" in prompts else [0] * len(groups)

    # Switches

    def _act(self, actions: Sequence[Action], reason: str) -> None:
        """Do what the policy says. If the actor cannot be resized, devices return to where they were, and stay there
        from then on. Errors: those of lost hosts and of generation."""
        if not actions:
            return
        before, start, moved = self._now, time.monotonic(), 0
        try:
            for action in actions:
                match action:
                    case Wait("rollout"):
                        self._wait_for_rows()
                        start = time.monotonic()
                    case Wait(_):
                        self.elastic.wait()
                    case Migrate(groups):
                        moved += self._timed("hand_over", partial(self._move, groups, groups))
                    case Release("rollout", count):
                        moved += self._timed("hand_over", partial(self._hand_over, count))
                    case Allocate("rollout", count):
                        self._timed("join", partial(self._join, count))
                    case Finalize():
                        moved += self._finalize()
                    case Release(name, count) | Allocate(name, count):
                        self._set(name, count if isinstance(action, Allocate) else -count)
        except NotResizedError as error:
            self._stopped = True
            self._say(f"devices stay where they are from now on: the switch failed. {error}")
            reason = f"{reason}; failed: {str(error).splitlines()[0]}"
            self._join(max(0, before.rollout.instances - len(self._live)))
        self._reports.forget()
        self._now = self._placed()
        if before.placement != self._now.placement:
            self._record(
                Switch(
                    when=start - self._begun,
                    why=reason,
                    origin=before.placement,
                    target=self._now.placement,
                    seconds=time.monotonic() - start,
                    rows=moved,
                )
            )

    def _placed(self) -> State:
        return replace(self._now, rollout=replace(self._now.rollout, instances=len(self._live)))

    def _wait_for_rows(self) -> None:
        while self._admission.under_way:
            if self._error is not None:
                raise self._error
            super()._advance()

    def _timed(self, what: str, move: Callable[[], T]) -> T:
        start = time.monotonic()
        moved = move()
        self.elastic.measured.took(what, time.monotonic() - start)
        return moved

    def _record(self, switch: Switch) -> None:
        self.elastic.record(switch)
        self._moved = True
        for name, value in (("switches", 1.0), ("switch_seconds", switch.seconds), ("moved_rows", float(switch.rows))):
            self._switched[f"elastic/{name}"] += value

    def _set(self, name: str, change: int) -> None:
        """Another number of instances of the actor, or of inference groups of their own."""
        component: Component = getattr(self._now, name)
        instances = component.instances + change
        if name == "actor" and instances:
            self.elastic.resize(instances)
        resized: Any = {name: replace(component, instances=instances)}
        self._now = replace(self._now, **resized)

    def _finalize(self) -> int:
        """The static placement. Returns the rows that moved."""
        home, now, moved = self.elastic.static, self._now, 0
        if (surplus := len(self._live) - home.rollout.instances) > 0:
            moved = self._timed("hand_over", partial(self._hand_over, surplus))
        self._join(max(0, -surplus))
        self._set("inference", home.inference.instances - now.inference.instances)
        self._set("actor", home.actor.instances - now.actor.instances)
        return moved

    # Replicas

    def _chain(self, number: int) -> tuple[str, ReplicaCalls]:
        name = f"{self._groups[0].name}/{number}"
        return name, self._chains[name]

    def _submit(self) -> None:
        """Queue calls for rows and groups that their replica does not have yet."""
        for number in self._live:
            chain = self._chain(number)[1]
            if chain.new or chain.rows:
                prompts = self._prompts.rows(sorted(chain.new)) if chain.new else None
                chain.issue(prompts, self._version_of(chain.group))

    @property
    def _submitted(self) -> bool:
        """Whether all rows are where they are decoded."""
        return not any(chain.new or chain.rows for _, chain in map(self._chain, self._live))

    def _hand_over(self, count: int) -> int:
        """The lowest `count` replicas stop. Returns the rows that moved."""
        leaving, self._live = self._live[:count], self._live[count:]
        names = {self._chain(number)[0] for number in leaving}
        moved = self._move([group for group in self._admission.under_way if self._admission.place(group) in names], {})
        for name in names:
            self._admission.lost(name)
        return moved

    def _join(self, count: int) -> None:
        """`count` replicas below the present ones start; groups that no replica has yet are spread over all."""
        if not count:
            return
        self._live = range(self._live.start - count, self._live.stop)
        for number in self._live:
            self._admission.joined(self._chain(number)[0])
        self._move([group for number in self._live for group in self._chain(number)[1].new], {})

    def _move(self, groups: Iterable[int], wanted: Mapping[int, int]) -> int:
        """Unfinished groups continue on the `wanted` replicas, or on those with the fewest rows: the cheapest first.
        Returns the rows that moved."""
        held: dict[int, list[Mapping[str, Any]]] = {}
        answers, offset, n = [], self._prompts.offset, self.options.n
        for chain, of_chain in self._by_chain(groups):
            fresh = of_chain & {*chain.new}
            waiting = [row for row in chain.rows if row["row_id"] - offset in of_chain]
            chain.new = [group for group in chain.new if group not in fresh]
            chain.rows = [row for row in chain.rows if row["row_id"] - offset not in of_chain]
            chain.unfinished -= len(fresh) * n + len(waiting)
            held |= {group: [] for group in fresh}
            for row in waiting:
                held.setdefault(row["row_id"] - offset, []).append(row)
            if submitted := of_chain - fresh:
                row_ids = sorted(group + offset for group in submitted)
                answers.append((chain, chain.group.withdraw_rows(replica=chain.replica, row_ids=row_ids)))
        for chain, answer in answers:
            rows = answer.get()
            chain.unfinished -= len(rows)
            for row in rows:
                held.setdefault(row["row_id"] - offset, []).append(row)
        self._take_up(self._chains.values())  # what has finished meanwhile
        cost = {n: sum(len(row["prompt_ids"]) + len(row["token_ids"]) for row in rows) for n, rows in held.items()}
        for group in sorted(held, key=cost.__getitem__):  # tokens whose keys and values another replica computes
            places = [self._chain(number) for number in self._live]
            name, chain = min(places, key=lambda place: place[1].unfinished)
            if wanted.get(group, -1) in self._live:
                name, chain = self._chain(wanted[group])
            self._admission.migrated(group, name)
            chain.rows += held[group]
            chain.new += [] if held[group] else [group]
            chain.unfinished += len(held[group]) or n
        self._admission.moved += sum(map(bool, held.values()))  # groups
        return sum(map(len, held.values()))

    def _by_chain(self, groups: Iterable[int]) -> list[tuple[ReplicaCalls, set[int]]]:
        found: dict[str, set[int]] = {}
        for group in groups:
            if (name := self._admission.place(group)) is not None:
                found.setdefault(str(name), set()).add(group)
        return [(self._chains[name], some) for name, some in found.items()]
