"""Iterations under a device policy, simulated event by event, with known response lengths; and the speeds of a run,
fitted to what its calls took (`Measured`). Pure.

The simulation acts only on actions that `applied` accepts, and calls a policy where the executor calls it: at the
start, as rows finish (each time another 1/32 of all rows has, when a mini-batch is ready for an idle actor, and when no
row is left), and after each mini-batch. A switch takes `join` where rollouts or a lent actor begin, `resize` where the
actor changes its size, and `hand_over` where rows move; meanwhile all other instances continue."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random

import numpy as np

from hybridflow.planner.elastic.policies import decide, static
from hybridflow.planner.elastic.state import (
    LOOKS,
    Action,
    Allocate,
    Component,
    ComponentName,
    Event,
    Migrate,
    Policy,
    Release,
    RunningGroup,
    Speeds,
    State,
    Switch,
    Wait,
    applied,
    listed,
    spread,
)
from hybridflow.planner.stream_simulation import (
    DecodedRow,
    Decoding,
    DecodingReplica,
    DecodingSpeed,
    ResponseLengths,
    drawn,
)
from hybridflow.settings import Count, NonNegative, Positive, Size, require, settings


@settings
class ElasticRun:
    """Iterations of `prompts` groups of `n` responses, with a static placement of all components. Of `lengths` that are
    given, each is that of a row of the iterations in turn, again from the first when they end."""

    devices: Size
    rollout: Size  # instances of `tp` devices
    actor: Size  # instances of `mp` devices
    prompts: Size
    n: Size
    minibatches: Size
    speeds: Speeds
    lengths: ResponseLengths | Sequence[int]
    tp: Size = 1
    mp: Size = 1
    inference: Count = 0  # instances of one device
    prompt_tokens: Count = 0
    actor_sizes: tuple[int, ...] | None = None  # numbers of instances that the actor may have (None: any)
    sync_seconds: NonNegative = 0.0  # of the weight sync at the end of an iteration
    cores: Positive | None = None  # that all processes share: where more are busy, all are slower alike
    iterations: Size = 1
    warm_up: Count = 1  # iterations before, whose lengths are only seen
    seed: Count = 0

    def __post_init__(self) -> None:
        drawn(self.lengths, Random(self.seed))


@dataclass(frozen=True)
class SimulatedIterations:
    """Seconds and switches of each iteration."""

    seconds: tuple[float, ...]
    switches: tuple[tuple[Switch, ...], ...]
    refused: str | None
    """Why the policy was replaced by `static` in an iteration, the first time."""

    @property
    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds)


def simulate_elastic(run: ElasticRun, policy: Policy) -> SimulatedIterations:
    """The run under the policy; equal for equal seeds."""
    seen, iterations = drawn_lengths(run)
    found, costs = list[ElasticSimulation](), list[float]()
    for lengths in iterations:
        found.append(ElasticSimulation(start_of(run, seen, costs), lengths, policy, run.cores).run())
        costs += [switch.seconds for switch in found[-1].switches]
        seen = sorted((*seen, *lengths))
    refused = next((each.refused for each in found if each.refused), None)
    seconds = tuple(each.seconds + run.sync_seconds for each in found)
    return SimulatedIterations(seconds, tuple(tuple(each.switches) for each in found), refused)


def best_static(run: ElasticRun, splits: Iterable[tuple[int, int]]) -> tuple[ElasticRun, float]:
    """The run with the (rollout, actor) instances under which the static placement is fastest, and its mean seconds."""
    runs = [replace(run, rollout=rollout, actor=actor) for rollout, actor in splits]
    return min(((each, simulate_elastic(each, static).mean) for each in runs), key=lambda found: found[1])


def measured_split(state: State, lengths: Sequence[int]) -> tuple[ElasticRun, float]:
    """The static split of a run's devices that is fastest by its measured speeds (RLinf's automatic placement), with
    the sizes that its actor may have, and the predicted seconds of an iteration. `lengths` are those of its responses
    so far. Errors: ConfigError without any, or where no split fits."""
    require(bool(lengths), "no response has been measured yet: ask after an iteration.")
    rollout, actor, inference = state.rollout, state.actor, state.inference.initial
    run = ElasticRun(
        devices=state.devices, rollout=1, actor=actor.sizes[0], prompts=state.rows // state.n, n=state.n,
        minibatches=state.minibatches, speeds=state.speeds, lengths=lengths, tp=rollout.devices, mp=actor.devices,
        inference=inference, actor_sizes=actor.sizes, warm_up=0,
    )  # fmt: skip
    room = {size: (state.devices - inference - size * actor.devices) // rollout.devices for size in actor.sizes}
    splits = [(left, size) for size, left in room.items() if left > 0]
    require(bool(splits), f"no size of the actor, {listed(actor.sizes)}, leaves devices for a rollout.")
    return best_static(run, splits)


def drawn_lengths(run: ElasticRun) -> tuple[list[int], list[list[int]]]:
    """Those of the warm-up, ascending, and those of the rows of each iteration."""
    rows, tokens = run.prompts * run.n, drawn(run.lengths, Random(run.seed))
    seen = sorted(islice(tokens, run.warm_up * rows))
    return seen, [list(islice(tokens, rows)) for _ in range(run.iterations)]


def start_of(
    run: ElasticRun, seen: Sequence[int] = (), costs: Sequence[float] = (), prompts: Sequence[int] | None = None
) -> State:
    """The state at the start of an iteration, when response lengths `seen` (ascending) and `costs`, the seconds of
    switches, are known; `prompts`: the tokens of each one, if they differ. Errors: ConfigError for sizes that the
    devices do not allow."""
    count = run.minibatches
    text = f"{run.prompts} prompts do not make {count} mini-batches of equal size: give a multiple of {count}."
    require(run.prompts % count == 0, text)
    most = (run.devices - run.inference) // run.tp
    require(
        run.actor * run.mp <= (most - run.rollout) * run.tp,
        f"{run.actor} actor instances of {run.mp}, {run.rollout} rollout instances of {run.tp} and {run.inference} "
        f"devices for inference do not fit {run.devices} devices: the rollouts end at device {most * run.tp}, and the "
        f"actor before them.",
    )
    largest = run.devices // run.mp
    sizes = run.actor_sizes or tuple(range(1, largest + 1))
    good = list(sizes) == sorted(set(sizes)) and sizes[0] > 0 and sizes[-1] <= largest and run.actor in sizes
    text = f"give ascending numbers from 1 to {largest}, {run.actor} among them."
    require(good, f"actor_sizes={listed(sizes)}: {text}")
    rollout = Component(run.tp, run.rollout, run.rollout, tuple(range(1, most + 1)))
    tokens = [run.prompt_tokens] * run.prompts if prompts is None else prompts
    return State(
        event="start",
        devices=run.devices,
        rollout=rollout,
        inference=Component(1, run.inference, run.inference, tuple({run.inference} - {0})),
        actor=Component(run.mp, run.actor, run.actor, sizes),
        rows=run.prompts * run.n,
        n=run.n,
        minibatches=run.minibatches,
        running=spread([RunningGroup(group, each, (0,) * run.n) for group, each in enumerate(tokens)], rollout.ids),
        speeds=run.speeds,
        lengths=seen,
        switches=tuple(costs[-3:]),
    )


class ElasticSimulation(Decoding):
    """An iteration that stands at a look of the policy, first at its `start`, with the `lengths` of the rows of group
    0, 1, ..."""

    def __init__(self, start: State, lengths: Sequence[int], policy: Policy, cores: float | None = None) -> None:
        super().__init__(start.speeds.decoding, start.rollout.ids, cores)
        self.state, self.lengths, self.policy = start, lengths, policy  # placement and `done` of the state are of now
        self.groups = {group.group: group for present in start.running.values() for group in present}
        self.unfinished = dict.fromkeys(self.groups, start.n)  # rows of each group
        self.whole: list[int] = []  # groups of no mini-batch yet
        self.queue = deque[tuple[int, float]]()  # tokens of a mini-batch, and when its inference is done
        self.finished_rows = self.looked = 0  # now, at the latest look
        self.formed = False  # a mini-batch since the latest look
        self.trained_at: float | None = None
        self.actor_at = self.inference_at = 0.0  # the actor's devices are its own again; inference has ended
        self.actor_shape = start.actor.instances
        self.refused: str | None = None  # why the policy was replaced by `static`
        self.switches: list[Switch] = []

    @property
    def seconds(self) -> float:
        """Of the iteration so far, without the weight sync."""
        return self.clock

    def run(self) -> ElasticSimulation:
        """To the end."""
        event: Event | None = "start"
        while event is not None:
            self.look(event)
            event = self.until_look()
        return self.ended()

    def until_look(self) -> Event | None:
        """The event of the next one; None after the last mini-batch."""
        while self.state.done < self.state.minibatches:
            state, speeds, actor = self.state, self.state.speeds, self.state.actor.instances
            if self.trained_at is None and actor and self.queue:
                tokens, available = self.queue.popleft()
                seconds = speeds.train + tokens * speeds.train_per_token / actor
                if not state.inference.instances:
                    seconds += speeds.inference + tokens * speeds.inference_per_token / actor
                self.trained_at = max(self.now, self.actor_at, available) + seconds
            boundary = self._advance()
            new, idle = self.finished_rows - self.looked, self.trained_at is None
            last = self.finished_rows == self.state.rows
            due = new > 0 and (new >= self.state.rows / LOOKS or last or (self.formed and idle))
            if boundary or due:
                self.looked, self.formed = self.finished_rows, False
                return "minibatch" if boundary else "rows"
        return None

    def ended(self) -> ElasticSimulation:
        self.pass_until(max(self.now, self.actor_at))
        return self

    def pass_until(self, time: float, others: int = 0) -> float:
        return super().pass_until(time, others + (self.state.actor_end if self.trained_at is not None else 0))

    def _advance(self) -> bool:
        """The next event. Returns whether a mini-batch was trained."""
        trained, row_end = math.inf if self.trained_at is None else self.trained_at, self.next_end()
        if row_end < trained:
            self.pass_until(max(self.now, row_end))
            self._end_row(self.finished())
            return False
        assert trained < math.inf, "nothing runs, and the actor does not train"
        self.pass_until(max(self.now, trained))
        self.trained_at = None
        self.state = replace(self.state, done=self.state.done + 1)
        return True

    def _end_row(self, row: DecodedRow) -> None:
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
            self.queue.append((tokens, available))
            self.whole, self.formed = [], True

    def look(self, event: Event) -> None:
        view = self.view(event)
        actions, refused = decide(self.policy, view)
        delay = 0.0 if self.policy is static else self.state.speeds.look
        if refused is not None:
            self.policy, self.refused = static, refused
        after = applied(view, actions)
        seconds, rows = self.execute(view, after, actions, delay)
        if event == "start":
            for instance, groups in after.running.items():  # rows of a group share the keys and values of their prompt
                replica = self.replicas[instance]
                replica.stalled += delay
                for group in groups:
                    for row, before in enumerate(group.tokens):
                        context, length = before + (0 if row else group.prompt), group.group * view.n + row
                        replica.waiting.append(DecodedRow(group.group, self.lengths[length], context, before))
                self.refill(instance)
        if after.placement != view.placement:
            self.switches.append(Switch(view.seconds, str(view), view.placement, after.placement, seconds, rows))

    def execute(self, view: State, after: State, actions: Sequence[Action], delay: float) -> tuple[float, int]:
        """Returns seconds without waiting or looking, and the rows that moved."""
        speeds, actor, looked, rows = view.speeds, after.actor.instances, delay, 0
        for action in actions:
            match action:
                case Wait(component):
                    self._wait(component)
                case Migrate(groups):
                    rows += self._migrate(groups)
                    delay += speeds.hand_over
                case Release("rollout", count):
                    for instance in sorted(self.replicas)[:count]:
                        del self.replicas[instance]
                        self.busy.discard(instance)
                case Allocate("rollout", count):
                    lowest, stalled = min(self.replicas, default=view.rollout.most), delay + speeds.join
                    for instance in range(lowest - count, lowest):
                        self.replicas[instance] = DecodingReplica(speeds.decoding, self.now, stalled=stalled)
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

    def _wait(self, name: ComponentName) -> None:
        """Other events pass, and nothing begins."""

        def works() -> bool:
            if name == "inference":
                return min(self.next_end(), self.trained_at or math.inf) < self.inference_at
            return bool(self.busy) if name == "rollout" else self.trained_at is not None

        while works():
            self._advance()
        if name == "inference":
            self.pass_until(max(self.now, self.inference_at))

    def _migrate(self, groups: Mapping[int, int]) -> int:
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
        if event == "start":
            return self.state
        running: dict[int, tuple[RunningGroup, ...]] = {}
        for instance, replica in self.replicas.items():
            replica.pass_until(self.now)
            present: dict[int, list[int]] = {}
            for row, tokens in replica.tokens():
                present.setdefault(row.group, []).append(tokens)
            groups = ((self.groups[group], tuple(tokens)) for group, tokens in present.items())
            running[instance] = tuple(group._replace(tokens=tokens) for group, tokens in groups)
        training = self.trained_at is not None
        whole = sum(not rows for rows in self.unfinished.values())
        ready = whole - (self.state.done + training) * self.state.minibatch_groups
        now: dict = {"finished": self.finished_rows, "ready": ready, "seconds": self.now, "training": training}
        return replace(self.state, event=event, running=running, **now)


_KEPT, _LENGTHS, _SWITCHES, _ITERATIONS = 64, 8192, 3, 32


@dataclass
class Measured:
    """What was seen so far: the latest observations count. Without observations of its kind a speed is 0."""

    slots: int = 256  # rows that an instance decodes at once
    lengths: list[int] = field(default_factory=list)  # of responses, ascending
    switches: deque[float] = field(default_factory=lambda: deque(maxlen=_SWITCHES))
    iterations: deque[tuple[bool, float]] = field(default_factory=lambda: deque(maxlen=_ITERATIONS))
    """Of the latest ones: whether devices moved, and seconds per token."""
    _decoding: deque[tuple[float, float, float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _training: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _others: dict[str, deque[float]] = field(default_factory=dict)
    _order: deque[int] = field(default_factory=deque)

    def response(self, tokens: int) -> None:
        insort(self.lengths, tokens)
        self._order.append(tokens)
        if len(self._order) > _LENGTHS:
            self.lengths.remove(self._order.popleft())

    @property
    def in_order(self) -> list[int]:
        """The lengths of responses as they ended."""
        return [*self._order]

    def decoded(self, seconds: float, rows: float, tokens: int, prefilled: int) -> None:
        """An instance decoded `tokens` of `rows` rows at once, on average, and took up `prefilled` tokens."""
        if seconds > 0 and rows > 0 and tokens > 0:
            self._decoding.append((tokens / rows, float(tokens), float(prefilled), seconds))

    def trained(self, seconds: float, tokens: int, instances: int) -> None:
        """A mini-batch of `tokens` by `instances`: all that the loop does with it."""
        if seconds > 0 and instances > 0:
            self._training.append((1.0, tokens / instances, seconds))

    def iteration(self, seconds: float, tokens: int, moved: bool) -> None:
        self.iterations.append((moved, seconds / max(1, tokens)))

    def took(self, what: str, seconds: float) -> None:
        """`what` of `Speeds`: resize, hand_over, join, look."""
        self._others.setdefault(what, deque(maxlen=8)).append(seconds)

    def speeds(self) -> Speeds:
        base, per_row, prefill = fitted(self._decoding, 3)
        if base + per_row == 0:
            base = 1e-6  # nothing seen
        train, per_token = fitted(self._training, 2)
        others = {name: sum(seen) / len(seen) for name, seen in self._others.items()}
        decoding = DecodingSpeed(base=base, per_row=per_row, prefill=prefill, slots=self.slots)
        return Speeds(decoding, train, per_token, **others)


def fitted(seen: Sequence[tuple[float, ...]], count: int) -> list[float]:
    """Coefficients of at least 0 of the first `count` values of each tuple for its last one, which is above 0."""
    if not seen:
        return [0.0] * count
    from scipy.optimize import nnls  # takes a while to import

    rows = np.array(seen)  # the sum of squared relative errors is least
    return nnls(rows[:, :-1] / rows[:, -1:], np.ones(len(rows)))[0].tolist()
