"""Which devices generate and which train within one iteration: the state that a policy sees, and its actions. Pure.

Devices stand in a line of N. The actor has the first ones, its own inference groups the last ones, if any:

    |  actor: a instances of mp  |  (idle)  |  rollout: instances offset .. R-1 of tp  |  inference  |

Rollout instance i has the devices [i tp, (i + 1) tp), so rollouts release the lowest ids first and the actor grows into
their place. At the start of an iteration the placement is the static one; a policy returns actions at its start, as
rows finish, and between mini-batches; after the last one everything returns to the static placement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from hybridflow.planner.stream_simulation import DecodingSpeed

ComponentName = Literal["rollout", "inference", "actor"]
Event = Literal["start", "rows", "minibatch"]

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
    no group has been submitted: `transitions.applied` spreads them over the instances then."""

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
