"""An iteration under a device policy, event by event, with known response lengths. Pure.

It acts only on actions that `applied` accepts, and calls a policy where the executor calls it: at the start, as rows
finish (each time another 1/32 of all rows has, when a mini-batch is ready for an idle actor, and when no row is left),
and after each mini-batch. A switch takes `join` where rollouts or a lent actor begin, `resize` where the actor changes
its size, and `hand_over` where rows move; meanwhile all other instances continue.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

from hybridflow.planner.elastic.policies import decide, static
from hybridflow.planner.elastic.state import (
    LOOKS,
    Action,
    Allocate,
    ComponentName,
    Event,
    Migrate,
    Policy,
    Release,
    RunningGroup,
    State,
    Wait,
)
from hybridflow.planner.elastic.transitions import Switch, applied, placement, why
from hybridflow.planner.stream_simulation import DecodedRow, Decoding, DecodingReplica


@dataclass
class Iteration:
    """Seconds without the weight sync, and the switches; why the policy was replaced by `static`, if it was."""

    seconds: float
    switches: list[Switch]
    refused: str | None


class _Minibatch(NamedTuple):
    tokens: int
    available: float  # its inference is done


class ElasticSimulation(Decoding):
    """An iteration that stands at a look of the policy, first at its `start`, with the `lengths` of the rows of group
    0, 1, ..."""

    def __init__(self, start: State, lengths: Sequence[int], policy: Policy, cores: float | None = None) -> None:
        super().__init__(start.speeds.decoding, start.rollout.ids, cores)
        self.state, self.lengths, self.policy = start, lengths, policy  # placement and `done` of the state are of now
        self.groups = {group.group: group for present in start.running.values() for group in present}
        self.unfinished = dict.fromkeys(self.groups, start.n)  # rows of each group
        self.whole: list[int] = []  # groups of no mini-batch yet
        self.queue: deque[_Minibatch] = deque()
        self.finished_rows = self.looked = 0  # now, at the latest look
        self.formed = False  # a mini-batch since the latest look
        self.trained_at: float | None = None
        self.actor_at = self.inference_at = 0.0  # the actor's devices are its own again; inference has ended
        self.actor_shape = start.actor.instances
        self.refused: str | None = None
        self.switches: list[Switch] = []

    def run(self) -> Iteration:
        event: Event | None = "start"
        while event is not None:
            self.look(event)
            event = self.until_look()
        return self.ended()

    def until_look(self) -> Event | None:
        """The event of the next one; None after the last mini-batch."""
        while self.state.done < self.state.minibatches:
            self.begin_training()
            boundary = self.advance()
            if boundary or self.due:
                self.looked, self.formed = self.finished_rows, False
                return "minibatch" if boundary else "rows"
        return None

    def ended(self) -> Iteration:
        self.pass_until(max(self.now, self.actor_at))
        return Iteration(self.clock, self.switches, self.refused)

    def fork(self) -> ElasticSimulation:
        """A copy of this one, to proceed otherwise."""
        other = copy(self)
        other.replicas = {instance: copy(replica) for instance, replica in self.replicas.items()}
        for replica in other.replicas.values():
            replica.running, replica.waiting = replica.running.copy(), replica.waiting.copy()
        for name in ("_ends", "busy", "unfinished", "whole", "queue", "switches"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def pass_until(self, time: float, others: int = 0) -> float:
        return super().pass_until(time, others + (self.state.actor_end if self.trained_at is not None else 0))

    @property
    def due(self) -> bool:
        """Whether rows that finished are worth a look."""
        rows, idle = self.state.rows, self.trained_at is None
        new = self.finished_rows - self.looked
        return new > 0 and (new >= rows / LOOKS or self.finished_rows == rows or (self.formed and idle))

    def advance(self) -> bool:
        """The next event. Returns whether a mini-batch was trained."""
        trained, row_end = math.inf if self.trained_at is None else self.trained_at, self.next_end()
        if row_end < trained:
            self.pass_until(max(self.now, row_end))
            self.end_row(self.finished())
            return False
        assert trained < math.inf, "nothing runs, and the actor does not train"
        self.pass_until(max(self.now, trained))
        self.trained_at = None
        self.state = replace(self.state, done=self.state.done + 1)
        return True

    def end_row(self, row: DecodedRow) -> None:
        self.finished_rows += 1
        self.unfinished[row.group] -= 1
        if self.unfinished[row.group]:
            return
        self.whole.append(row.group)
        state, speeds = self.state, self.state.speeds
        if len(self.whole) == state.minibatch_groups:
            n, available = state.n, self.now
            tokens = sum(sum(self.lengths[g * n : g * n + n]) + n * self.groups[g].prompt for g in self.whole)
            if state.inference.instances:
                seconds = speeds.inference + tokens * speeds.inference_per_token / state.inference.instances
                self.inference_at = available = max(self.now, self.inference_at) + seconds
            self.queue.append(_Minibatch(tokens, available))
            self.whole, self.formed = [], True

    def begin_training(self) -> None:
        actor, speeds = self.state.actor.instances, self.state.speeds
        if self.trained_at is not None or not actor or not self.queue:
            return
        minibatch = self.queue.popleft()
        seconds = speeds.train + minibatch.tokens * speeds.train_per_token / actor
        if not self.state.inference.instances:
            seconds += speeds.inference + minibatch.tokens * speeds.inference_per_token / actor
        self.trained_at = max(self.now, self.actor_at, minibatch.available) + seconds

    def look(self, event: Event) -> None:
        """The policy decides, and its actions are executed."""
        view = self.view(event)
        actions, refused = decide(self.policy, view)
        delay = 0.0 if self.policy is static else self.state.speeds.look
        if refused is not None:
            self.policy, self.refused = static, refused
        after = applied(view, actions)
        seconds, rows = self.execute(view, after, actions, delay)
        if event == "start":
            for instance, groups in after.running.items():
                self.replicas[instance].stalled += delay
                self.submit(instance, groups)
        if placement(after) != placement(view):
            self.switches.append(Switch(view.seconds, why(view), placement(view), placement(after), seconds, rows))

    def execute(self, view: State, after: State, actions: Sequence[Action], delay: float) -> tuple[float, int]:
        """Returns seconds without waiting or looking, and the rows that moved."""
        speeds, actor, looked, rows = view.speeds, after.actor.instances, delay, 0
        for action in actions:
            match action:
                case Wait(component):
                    self.wait(component)
                case Migrate(groups):
                    rows += self.migrate(groups)
                    delay += speeds.hand_over
                case Release("rollout", count):
                    for instance in sorted(self.replicas)[:count]:
                        del self.replicas[instance]
                        self.busy.discard(instance)
                case Allocate("rollout", count):
                    lowest = min(self.replicas, default=view.rollout.most)
                    for instance in range(lowest - count, lowest):
                        self.replicas[instance] = DecodingReplica(
                            speeds.decoding, self.now, stalled=delay + speeds.join
                        )
                case _:
                    pass
        changed = any(isinstance(a, Release | Allocate) and a.component == "actor" for a in actions)
        if view.done == view.minibatches:  # only Finalize
            others = view.rollout.instances, view.inference.instances
            delay += speeds.join if others != (after.rollout.instances, after.inference.instances) else 0.0
            changed = actor != view.actor.instances
        if changed and actor:
            delay += speeds.join if not view.actor.instances else 0.0
            delay += speeds.resize if actor != self.actor_shape else 0.0
            self.actor_shape = actor
        if changed or view.event != "rows":
            self.actor_at = max(self.actor_at, self.now + delay)
        self.state = replace(self.state, rollout=after.rollout, inference=after.inference, actor=after.actor)
        return delay - looked, rows

    def wait(self, name: ComponentName) -> None:
        """Other events pass, and nothing begins."""
        if name == "rollout":
            while self.busy:
                self.advance()
        elif name == "actor":
            while self.trained_at is not None:
                self.advance()
        else:
            while min(self.next_end(), self.trained_at or math.inf) < self.inference_at:
                self.advance()
            self.pass_until(max(self.now, self.inference_at))

    def submit(self, instance: int, groups: Sequence[RunningGroup]) -> None:
        """Rows of a group share the keys and values of their prompt."""
        for group in groups:
            for row, before in enumerate(group.tokens):
                context = before + (0 if row else group.prompt)
                length = self.lengths[group.group * self.state.n + row]
                self.replicas[instance].waiting.append(DecodedRow(group.group, length, context, before))
        self.refill(instance)

    def migrate(self, groups: Mapping[int, int]) -> int:
        """Returns the rows that moved."""
        moving: dict[int, list[DecodedRow]] = {group: [] for group in groups}
        left = self.withdraw(groups)
        for row in (row for rows in left.values() for row in rows):
            moving[row.group].append(row)
        changed = {*groups.values(), *left}
        for instance in changed:
            self.replicas[instance].stalled += self.state.speeds.hand_over
        for group, instance in groups.items():
            moving[group][0].context += self.groups[group].prompt
            self.replicas[instance].waiting.extend(moving[group])
        for instance in changed:
            self.refill(instance)
        return sum(map(len, moving.values()))

    def view(self, event: Event) -> State:
        """What the policy sees."""
        running: dict[int, tuple[RunningGroup, ...]] = {}
        if event == "start":
            return self.state
        for instance, replica in self.replicas.items():
            replica.pass_until(self.now)
            present: dict[int, list[int]] = {}
            for row, tokens in replica.tokens():
                present.setdefault(row.group, []).append(tokens)
            running[instance] = tuple(
                RunningGroup(group, self.groups[group].prompt, tuple(tokens)) for group, tokens in present.items()
            )
        groups = sum(not rows for rows in self.unfinished.values())
        trained = (self.state.done + (self.trained_at is not None)) * self.state.minibatch_groups
        return replace(
            self.state,
            event=event,
            running=running,
            finished=self.finished_rows,
            ready=groups - trained,
            seconds=self.now,
            training=self.trained_at is not None,
        )
