"""Device policies: the published ones, our own, and the guard around any policy. Pure, deterministic.

`gain` makes the move with which the iteration is predicted to end first, by a mean-field forecast: all instances of a
placement decode at one pace, that of a row among the mean number of rows, so that a plan only needs the number of rows
alive after each further decoding step, drawn from the lengths seen: x steps after now, a row is alive if its drawn
length is above its tokens + x. A plan is a first move, at most one further move at a later boundary of mini-batches,
and the actor's growth to all devices when no row is left."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
from hybridflow.settings import Fraction, NonNegative, is_whole, require, settings

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]
Position: TypeAlias = tuple[Floats, Floats, Indices]
"""Over plans: seconds from now, steps of the rows, and the split."""
SHARES = (1, 7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4, 3 / 16, 1 / 8, 1 / 16, 1 / 32)
"""Of the most rollout instances that there can be: those of the splits that are considered."""
ALIVE = (0.75, 0.5, 0.35, 0.25, 0.15, 0.08, 0.04, 0.02, 0.0)
"""Of the rows: when lent devices may return."""
AGAIN = 12
TRIED = 16  # first moves, and ways to stay, for which further moves are considered
_POINTS = 768  # of the curve of rows alive
_BOUNDARIES = 4  # the next ones, at which the further move may be
_SCENARIOS = 8
_DRAWN = 8192  # rows of all scenarios


def valid_sizes(*, n: int, minibatches: int, rows: int, devices: int, mp: int = 1) -> tuple[int, ...]:
    """RLinf's data-parallel sizes of an actor on `devices`: a mini-batch of `rows` prompts with `n` responses each
    splits evenly. Here rows are split without it, so that every size is valid unless these are given."""
    for name, value in {"n": n, "minibatches": minibatches, "rows": rows, "devices": devices, "mp": mp}.items():
        require(is_whole(value) and value > 0, f"{name}={value!r}: give a whole number above 0.")
    return tuple(dp for dp in range(1, devices // mp + 1) if rows * n % (minibatches * dp * n) == 0)


def decide(policy: Policy, state: State) -> tuple[tuple[Action, ...], str | None]:
    """(actions, None). If the policy raises or answers illegally: the actions back to the static placement, and why;
    until the next iteration `static` decides. After the last mini-batch it is not asked."""
    if state.done == state.minibatches:
        return (Finalize(),), None
    try:
        actions = tuple(policy(state))
        applied(state, actions)
    except Exception as error:  # whatever a user's policy raises
        name = getattr(policy, "__name__", policy)
        return tuple(static(state)), f"The policy {name!s:.80} is refused: {type(error).__name__}: {error}"
    return actions, None


def static(state: State) -> list[Action]:
    """The static placement: nothing moves, and what another policy has moved returns."""
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
    return moves(state, DeviceSplit(min(state.rollout.instances, state.rollout.initial), state.actor.initial))


def released_rollouts(state: State, count: int) -> list[Action]:
    """The `count` lowest instances release; their groups continue on the others."""
    return moves(state, state.split._replace(rollout=state.rollout.instances - count))


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


class First(NamedTuple):
    """A move to `split`, when `alive` rows run; None: now."""

    split: DeviceSplit
    alive: int | None = None


@settings
class Gain:
    """Our policy. Without any lengths seen it keeps the static placement."""

    margin: NonNegative = 0.005
    """A move must save this fraction of the forecast time; so must waiting, where lent devices could train."""
    history: bool = True
    """Earlier iterations decide, too."""

    def __call__(self, state: State) -> list[Action]:
        """The first move of the best plan, unless staying is as good."""
        if state.training or not len(state.lengths) or (self.history and not pays(state)):
            return []
        splits = considered(state)
        now, forecast = state.split, Forecast(state, splits, SeenLengths(state.lengths))
        firsts = self.firsts(state, splits)
        rough = forecast.seconds(firsts, further=False)
        going, staying = [], []
        for first in (firsts[i] for i in np.argsort(rough, kind="stable")):
            stays = first == First(now) if now.actor else first.alive is not None
            (staying if stays else going).append(first)
        if not going:  # the devices allow no other split
            return []
        going, staying = going[:TRIED], staying[:TRIED]
        seconds = [float(value) for value in forecast.seconds([*going, *staying], further=True)]
        best = min(range(len(going)), key=lambda i: seconds[i])
        late = not now.actor and state.ready >= state.minibatch_groups
        margin = self.margin * (state.seconds + seconds[best]) * (-1 if late else 1)
        if min(seconds[len(going) :], default=math.inf) <= seconds[best] + margin:
            return []
        split, alive = going[best]
        return balanced(state, split if alive is None else min(splits, key=lambda s: s.actor))

    def firsts(self, state: State, splits: Sequence[DeviceSplit]) -> list[First]:
        """First moves: to each split now; to each from lent devices later."""
        rows, lent = state.running_rows, min(splits, key=lambda split: split.actor)
        firsts = [First(split) for split in splits if split.actor and (split.rollout or not rows)]
        if rows and not lent.actor and (not state.actor.instances or state.event == "start"):
            alive = sorted(a for a in {int(state.rows * share) for share in ALIVE} if a < rows)
            firsts += [First(split, a) for split in splits if split.actor and split.rollout for a in alive]
        return firsts


def pays(state: State) -> bool:
    """Whether iterations in which devices moved were no slower than others, as measured: what a forecast does not know,
    such as processes that share cores, shows there. Both kinds are tried first; then one in `AGAIN` iterations tries
    what was slower."""
    if not state.iterations:
        return True
    still, moved = ([each for found, each in state.iterations if found == kind][-4:] for kind in (False, True))
    if len(still) < 3:  # the first one is slow
        return False
    slower = len(moved) >= 2 and statistics.median(moved) > statistics.median(still)
    return not slower or not any(found for found, _ in state.iterations[-AGAIN:])


def considered(state: State) -> list[DeviceSplit]:
    """Splits among which devices may move: the present one, the static one, and for some numbers of rollout instances
    the largest actor beside them."""
    rollout, actor = state.rollout, state.actor
    own = state.inference.instances * state.inference.devices
    found = {state.split, DeviceSplit(rollout.initial, actor.initial)}
    counts = {max(1, round(rollout.most * share)) for share in SHARES}
    for count in counts | {0, 1, rollout.initial, rollout.instances}:
        room = (rollout.most - count) * rollout.devices if count else state.devices - own
        size = max((size for size in actor.sizes if size * actor.devices <= room), default=0)
        if size or count == rollout.most:
            found.add(DeviceSplit(count, size))
    return sorted(found)


def balanced(state: State, to: DeviceSplit) -> list[Action]:
    """The actions that lead to the split. Groups leave instances, or fill new ones, so that all have as many rows: each
    to the instance with the fewest, cheap ones first."""
    ids = range(state.rollout.most - to.rollout, state.rollout.most)
    if state.event == "start" or to.rollout == state.rollout.instances:
        return moves(state, to, {})
    rows = {i: sum(len(group.tokens) for group in state.running.get(i, ())) for i in ids}
    leaving = [group for i, groups in state.running.items() if i not in rows for group in groups]
    mean = state.running_rows / max(1, len(ids))
    for i in ids if any(i not in state.running for i in ids) else ():
        for group in sorted(state.running.get(i, ()), key=lambda group: group.migration_tokens):
            if rows[i] - len(group.tokens) < mean:
                break
            rows[i] -= len(group.tokens)
            leaving.append(group)
    heap = [(count, i) for i, count in rows.items()]
    heapq.heapify(heap)
    target: dict[int, int] = {}
    for group in sorted(leaving, key=lambda group: (-len(group.tokens), group.migration_tokens)):
        count, target[group.group] = heap[0]
        heapq.heapreplace(heap, (count + len(group.tokens), target[group.group]))
    cheap = sorted(leaving, key=lambda group: group.migration_tokens)
    return moves(state, to, {group.group: target[group.group] for group in cheap})


class SeenLengths:
    """Response lengths seen, ascending, and the mean of those up to each."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.values = np.asarray(lengths, dtype=np.float64)
        self.means = np.cumsum(self.values) / np.arange(1, len(lengths) + 1)

    def remaining(self, tokens: Floats, scenario: int, most: float = math.inf) -> Floats:
        """Drawn for rows that have `tokens`, each by itself, so that the longest one differs between scenarios as it
        does between iterations: evenly between `tokens` and the longer lengths, in their order. A row longer than all
        lengths seen is taken to be half through its last third. No row gets longer than `most`."""
        first = np.searchsorted(self.values, tokens, side="right")
        shares = np.random.default_rng(scenario).random(len(tokens))
        at = first + shares * (len(self.values) - first)
        below = np.minimum(at.astype(np.int64), len(self.values) - 1)
        low = np.where(below > first, self.values[np.maximum(below - 1, 0)], tokens)
        drawn = low + (at - below) * (self.values[below] - low)
        left = np.where(first < len(self.values), drawn - tokens, tokens / 5)
        return np.maximum(1.0, np.minimum(left, most - tokens))

    def mean_until(self, tokens: float) -> float:
        """Of the lengths of at most `tokens`; the shortest one if all are longer."""
        return float(self.means[max(0, int(np.searchsorted(self.values, tokens, side="right")) - 1)])


class RunningRows:
    """Running rows as arrays: `tokens`, and the index of the group, of each; tokens of the `prompts` of the groups."""

    def __init__(self, state: State) -> None:
        running = [group for present in state.running.values() for group in present]
        self.tokens = np.array([tokens for group in running for tokens in group.tokens], dtype=np.float64)
        counts = np.array([len(group.tokens) for group in running], dtype=np.int64)
        self.groups = np.repeat(np.arange(len(running)), counts)
        self.prompts = np.array([group.prompt for group in running], dtype=np.float64)


class Scenario:
    """One draw of the rows' remaining lengths, under some splits (their index: c); arrays are over plans."""

    def __init__(
        self, state: State, rows: RunningRows, remaining: Floats, finished_mean: float, splits: Sequence[DeviceSplit]
    ):
        count, ends = len(remaining), np.zeros(len(rows.prompts))
        np.maximum.at(ends, rows.groups, remaining)
        self.state, self.last = state, float(remaining.max(initial=0.0))
        self.ready, self.tokens = self._minibatches(rows, ends, remaining, finished_mean)
        ordered = np.sort(remaining)
        keep = np.arange(count)
        if count > _POINTS:
            keep = np.union1d(np.linspace(0, count - 1, _POINTS), np.arange(count - _POINTS // 4, count)).astype(int)
        self.x, kept = np.unique(np.concatenate([[0.0], ordered[keep], [self.last + 1.0]]), return_index=True)
        self.alive = np.concatenate([[count], count - 1 - keep, [0]])[kept].astype(np.float64)
        instances = np.array([max(1, split.rollout) for split in splits])[:, None]
        beside = 1.0 + np.maximum(0.0, self.alive[:-1] - 1.0) / instances
        speed = state.speeds.decoding
        pace = np.maximum(1.0, beside / speed.slots) * (speed.base + np.minimum(beside, speed.slots) * speed.per_row)
        self.times = np.zeros((len(splits), len(self.x)))
        np.cumsum(np.diff(self.x) * pace, axis=1, out=self.times[:, 1:])
        self.offset = float(self.times[:, -1].max()) * 4 + 1e6
        self.flat = (self.times + self.offset * np.arange(len(splits))[:, None]).ravel()
        mean = float(rows.tokens.mean()) if count else 0.0
        self.context = mean + float(rows.prompts.sum()) / max(1, count)  # of a row

    def _minibatches(
        self, rows: RunningRows, ends: Floats, remaining: Floats, finished_mean: float
    ) -> tuple[Floats, Floats]:
        """Steps until each further mini-batch is ready, and its tokens."""
        state, prompt = self.state, float(rows.prompts.mean()) if len(rows.prompts) else 0.0
        left, size = state.minibatches - state.done - state.training, state.minibatch_groups
        known = np.bincount(rows.groups, rows.tokens + remaining - finished_mean, minlength=len(ends))
        whole, order = state.n * (finished_mean + prompt), np.argsort(ends, kind="stable")
        tokens = np.concatenate([np.full(state.ready, whole), (known + whole)[order]])
        steps = np.concatenate([np.zeros(state.ready), ends[order]])
        return steps[size - 1 :: size][:left], tokens[: left * size].reshape(left, size).sum(axis=1)

    def seconds(self, c: Indices, x: Floats | float) -> Floats:
        """From now until x under the splits."""
        at = np.clip(np.searchsorted(self.x, x, side="right"), 1, len(self.x) - 1)
        low, high, start = self.x[at - 1], self.x[at], self.times[c, at - 1]
        return start + (x - low) / (high - low) * (self.times[c, at] - start)

    def shifted(self, c: Indices, x: Floats, seconds: Floats | float) -> Floats:
        """x after further seconds (or before), where rows run."""
        width, seconds = len(self.x), self.seconds(c, x) + seconds
        near = np.clip(seconds, 0.0, self.offset / 2)
        at = np.clip(np.searchsorted(self.flat, near + self.offset * c, side="right") - c * width, 1, width - 1)
        low, high, start = self.x[at - 1], self.x[at], self.times[c, at - 1]
        return np.where(x < self.last, low + (seconds - start) / (self.times[c, at] - start) * (high - low), x)

    def recomputed(self, x: Floats | float) -> Floats:
        """Seconds of one instance for the keys and values of all rows alive at x."""
        alive = np.interp(x, self.x, self.alive)
        return alive * (self.context + np.maximum(0.0, x)) * self.state.speeds.decoding.prefill


class _Plans(NamedTuple):
    """Index of the first move; at which later boundary (0: none) the actor and rollouts move to the split `then`."""

    firsts: Sequence[First]
    first: Indices
    boundary: Indices
    then: Indices


class Forecast:
    """Plans of a state among `splits`, with the rows' lengths drawn from those seen."""

    def __init__(self, state: State, splits: Sequence[DeviceSplit], lengths: SeenLengths) -> None:
        self.state, self.splits, self.now = state, splits, splits.index(state.split)
        self.instances, self.actors = np.array(splits, dtype=np.float64).reshape(-1, 2).T
        self.speed = np.maximum(self.actors, 1e-9)  # lent devices train in no time of interest
        self.largest = int(np.argmax(self.actors))
        self.lent = self.now if not state.actor.instances else int(np.argmin(self.actors))
        rows = RunningRows(state)
        count = int(np.clip(_DRAWN // max(1, len(rows.tokens)), 2, _SCENARIOS))
        tokens = float(rows.tokens.mean()) if len(rows.tokens) else math.inf
        finished = lengths.mean_until(tokens) if state.finished else 0.0
        draws = (lengths.remaining(rows.tokens, number, state.max_tokens) for number in range(count))
        self.scenarios = [Scenario(state, rows, remaining, finished, splits) for remaining in draws]

    def seconds(self, firsts: Sequence[First], further: bool) -> Floats:
        """From now to the end for each first move, with the best further one if `further`; the mean over scenarios."""
        left = self.state.minibatches - self.state.done - self.state.training
        later = [(0, 0)]
        if further:
            later += list(product(range(1, min(left, _BOUNDARIES + 1)), map(int, np.flatnonzero(self.actors))))
        pairs = [(first, *then) for first, then in product(range(len(firsts)), later)]
        plans = _Plans(firsts, *np.array(pairs, dtype=np.int64).T)
        ends = [self.ends(scenario, plans) for scenario in self.scenarios]
        return np.mean(ends, axis=0).reshape(len(firsts), len(later)).min(axis=1)

    def ends(self, scenario: Scenario, plans: _Plans) -> Floats:
        seconds, x, c = self.after_first(scenario, plans)
        speeds, own = self.state.speeds, self.state.inference.instances
        left = float(scenario.tokens.sum())
        for boundary, (tokens, ready) in enumerate(zip(scenario.tokens, scenario.ready, strict=True)):
            if boundary:
                to = np.where(plans.boundary == boundary, plans.then, c)
                saved = left * speeds.train_per_token * (1 / self.speed[c] - 1 / self.speed[self.largest])
                back = speeds.resize * (self.actors[c] == self.state.actor.initial)
                grow = (x >= scenario.last) & (saved > speeds.resize + back)
                seconds, x, c = self.moved(scenario, seconds, x, c, np.where(grow, self.largest, to))
            wait = np.maximum(0.0, scenario.seconds(c, float(ready)) - scenario.seconds(c, x)) * (ready > x)
            inference = speeds.inference + tokens * speeds.inference_per_token / (own or self.speed[c])
            wait += np.where(wait > 0, inference, 0.0) if own else inference
            wait += speeds.train + tokens * speeds.train_per_token / self.speed[c]
            seconds, x, left = seconds + wait, scenario.shifted(c, x, wait), left - tokens
        away = self.actors[c] != self.state.actor.initial, self.instances[c] != self.state.rollout.initial
        return seconds + speeds.resize * away[0] + speeds.join * away[1]

    def after_first(self, scenario: Scenario, plans: _Plans) -> Position:
        """When the actor is free, the position of the rows at that time, and the split."""
        start, join = self.state.event == "start", self.state.speeds.join
        to = np.array([self.splits.index(first.split) for first in plans.firsts])[plans.first]
        alive = np.array([-1 if first.alive is None else first.alive for first in plans.firsts])[plans.first]
        waits = alive >= 0
        x = scenario.x[np.clip(np.searchsorted(-scenario.alive, -alive), 0, len(scenario.x) - 2)] * waits
        c = np.where(waits, self.lent, to if start else self.now)
        seconds = np.where(waits, scenario.seconds(c, x), 0.0)
        if start:
            begins = (self.instances[c] > self.instances[self.now]) * join
            opening = scenario.recomputed(0.0) / np.maximum(1.0, self.instances[c])
            resized = (self.actors[c] != self.actors[self.now]) & (self.actors[c] > 0)
            free = begins + resized * self.state.speeds.resize
            seconds = np.where(waits, seconds + begins + opening, free)
            x = np.where(waits, x, scenario.shifted(c, x, free - begins - opening))
        return self.moved(scenario, seconds, x, c, to)

    def moved(self, scenario: Scenario, seconds: Floats, x: Floats, c: Indices, to: Indices) -> Position:
        """After moves from split to split; where rows cannot move to no instance, none is made."""
        to = np.where((x < scenario.last) & (self.instances[to] == 0), c, to)
        speeds, before, after = self.state.speeds, self.instances[c], self.instances[to]
        away, rows = c != to, x < scenario.last
        begun = speeds.hand_over * (away & rows) + speeds.join * (after > before)
        share = np.abs(after - before) / np.maximum(1.0, np.maximum(after, before))
        held = begun + share * scenario.recomputed(x) / np.maximum(1.0, np.minimum(before, after))
        a, b = self.actors[c], self.actors[to]
        lent = speeds.join + speeds.resize * (b != self.state.actor.initial)
        free = begun + np.where(a == 0, lent, speeds.resize * (a != b))
        moved = scenario.shifted(to, x, free - held)
        return np.where(away, seconds + free, seconds), np.where(away, moved, x), to


gain = Gain  # as `rlinf()`
POLICIES: dict[str, Policy] = {"gain": gain(), "rlinf": rlinf(), "lend": lend, "static": static}
