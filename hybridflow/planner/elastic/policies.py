"""Published device policies, and the guard around any policy. Pure."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.planner.elastic.state import (
    Action,
    Allocate,
    Component,
    Finalize,
    Migrate,
    Policy,
    Release,
    State,
    Wait,
)
from hybridflow.planner.elastic.transitions import applied
from hybridflow.settings import Fraction, is_whole, require, settings

logger = logging.getLogger(__name__)


def valid_sizes(*, n: int, minibatches: int, rows: int, devices: int, mp: int = 1) -> tuple[int, ...]:
    """RLinf's data-parallel sizes of an actor on `devices`: a mini-batch of `rows` prompts with `n` responses each
    splits evenly. Here rows are split without it, so that every size is valid unless these are given."""
    for name, value in {"n": n, "minibatches": minibatches, "rows": rows, "devices": devices, "mp": mp}.items():
        require(is_whole(value) and value > 0, f"{name}={value!r}: give a whole number above 0.")
    return tuple(dp for dp in range(1, devices // mp + 1) if rows * n % (minibatches * dp * n) == 0)


def decide(policy: Policy, state: State) -> tuple[tuple[Action, ...], str | None]:
    """The policy's actions, and None; of a policy that raises or answers illegally the actions back to the static
    placement, and the error: from then on `static` decides."""
    try:
        actions = tuple(policy(state))
        applied(state, actions)
    except Exception as error:  # whatever a user's policy raises
        message = f"The policy {getattr(policy, '__name__', policy)!s:.80} is refused: {type(error).__name__}: {error}"
        logger.warning("%s The static placement is kept.", message)
        return tuple(static(state)), message
    return actions, None


def static(state: State) -> list[Action]:
    """The static placement: nothing moves, and what another policy has moved returns."""
    if state.done == state.minibatches:
        return [Finalize()]
    actions: list[Action] = []
    actor, rollout = state.actor, state.rollout
    surplus = rollout.instances - rollout.initial
    if actor.instances > actor.initial and not state.training:
        actions.append(Release("actor", actor.instances - actor.initial))
    if surplus > 0:
        actions += released_rollouts(state, surplus)
    elif surplus < 0 and (state.actor_end <= actor.initial * actor.devices or actions) and state.running_rows:
        actions.append(Allocate("rollout", -surplus))
    if actor.instances < actor.initial and not state.training:
        actions.append(Allocate("actor", actor.initial - actor.instances))
    return actions


@settings
class _RLinf:
    threshold: Fraction
    wait_before_last: bool

    @property
    def __name__(self) -> str:
        return "rlinf"

    def __call__(self, state: State) -> list[Action]:
        if state.done == state.minibatches:
            return [Finalize()]
        if state.event == "start":
            return lend_actor(state)
        if state.event == "rows":
            return self.after_half(state)
        return self.at_boundary(state)

    def after_half(self, state: State) -> list[Action]:
        """RLinf's pre-process: the end of it."""
        if state.actor.instances or state.done or state.running_rows > int(state.rows * self.threshold):
            return []
        return return_actor(state)

    def at_boundary(self, state: State) -> list[Action]:
        last = state.done == state.minibatches - 1
        actions = self.release_rollouts(state, last)
        after = applied(state, actions)
        if state.inference.instances and (last or not after.rollout.instances):
            actions += [Wait("inference"), Release("inference", state.inference.instances)]
            after = applied(state, actions)
        return actions + grow_actor(after)

    def release_rollouts(self, state: State, last: bool) -> list[Action]:
        rollout, actor = state.rollout, state.actor
        if not rollout.instances:
            return []
        if not state.running_rows:
            return [Release("rollout", rollout.instances)]
        if last and self.wait_before_last:
            return [Wait("rollout"), Release("rollout", rollout.instances)]
        needed = -(-state.running_rows // state.max_running)
        most = max(0, rollout.instances - needed)
        if rollout.instances <= 1 or not most:
            return []
        allowed = actor.instances + most * rollout.devices // actor.devices
        increment = (next_size(actor, allowed) - actor.instances) * actor.devices
        count = _legal_release(rollout, -(-increment // rollout.devices))
        return released_rollouts(state, count) if count else []


def rlinf(*, threshold: float = 0.5, wait_before_last: bool = True) -> Policy:
    """RLinf's dynamic scheduler, as published: the actor's devices generate until at most `threshold` of the rows run;
    at boundaries of mini-batches rollouts release the instances that raise the actor to its next sizes."""
    return _RLinf(threshold=threshold, wait_before_last=wait_before_last)


def lend_actor(state: State) -> list[Action]:
    """Rollouts get the actor's devices, as far as whole instances fit."""
    if not state.actor.instances:
        return []
    room = state.rollout.ids.start
    size = max((size for size in state.rollout.sizes if size <= state.rollout.instances + room), default=0)
    count = size - state.rollout.instances
    return [Release("actor", state.actor.instances), Allocate("rollout", count)] if count > 0 else []


def return_actor(state: State) -> list[Action]:
    """Lent devices return to the actor, and their rows continue on the rollouts' own instances."""
    surplus = state.rollout.instances - state.rollout.initial
    moved = released_rollouts(state, surplus) if surplus > 0 else []
    return [*moved, Allocate("actor", state.actor.initial)]


def released_rollouts(state: State, count: int) -> list[Action]:
    """The `count` lowest instances release; their groups continue on the others."""
    groups = sequential_migration(state, count)
    return [*([Migrate(groups)] if groups else []), Release("rollout", count)]


def sequential_migration(state: State, count: int) -> dict[int, int]:
    """RLinf's: of the remaining instances in order, all but the last take groups while they have fewer rows than the
    mean; the last takes the others."""
    rest = state.rollout.ids[count:]
    leaving = [group for instance in state.rollout.ids[:count] for group in state.running.get(instance, ())]
    if not leaving:
        return {}
    require(len(rest) > 0, f"{state.running_rows} rows run, and no rollout instance is left for them.")
    expected = state.running_rows // len(rest)
    queue, groups = iter(leaving), dict[int, int]()
    for instance in rest[:-1]:
        rows = sum(len(group.tokens) for group in state.running.get(instance, ()))
        while rows < expected and (group := next(queue, None)) is not None:
            groups[group.group] = instance
            rows += len(group.tokens)
    return groups | {group.group: rest[-1] for group in queue}


def next_size(component: Component, allowed: int) -> int:
    """The largest size above the present one until the first that is not `allowed`; the present one if there is no
    such size."""
    return max((size for size in component.sizes if component.instances < size <= allowed), default=component.instances)


def grow_actor(state: State) -> list[Action]:
    """The actor takes the largest size that the free devices allow."""
    count = next_size(state.actor, state.actor_room // state.actor.devices) - state.actor.instances
    return [Allocate("actor", count)] if count > 0 else []


def _legal_release(rollout: Component, count: int) -> int:
    """At least `count` instances, so that a valid size remains; 0 if there is no such size."""
    if count <= 0:
        return 0
    size = max((size for size in rollout.sizes if size <= rollout.instances - count), default=0)
    return rollout.instances - size if size else 0


@dataclass(frozen=True)
class _Lend:
    @property
    def __name__(self) -> str:
        return "lend"

    def __call__(self, state: State) -> Sequence[Action]:
        if state.done == state.minibatches:
            return [Finalize()]
        if state.event == "start":
            actions = lend_actor(state)
            latest = state.switches[-3:]
            cost = sum(latest) / len(latest) if latest else 0.0
            return actions if actions and lending_saves(state) > cost else []
        if state.actor.instances or not (state.ready >= state.minibatch_groups or not state.running_rows):
            return []
        return return_actor(state)


def lending_saves(state: State) -> float:
    """Predicted seconds of generation until the first mini-batch is ready, without the actor's devices less with them:
    a mean response, its step with the rows of one instance, in rounds of what is decoded at once."""
    if not state.lengths:
        return 0.0
    mean = sum(state.lengths) / len(state.lengths)

    def seconds(instances: int) -> float:
        rows = state.rows / instances
        at_once = min(rows, state.max_running)
        return rows / at_once * mean * (state.speeds.decoding.base + at_once * state.speeds.decoding.per_row)

    more = sum(action.instances for action in lend_actor(state) if isinstance(action, Allocate))
    return (seconds(state.rollout.instances) - seconds(state.rollout.instances + more)) / state.minibatches


lend: Policy = _Lend()
