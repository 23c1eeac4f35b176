"""Which devices generate and which train within one iteration: the state that a policy sees, and its actions. Pure.

`applied` is the law: simulation and executor act only on actions that it accepts.
Devices stand in a line of N. The actor has the first ones, its own inference groups the last ones, if any:

    |  actor: a instances of mp  |  (idle)  |  rollout: instances offset .. R-1 of tp  |  inference  |

Rollout instance i has the devices [i tp, (i + 1) tp), so rollouts release the lowest ids first and the actor grows into
their place. At the start of an iteration the placement is the static one; a policy returns actions at its start, as
rows finish, and between mini-batches; after the last one everything returns to the static placement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from hybridflow.errors import ConfigError
from hybridflow.planner.stream_simulation import DecodingSpeed
from hybridflow.settings import is_whole, require

ComponentName = Literal["rollout", "inference", "actor"]
Event = Literal["start", "rows", "minibatch"]
_NAMES: tuple[ComponentName, ...] = get_args(ComponentName)

LOOKS = 32
"""Of a policy at rows that finish, per iteration."""


class RunningGroup(NamedTuple):
    """A group of responses with unfinished rows: the tokens of its prompt, and those that each unfinished row has."""

    group: int
    prompt: int
    tokens: tuple[int, ...]

    @property
    def migration_tokens(self) -> int:
        """Tokens whose keys and values another instance has to compute: one prompt, and what was decoded."""
        return self.prompt + sum(self.tokens)


@dataclass(frozen=True)
class Component:
    """`instances` of `devices` each, `initial` of them in the static placement; `sizes` are the numbers of instances
    above 0 that it may have, ascending. With 0 its devices are lent or released, or it never had any."""

    devices: int
    initial: int
    instances: int
    sizes: tuple[int, ...]

    @property
    def most(self) -> int:
        return self.sizes[-1] if self.sizes else 0

    @property
    def ids(self) -> range:
        """The instances of rollouts that are not released (RLinf: range(offset, initial))."""
        return range(self.most - self.instances, self.most)


class DeviceSplit(NamedTuple):
    """Instances of rollouts and of the actor."""

    rollout: int
    actor: int


@dataclass(frozen=True)
class Speeds:
    """Measured seconds. A mini-batch of T tokens trains for `train` + T `train_per_token` / instances of the actor;
    inference before it likewise, on instances of its own, or on the actor's devices if it has none."""

    decoding: DecodingSpeed
    train: float = 0.0
    train_per_token: float = 0.0
    inference: float = 0.0
    inference_per_token: float = 0.0
    resize: float = 0.0  # the actor's move to another size
    hand_over: float = 0.0  # rows leave an instance and are submitted to others; their prefill is in `decoding`
    join: float = 0.0  # an instance begins to decode, or its devices return to the actor
    look: float = 0.0  # one look of the policy


@dataclass(frozen=True)
class State:
    """`rows` of the iteration in groups of `n`; `finished` rows; `ready` whole groups that wait for a mini-batch;
    `done` of `minibatches` are trained, and one more is under way if `training`: then the actor keeps its size.
    `running` has the unfinished groups of each rollout instance. Of the run so far, oldest first: `lengths`, the
    response lengths in ascending order; `switches`, the seconds of the latest switches; `iterations`, whether devices
    moved in the latest iterations, and their seconds per token. `seconds`: since the start of the iteration. At "start"
    no group has been submitted: `applied` spreads them over the instances then."""

    event: Event
    devices: int
    rollout: Component
    inference: Component
    actor: Component
    rows: int
    n: int
    minibatches: int
    running: Mapping[int, tuple[RunningGroup, ...]]
    speeds: Speeds
    done: int = 0
    finished: int = 0
    ready: int = 0
    lengths: Sequence[int] = ()
    max_tokens: float = math.inf  # of a response
    switches: tuple[float, ...] = ()
    iterations: tuple[tuple[bool, float], ...] = ()
    seconds: float = 0.0
    training: bool = False

    def __str__(self) -> str:
        rows, trained = f"{self.running_rows} of {self.rows} rows", f"{self.done} of {self.minibatches} mini-batches"
        return f"{self.event}: {rows} run, {trained} are trained"

    @property
    def placement(self) -> dict[str, int]:
        """Instances of each component."""
        return {name: getattr(self, name).instances for name in _NAMES}

    @property
    def split(self) -> DeviceSplit:
        return DeviceSplit(self.rollout.instances, self.actor.instances)

    @property
    def running_rows(self) -> int:
        return sum(len(group.tokens) for groups in self.running.values() for group in groups)

    @property
    def minibatch_groups(self) -> int:
        return self.rows // self.n // self.minibatches

    @property
    def actor_end(self) -> int:
        return self.actor.instances * self.actor.devices

    @property
    def actor_room(self) -> int:
        """Devices that the actor has, or could have without another component's release."""
        inference = self.inference.instances * self.inference.devices
        rollouts = self.rollout.ids.start * self.rollout.devices if self.rollout.instances else self.devices
        return min(rollouts, self.devices - inference)

    @property
    def rollout_room(self) -> int:
        """Rollout instances that the free devices below the present ones allow."""
        return (self.rollout.ids.start * self.rollout.devices - self.actor_end) // self.rollout.devices


@dataclass(frozen=True)
class Release:
    """The component gives up `instances`: rollouts their lowest ids (whose groups were migrated before), the actor its
    highest; inference all of them."""

    component: ComponentName
    instances: int


@dataclass(frozen=True)
class Allocate:
    """The component gets `instances` more, on free devices: rollouts the ids below their lowest, the actor the devices
    after its last."""

    component: ComponentName
    instances: int


@dataclass(frozen=True)
class Migrate:
    """Unfinished groups continue on other rollout instances: group -> instance, in the order of submission."""

    groups: Mapping[int, int]


@dataclass(frozen=True)
class Wait:
    """Nothing else happens until the component has finished all that it runs."""

    component: ComponentName


@dataclass(frozen=True)
class Finalize:
    """Return to the static placement: after the last mini-batch."""


Action: TypeAlias = Release | Allocate | Migrate | Wait | Finalize
Policy: TypeAlias = Callable[[State], Sequence[Action]]


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
    if not isinstance(action, Migrate | Finalize):
        require(action.component in _NAMES, f"there is no component {action.component!r}: {', '.join(_NAMES)}.")
    match action:
        case Release(component, count) | Allocate(component, count):
            require(is_whole(count) and count > 0, f"{count!r} instances: give a whole number above 0.")
            idle = component != "actor" or not state.training
            require(idle, "the actor trains a mini-batch: act at the next boundary, or Wait('actor') first.")
            return _resized(state, component, count if isinstance(action, Allocate) else -count, waited)
        case Migrate(groups):
            return _migrated(state, groups)
        case Wait(component):
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
