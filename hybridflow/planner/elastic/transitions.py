"""From a state to the next: the static state of an iteration's start, and the state after actions. Pure.

`applied` is the law: simulation and executor act only on actions that it accepts.
"""

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
    Speeds,
    State,
    Wait,
)
from hybridflow.settings import is_whole, require

_NAMES: tuple[ComponentName, ...] = ("rollout", "inference", "actor")


@dataclass(frozen=True)
class Switch:
    """Devices that moved: at `when` seconds of the iteration, `why`, the instances of each component before and after,
    how long it took, and the unfinished rows that moved."""

    when: float
    why: str
    origin: Mapping[str, int]
    target: Mapping[str, int]
    seconds: float
    rows: int


def placement(state: State) -> dict[str, int]:
    """Instances of each component."""
    return {name: getattr(state, name).instances for name in _NAMES}


def why(state: State) -> str:
    """What a policy decided upon, in words."""
    return (
        f"{state.event}: {state.running_rows} of {state.rows} rows run, {state.done} of {state.minibatches} "
        f"mini-batches are trained"
    )


def static_state(
    *,
    devices: int,
    rollout: int,
    actor: int,
    prompts: Sequence[int],
    n: int,
    minibatches: int,
    speeds: Speeds,
    tp: int = 1,
    mp: int = 1,
    inference: int = 0,
    inference_devices: int = 1,
    actor_sizes: Iterable[int] | None = None,
    rollout_sizes: Iterable[int] | None = None,
    lengths: Sequence[int] = (),
    switches: Sequence[float] = (),
    max_running: int = 256,
) -> State:
    """The state at the start of an iteration of a group of `n` rows for each of `prompts` (their tokens), with
    `rollout` instances of `tp` devices, `actor` of `mp` and `inference` of `inference_devices`.

    Errors: ConfigError for sizes that the devices do not allow."""
    whole = {"devices": devices, "rollout": rollout, "actor": actor, "n": n, "minibatches": minibatches}
    whole |= {"tp": tp, "mp": mp, "inference_devices": inference_devices, "max_running": max_running}
    for name, value in whole.items():
        require(is_whole(value) and value > 0, f"{name}={value!r}: give a whole number above 0.")
    require(is_whole(inference) and inference >= 0, f"inference={inference!r}: give a whole number of at least 0.")
    groups, own = len(prompts), inference * inference_devices
    require(
        groups > 0 and groups % minibatches == 0,
        f"{groups} prompts do not make {minibatches} mini-batches of equal size: give a multiple of {minibatches}.",
    )
    most = (devices - own) // tp
    require(
        actor * mp + rollout * tp + own <= devices and rollout <= most and actor * mp <= (most - rollout) * tp,
        f"{actor} actor instances of {mp}, {rollout} rollout instances of {tp} and {own} devices for inference do not "
        f"fit {devices} devices: the rollouts end at device {most * tp}, and the actor before them.",
    )
    state = State(
        event="start",
        devices=devices,
        rollout=Component(tp, rollout, rollout, _sizes("rollout", rollout_sizes, most, rollout, through=most)),
        inference=Component(inference_devices, inference, inference, (inference,) if inference else ()),
        actor=Component(mp, actor, actor, _sizes("actor", actor_sizes, devices // mp, actor)),
        rows=groups * n,
        n=n,
        minibatches=minibatches,
        done=0,
        finished=0,
        ready=0,
        running={0: tuple(RunningGroup(group, tokens, (0,) * n) for group, tokens in enumerate(prompts))},
        speeds=speeds,
        lengths=lengths,
        switches=tuple(switches),
        max_running=max_running,
    )
    return replace(state, running=_spread(state, state.rollout.ids))


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
        state = replace(state, running=_spread(before, state.rollout.ids))
    over = state.done == state.minibatches
    at_home = all(getattr(state, name).instances == getattr(state, name).initial for name in _NAMES)
    require(not over or at_home, "after the last mini-batch devices return: answer [Finalize()].")
    require(
        state.rollout.instances > 0 or not state.running_rows,
        f"{state.running_rows} rows have no rollout instance left: keep one.",
    )
    require(
        state.actor.instances > 0 or over or state.running_rows > 0,
        "no row runs, and the actor has no devices to train on: allocate some.",
    )
    return state


def _after(state: State, action: Any, waited: set[str]) -> State:
    require(isinstance(action, Release | Allocate | Migrate | Wait | Finalize), "this is no action.")
    if state.done == state.minibatches:
        require(isinstance(action, Finalize), "all mini-batches are trained: only Finalize() may follow.")
        return _finalized(state)
    match action:
        case Release(component, count) | Allocate(component, count):
            require(component in _NAMES, f"there is no component {component!r}: {', '.join(_NAMES)}.")
            require(is_whole(count) and count > 0, f"{count!r} instances: give a whole number above 0.")
            require(
                component != "actor" or not state.training,
                "the actor trains a mini-batch: act at the next boundary, or Wait('actor') first.",
            )
            return _resized(state, component, count if isinstance(action, Allocate) else -count, waited)
        case Migrate(groups):
            return _migrated(state, groups)
        case Wait(component):
            require(component in _NAMES, f"there is no component {component!r}: {', '.join(_NAMES)}.")
            waited.add(component)
            return _waited(state, component)
        case _:
            raise ConfigError(f"{state.minibatches - state.done} mini-batches are not trained yet.")


def _resized(state: State, name: ComponentName, change: int, waited: set[str]) -> State:
    component: Component = getattr(state, name)
    size = component.instances + change
    require(size >= 0, f"{name} has {component.instances} instances.")
    require(size <= component.most, f"{name} has {component.instances} instances, at most {component.most}.")
    require(not size or size in component.sizes, f"{name} cannot have {size} instances: {_listed(component.sizes)}.")
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
            require(
                not groups or state.event == "start",
                f"{len(groups)} groups run on rollout instance {instance}: migrate them first.",
            )
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


def _waited(state: State, name: ComponentName) -> State:
    if name == "actor" and state.training:
        return replace(state, training=False, done=state.done + 1)
    if name != "rollout":
        return state
    require(state.event != "start", "no row was submitted: wait at a later event.")
    trained = (state.done + state.training) * state.minibatch_groups
    ready, nothing = state.rows // state.n - trained, dict.fromkeys(state.rollout.ids, ())
    return replace(state, running=nothing, finished=state.rows, ready=ready)


def _finalized(state: State) -> State:
    initial: Any = {name: replace(c, instances=c.initial) for name in _NAMES for c in [getattr(state, name)]}
    state = replace(state, **initial)
    return replace(state, running=dict.fromkeys(state.rollout.ids, ()))


def _spread(state: State, ids: range) -> dict[int, tuple[RunningGroup, ...]]:
    """Its groups in turn over the rollout instances."""
    groups = sorted(group for present in state.running.values() for group in present)
    return {instance: tuple(groups[place :: len(ids)]) for place, instance in enumerate(ids)}


def _sizes(name: str, given: Iterable[int] | None, most: int, initial: int, through: int = 0) -> tuple[int, ...]:
    sizes = tuple(range(1, most + 1)) if given is None else tuple(given)
    require(
        list(sizes) == sorted(set(sizes)) and len(sizes) > 0 and sizes[0] > 0 and sizes[-1] <= most,
        f"{name} sizes {_listed(sizes)}: give ascending numbers of instances from 1 to {most}.",
    )
    for needed in (initial, through or initial):
        require(needed in sizes, f"{name} sizes {_listed(sizes)} are without {needed}, which it may have: add it.")
    return sizes


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) < 20 else f"{sizes[0]}, {sizes[1]}, ..., {sizes[-1]}"
