"""From a state to the next: the static state of an iteration's start, and the state after actions. Pure.

`applied` is the law: simulation and executor act only on actions that it accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.planner.elastic.state import (
    Action,
    Allocate,
    Component,
    ComponentName,
    Finalize,
    Migrate,
    Release,
    RunningGroup,
    State,
    Wait,
)
from hybridflow.settings import is_whole, require

_NAMES: tuple[ComponentName, ...] = ("rollout", "inference", "actor")


@dataclass(frozen=True)
class Switch:
    """Devices that moved."""

    when: float
    """Seconds of the iteration."""
    why: str
    origin: Mapping[str, int]
    target: Mapping[str, int]
    """Instances of each component before and after."""
    seconds: float
    rows: int
    """Unfinished ones that moved."""


def placement(state: State) -> dict[str, int]:
    return {name: getattr(state, name).instances for name in _NAMES}


def why(state: State) -> str:
    """What a policy decided upon, in words."""
    rows, trained = f"{state.running_rows} of {state.rows} rows", f"{state.done} of {state.minibatches} mini-batches"
    return f"{state.event}: {rows} run, {trained} are trained"


def applied(state: State, actions: Sequence[Action]) -> State:
    """The state after the actions, in their order. Errors: ConfigError naming the first illegal one."""
    require(isinstance(actions, (list, tuple)), f"a policy returned {actions!r:.80}: return a list of actions.")
    before, waited = state, set[str]()
    for position, action in enumerate(actions):
        try:
            state = _after(state, action, waited)
        except ConfigError as error:
            raise ConfigError(f"Action {position + 1} of {len(actions)}, {action!r:.200}: {error}") from None
    if before.event == "start" and state.running is not before.running:
        groups = (group for present in before.running.values() for group in present)
        state = replace(state, running=spread(groups, state.rollout.ids))
    over = state.done == state.minibatches
    at_home = all(getattr(state, name).instances == getattr(state, name).initial for name in _NAMES)
    require(not over or at_home, "after the last mini-batch devices return: answer [Finalize()].")
    rows = state.running_rows
    require(state.rollout.instances > 0 or not rows, f"{rows} rows have no rollout instance left: keep one.")
    trains = state.actor.instances > 0 or over or rows > 0
    require(trains, "no row runs, and the actor has no devices to train on: allocate some.")
    return state


def _after(state: State, action: Any, waited: set[str]) -> State:
    require(isinstance(action, Release | Allocate | Migrate | Wait | Finalize), "this is no action.")
    if state.done == state.minibatches:
        require(isinstance(action, Finalize), "all mini-batches are trained: only Finalize() may follow.")
        initial: Any = {name: replace(c, instances=c.initial) for name in _NAMES for c in [getattr(state, name)]}
        return replace(state, running=dict.fromkeys(initial["rollout"].ids, ()), **initial)
    match action:
        case Release(component, count) | Allocate(component, count):
            require(component in _NAMES, f"there is no component {component!r}: {', '.join(_NAMES)}.")
            require(is_whole(count) and count > 0, f"{count!r} instances: give a whole number above 0.")
            idle = component != "actor" or not state.training
            require(idle, "the actor trains a mini-batch: act at the next boundary, or Wait('actor') first.")
            return _resized(state, component, count if isinstance(action, Allocate) else -count, waited)
        case Migrate(groups):
            return _migrated(state, groups)
        case Wait(component):
            require(component in _NAMES, f"there is no component {component!r}: {', '.join(_NAMES)}.")
            waited.add(component)
            if component == "actor" and state.training:
                return replace(state, training=False, done=state.done + 1)
            if component != "rollout":
                return state
            require(state.event != "start", "no row was submitted: wait at a later event.")
            ready = state.rows // state.n - (state.done + state.training) * state.minibatch_groups
            return replace(state, running=dict.fromkeys(state.rollout.ids, ()), finished=state.rows, ready=ready)
        case _:
            raise ConfigError(f"{state.minibatches - state.done} mini-batches are not trained yet.")


def _resized(state: State, name: ComponentName, change: int, waited: set[str]) -> State:
    component: Component = getattr(state, name)
    size = component.instances + change
    require(size >= 0, f"{name} has {component.instances} instances.")
    require(size <= component.most, f"{name} has {component.instances} instances, at most {component.most}.")
    require(not size or size in component.sizes, f"{name} cannot have {size} instances: {listed(component.sizes)}.")
    running = dict(state.running)
    if name == "inference":
        require(change < 0 and not size, "inference releases all its instances, and gets them back at the end.")
        require(name in waited, "inference may be at work: Wait('inference') first.")
    elif name == "actor":
        room = state.actor_room - state.actor_end
        require(change * component.devices <= room, f"{max(0, room)} devices after the actor's are free.")
    elif change > 0:
        require(change <= state.rollout_room, f"the free devices allow {state.rollout_room} instances.")
        running |= dict.fromkeys(range(component.ids.start - change, component.ids.start), ())
    else:
        require(size > 0 or state.event != "start", "rows need a rollout instance.")
        for instance in component.ids[:-change]:
            groups = running.pop(instance, ())
            empty = not groups or state.event == "start"
            require(empty, f"{len(groups)} groups run on rollout instance {instance}: migrate them first.")
    resized: Any = {name: replace(component, instances=size), "running": running}
    return replace(state, **resized)


def _migrated(state: State, groups: Mapping[int, int]) -> State:
    require(isinstance(groups, Mapping) and len(groups) > 0, "give a mapping from groups to instances.")
    require(state.event != "start", "no group was submitted: they are spread over the instances after the start.")
    moving: dict[int, RunningGroup] = {}
    running: dict[int, tuple[RunningGroup, ...]] = {}
    for instance, present in state.running.items():
        running[instance] = tuple(group for group in present if group.group not in groups)
        moving |= {group.group: group for group in present if group.group in groups}
        stays = [group.group for group in present if groups.get(group.group) == instance]
        require(not stays, f"group {stays[:1]} runs on instance {instance} already.")
    arriving: dict[int, list[RunningGroup]] = {}
    for group, instance in groups.items():
        require(group in moving, f"group {group!r} does not run: its rows are finished, or it never was.")
        require(is_whole(instance) and instance in state.rollout.ids, f"there is no rollout instance {instance!r}.")
        arriving.setdefault(instance, []).append(moving[group])
    running |= {instance: (*running.get(instance, ()), *came) for instance, came in arriving.items()}
    return replace(state, running=running)


def spread(groups: Iterable[RunningGroup], ids: range) -> dict[int, tuple[RunningGroup, ...]]:
    """Groups in turn over the rollout instances."""
    ordered = sorted(groups)
    return {instance: tuple(ordered[place :: len(ids)]) for place, instance in enumerate(ids)}


def listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) < 20 else f"{sizes[0]}, {sizes[1]}, ..., {sizes[-1]}"
