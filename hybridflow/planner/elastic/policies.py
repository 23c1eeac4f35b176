"""Published device policies, and the guard around any policy. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.planner.elastic.state import (
    Action,
    Allocate,
    Component,
    DeviceSplit,
    Finalize,
    Migrate,
    Policy,
    Release,
    State,
    Wait,
    applied,
)
from hybridflow.settings import Fraction, is_whole, require, settings


def valid_sizes(*, n: int, minibatches: int, rows: int, devices: int, mp: int = 1) -> tuple[int, ...]:
    """RLinf's data-parallel sizes of an actor on `devices`: a mini-batch of `rows` prompts with `n` responses each
    splits evenly. Here rows are split without it, so that every size is valid unless these are given."""
    for name, value in {"n": n, "minibatches": minibatches, "rows": rows, "devices": devices, "mp": mp}.items():
        require(is_whole(value) and value > 0, f"{name}={value!r}: give a whole number above 0.")
    return tuple(dp for dp in range(1, devices // mp + 1) if rows * n % (minibatches * dp * n) == 0)


def decide(policy: Policy, state: State) -> tuple[tuple[Action, ...], str | None]:
    """(actions, None). If the policy raises or answers illegally: the actions back to the static placement, and why;
    until the next iteration `static` decides."""
    try:
        actions = tuple(policy(state))
        applied(state, actions)
    except Exception as error:  # whatever a user's policy raises
        name = getattr(policy, "__name__", policy)
        return tuple(static(state)), f"The policy {name!s:.80} is refused: {type(error).__name__}: {error}"
    return actions, None


def static(state: State) -> list[Action]:
    """The static placement: nothing moves, and what another policy has moved returns."""
    if state.done == state.minibatches:
        return [Finalize()]
    actor, rollout = state.actor.instances if state.training else state.actor.initial, state.rollout.initial
    if state.rollout.instances < rollout and (actor > state.actor.initial or not state.running_rows):
        rollout = state.rollout.instances
    return moves(state, DeviceSplit(rollout, actor))


@settings
class RLinf:
    """RLinf's dynamic scheduler, as published: the actor's devices generate until at most `threshold` of the rows run
    (unless `pre_process` is False); at boundaries of mini-batches rollouts release the instances that raise the actor
    to its next sizes. With `wait_before_last` rollouts and inference are waited for before the last mini-batch;
    without it inference is released when no row runs."""

    threshold: Fraction = 0.5
    pre_process: bool = True
    wait_before_last: bool = True

    def __call__(self, state: State) -> list[Action]:
        if state.done == state.minibatches:
            return [Finalize()]
        if state.event == "start":
            return lend_actor(state) if self.pre_process else []
        if state.event == "rows":  # its pre-process ends
            early = state.actor.instances or state.done or state.running_rows > int(state.rows * self.threshold)
            return [] if early else return_actor(state)
        last = state.done == state.minibatches - 1
        actions = self.release_rollouts(state, last)
        after = applied(state, actions)
        if state.inference.instances and ((last and self.wait_before_last) or not after.rollout.instances):
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
        most = max(0, rollout.instances - -(-state.running_rows // state.speeds.decoding.slots))
        if rollout.instances <= 1 or not most:
            return []
        allowed = actor.instances + most * rollout.devices // actor.devices
        increment = (next_size(actor, allowed) - actor.instances) * actor.devices
        count = -(-increment // rollout.devices)
        return released_rollouts(state, count) if 0 < count < rollout.instances else []


rlinf = RLinf


def moves(state: State, to: DeviceSplit, groups: Mapping[int, int] | None = None) -> list[Action]:
    """The actions that lead to the split; `groups` move as given, or those of instances that leave, as RLinf does."""
    rollout, actor = state.rollout.instances, state.actor.instances
    if groups is None:
        leave = state.event != "start" and to.rollout < rollout
        groups = sequential_migration(state, rollout - to.rollout) if leave else {}
    changes = (
        Release("actor", actor - to.actor) if to.actor < actor else None,
        Allocate("rollout", to.rollout - rollout) if to.rollout > rollout else None,
        Migrate(groups) if groups else None,
        Release("rollout", rollout - to.rollout) if to.rollout < rollout else None,
        Allocate("actor", to.actor - actor) if to.actor > actor else None,
    )
    return [action for action in changes if action is not None]


def lend_actor(state: State) -> list[Action]:
    """Rollouts get the actor's devices, as far as whole instances fit."""
    free = state.actor.instances and state.rollout.ids.start
    return moves(state, DeviceSplit(state.rollout.most, 0)) if free else []


def return_actor(state: State) -> list[Action]:
    """Lent devices return to the actor, and their rows continue on the rollouts' own instances."""
    rollout = min(state.rollout.instances, state.rollout.initial)
    return moves(state, DeviceSplit(rollout, state.actor.initial))


def released_rollouts(state: State, count: int) -> list[Action]:
    """The `count` lowest instances release; their groups continue on the others."""
    return moves(state, DeviceSplit(state.rollout.instances - count, state.actor.instances))


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
    count = next_size(state.actor, state.actor_room // state.actor.devices) - state.actor.instances
    return [Allocate("actor", count)] if count > 0 else []


def lend(state: State) -> list[Action]:
    """verl's: the actor's devices generate until the first mini-batch is ready, if the predicted saving exceeds the
    mean of the last three switches; before any, what one is predicted to take."""
    if state.done == state.minibatches:
        return [Finalize()]
    if state.event != "start":
        early = state.actor.instances or not (state.ready >= state.minibatch_groups or not state.running_rows)
        return [] if early else return_actor(state)
    actions, latest, lengths = lend_actor(state), state.switches[-3:], state.lengths
    if not actions or not lengths:
        return []
    mean, decoding = sum(lengths) / len(lengths), state.speeds.decoding

    def seconds(instances: int) -> float:  # a mean response, its step with the rows of an instance, in rounds
        rows = state.rows / instances
        at_once = min(rows, state.speeds.decoding.slots)
        return rows / at_once * mean * (decoding.base + at_once * decoding.per_row)

    saved = (seconds(state.rollout.instances) - seconds(state.rollout.most)) / state.minibatches
    return actions if saved > (sum(latest) / len(latest) if latest else state.speeds.join) else []
