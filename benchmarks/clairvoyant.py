"""How fast an iteration could be for one who knows the lengths: a search over schedules, not over forecasts. Pure.

It forks the simulation where something may be decided, tries the legal splits of the devices there, with rows placed
by their number or by their known lengths, and simulates each to the end as if no device moved again. Nothing of how
`gain` chooses is in it. Own inference groups keep their devices; rows never wait so that others are faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from hybridflow.planner.elastic.policies import moves, static
from hybridflow.planner.elastic.simulation import ElasticSimulation
from hybridflow.planner.elastic.state import Action, Component, DeviceSplit, Event, Finalize, State
from hybridflow.settings import Fraction, Size, settings

SHARES = (0.97, 0.75, 0.5, 0.35, 0.25, 0.18, 0.14, 0.11, 0.09, 0.07, 0.055, 0.04, 0.02, 0.01)


@dataclass
class _Branch:
    """A simulation that stands at a decision, and its seconds if no device moves again; shares `passed`;
    `path`: the share of rows that ran at each move, and the split."""

    simulation: ElasticSimulation
    event: Event | None
    passed: int = 0
    seconds: float = math.inf
    path: tuple[tuple[float, DeviceSplit], ...] = ()

    @property
    def split(self) -> DeviceSplit:
        state = self.simulation.state
        return DeviceSplit(state.rollout.instances, state.actor.instances)

    def earliest(self) -> float:
        """Seconds before which it does not end: the largest actor trains the rest."""
        state, speeds = self.simulation.state, self.simulation.state.speeds
        tokens = sum(tokens for tokens, _ in self.simulation.queue)
        rest = (state.minibatches - state.done) * speeds.train + tokens * speeds.train_per_token / state.actor.most
        return self.simulation.now + rest


@settings
class Search:
    """`width` schedules are kept at each of their decisions; None: all of them, which finds the best of all schedules
    with these decisions, for tiny iterations. There is a decision at the start, after each mini-batch, and when at most
    each of the `shares` of the rows run, and none; None: at each look. `splits` numbers of rollout instances are tried.
    With twice as many of them as `instances`, a sample of the groups is searched first, and of all only near that."""

    width: Size | None = 5
    shares: tuple[Fraction, ...] | None = SHARES
    splits: Size = 6
    instances: Size = 8

    def seconds(self, start: State, lengths: Sequence[int]) -> float:
        """Of the best schedule found, the static one among them: of few instances with as many rows each, if there are
        many; then of all."""
        start = replace(start, speeds=replace(start.speeds, look=0.0))
        few, fewer, by = thinned(start, lengths, self.instances)
        sizes, step = few.rollout.sizes, (len(few.rollout.sizes) - 1) / max(1, self.splits - 1)
        counts = {0, few.rollout.initial, *(sizes[round(step * i)] for i in range(self.splits))}
        found = self.best(few, fewer, self.shares, counts)
        if by > 1:
            counts = {start.rollout.initial, *(split.rollout * by for _, split in found.path)}
            found = replace(self, width=2).best(start, lengths, [share for share, _ in found.path], counts)
        return min(found.seconds, ElasticSimulation(start, lengths, static).run().seconds)  # `_ended` may move devices

    def best(
        self, start: State, lengths: Sequence[int], shares: Sequence[float] | None, counts: Iterable[int]
    ) -> _Branch:
        """With some numbers of rollout instances."""
        root = _Branch(ElasticSimulation(start, lengths, static), "start")
        root.seconds, splits = _ended(root), splits_of(start, counts)
        best, beam = root, [root]
        while beam:
            found = [child for branch in beam for child in self.children(branch, shares, splits)]
            best = min([best, *found], key=lambda branch: branch.seconds)
            beam = self.kept([child for child in found if child.event is not None], best.seconds)
        return best

    def children(
        self, branch: _Branch, shares: Sequence[float] | None, splits: Sequence[DeviceSplit]
    ) -> Iterator[_Branch]:
        view = branch.simulation.view(branch.event or "rows")
        for actions in choices(view, branch.simulation.lengths, splits):
            child = replace(branch, simulation=_forked(branch.simulation))
            _act(child, actions)
            if actions:
                child.path = (*branch.path, (view.running_rows / view.rows, child.split))
            _advance(child, shares)
            if actions or child.event is None:
                child.seconds = _ended(child)
            yield child

    def kept(self, branches: Sequence[_Branch], best: float) -> list[_Branch]:
        """Those which may become better than the best: of each split the fastest, then the second fastest, and so on.
        Before them the earliest that lends all devices, as its seconds without their return say little."""
        hopeful = sorted((branch for branch in branches if branch.earliest() < best), key=lambda branch: branch.seconds)
        lent = min((branch for branch in hopeful if not branch.split.actor), key=_Branch.earliest, default=None)
        seen, ranked = Counter[DeviceSplit](), list[tuple[int, _Branch]]()
        for branch in hopeful:
            ranked.append((-1 if branch is lent else seen[branch.split], branch))
            seen[branch.split] += branch is not lent
        return [branch for _, branch in sorted(ranked, key=itemgetter(0))[: self.width]]


def thinned(start: State, lengths: Sequence[int], most: int) -> tuple[State, list[int], int]:
    """The state with every `by`-th group, in the order of their longest rows, and as many instances, and `by`: where
    all numbers allow it, so that `most` to twice as many rollout instances remain."""
    groups = sorted(group for present in start.running.values() for group in present)
    n, by = start.n, 1
    whole = (start.devices, start.rollout.most, start.rollout.initial, start.actor.initial, start.minibatch_groups)
    while start.rollout.most >= 2 * by * most and not start.inference.instances:
        if any(number % (2 * by) for number in whole):
            break
        by *= 2

    def fewer(component: Component) -> Component:
        sizes = tuple(size // by for size in component.sizes if size % by == 0)
        return Component(component.devices, component.initial // by, component.instances // by, sizes)

    kept = sorted(sorted(groups, key=lambda g: -max(lengths[g.group * n : g.group * n + n]))[::by])
    rollout, actor, count = fewer(start.rollout), fewer(start.actor), len(kept)
    running = {
        i: tuple(kept[j]._replace(group=j) for j in range(at, count, len(rollout.ids)))
        for at, i in enumerate(rollout.ids)
    }
    state = replace(start, devices=start.devices // by, rollout=rollout, actor=actor, rows=count * n, running=running)
    return state, [length for g in kept for length in lengths[g.group * n : g.group * n + n]], by


def _advance(branch: _Branch, shares: Sequence[float] | None) -> None:
    """To its next decision."""
    simulation = branch.simulation
    while (event := simulation.until_look()) is not None:
        branch.event, rows = event, simulation.state.rows
        if simulation.state.done == simulation.state.minibatches:
            _act(branch, [Finalize()])
        elif simulation.trained_at is None:
            running = rows - simulation.finished_rows
            passed = sum(running <= share * rows for share in (*(shares or ()), 0.0))
            if event == "minibatch" or passed > branch.passed or shares is None:
                branch.passed = passed
                return
    branch.event = None


def _act(branch: _Branch, actions: Sequence[Action]) -> None:
    simulation = branch.simulation
    assert branch.event is not None
    simulation.policy = lambda state: actions
    simulation.look(branch.event)
    assert simulation.refused is None, simulation.refused


def _forked(simulation: ElasticSimulation) -> ElasticSimulation:
    """A copy, to proceed otherwise."""
    other = copy(simulation)
    other.replicas = {instance: copy(replica) for instance, replica in simulation.replicas.items()}
    for replica in other.replicas.values():
        replica.running, replica.waiting = replica.running.copy(), replica.waiting.copy()
    for name in ("_ends", "busy", "unfinished", "whole", "queue", "switches"):
        setattr(other, name, getattr(simulation, name).copy())
    return other


def _ended(branch: _Branch) -> float:
    """Seconds of the iteration if no device moves before all rows have ended."""
    last = replace(branch, simulation=_forked(branch.simulation))
    simulation, start = last.simulation, last.event == "start"
    if start:
        _act(last, [])
    while last.event is not None:
        state, actor = simulation.state, simulation.state.actor
        if state.done == state.minibatches:
            _act(last, [Finalize()])
        elif simulation.finished_rows == state.rows and simulation.trained_at is None:
            tokens = sum(tokens for tokens, _ in simulation.queue)
            (to,) = splits_of(state, [0])
            saved = tokens * state.speeds.train_per_token * (1 / max(1e-9, actor.instances) - 1 / to.actor)
            if saved > 2 * state.speeds.resize and to.actor > actor.instances:
                _act(last, moves(state, to, {}))
        last.event = simulation.until_look()
    return simulation.ended().seconds


def splits_of(state: State, counts: Iterable[int]) -> list[DeviceSplit]:
    """For each number of rollout instances the largest actor beside them."""
    rollout, actor = state.rollout, state.actor
    own = state.inference.instances * state.inference.devices
    found = []
    for count in sorted(counts):
        room = (rollout.most - count) * rollout.devices if count else state.devices - own
        found.append(DeviceSplit(count, max((size for size in actor.sizes if size * actor.devices <= room), default=0)))
    return found


def choices(state: State, lengths: Sequence[int], splits: Sequence[DeviceSplit]) -> Iterator[list[Action]]:
    now, rows = DeviceSplit(state.rollout.instances, state.actor.instances), state.running_rows
    if rows or now.actor:
        yield []
    for split in splits:
        if not (split.rollout if rows else split.actor):
            continue
        if state.event == "start" or not rows:
            if split != now:
                yield moves(state, split, {})
            continue
        ids = range(state.rollout.most - split.rollout, state.rollout.most)
        ways = [_placed(state, ids, known) for known in ([lengths, None] if split != now else [lengths])]
        yield from (moves(state, split, groups) for groups in ways[: 1 if ways[0] == ways[-1] else 2])


def _placed(state: State, ids: range, lengths: Sequence[int] | None) -> dict[int, int]:
    """Groups that move, so that all instances end together, or have as many rows if no lengths are given. An instance
    takes the base of a step for each token of its longest row, and for all tokens what each adds."""
    speed, n = state.speeds.decoding, state.n
    groups: list[tuple[float, float, float, int, int]] = []  # longest row, all rows, a move; number, instance
    for instance, present in state.running.items():
        for group in present:
            if lengths is None:
                groups.append((0.0, float(len(group.tokens)), 0.0, group.group, instance))
                continue
            longest = sorted(lengths[group.group * n : group.group * n + n], reverse=True)
            pairs = zip(longest, sorted(group.tokens, reverse=True), strict=False)
            left = [max(1, length - tokens) for length, tokens in pairs]
            moved = group.migration_tokens * speed.prefill
            groups.append((max(left) * speed.base, sum(left) * speed.per_row, moved, group.group, instance))
    groups.sort(reverse=True)

    def spread(until: float) -> tuple[float, dict[int, int]]:
        """Groups stay where they end by then."""
        longest, total, target = np.zeros(len(ids)), np.zeros(len(ids)), dict[int, int]()
        for long, rows, moved, group, instance in groups:
            ends = np.maximum(longest, long) + total + rows
            at = instance - ids.start
            if at < 0 or ends[at] > until:
                at, moved = int(ends.argmin()), moved if at != int(ends.argmin()) else 0.0
                if ids[at] != instance:
                    target[group] = ids[at]
                    total[at] += moved
            longest[at], total[at] = max(longest[at], long), total[at] + rows
        return float((longest + total).max()), target

    return spread(spread(-math.inf)[0])[1]


def lower_bound(start: State, lengths: Sequence[int]) -> float:
    """Seconds below which no schedule ends, also one that places groups otherwise. For each k, mini-batch k waits for
    k B whole groups, each as long as it takes alone on an instance (a step takes the base, and more for each row in
    it), and all together as long as all devices take to decode the k B groups of fewest tokens, with all rows spread
    over them. Mini-batch k and those after it are trained later, one after another by the largest actor; and all
    devices share that work, and the tokens not yet decoded, with all slots in use. The last mini-batch has the actor of
    the start, or one that returns to it afterwards, as no actor changes while it trains."""
    speeds, decoding, n = start.speeds, start.speeds.decoding, start.n
    prompts = {group.group: group.prompt for present in start.running.values() for group in present}
    of = {group: lengths[group * n : group * n + n] for group in prompts}
    alone = sorted(
        max(of[group]) * decoding.base + sum(of[group]) * decoding.per_row + prompts[group] * decoding.prefill
        for group in prompts
    )
    decoded = sorted(map(sum, of.values()))
    trained = sorted(sum(of[group]) + n * prompt for group, prompt in prompts.items())
    most, devices, actor = start.devices / start.rollout.devices, start.devices, start.actor
    beside = min(decoding.slots, max(1.0, start.rows / most))
    together = min(decoding.slots, start.rows)
    rate = most * beside / (decoding.base + beside * decoding.per_row)  # tokens per second of all devices
    each = decoding.step(together) / together * start.rollout.devices  # device seconds of a token
    found, size = 0.0, start.minibatch_groups
    last = sum(trained[:size]) * speeds.train_per_token
    home = min(speeds.resize, last / actor.initial - last / actor.most)
    home_shared = min(
        speeds.resize, (speeds.train + last / actor.initial) * (1 - actor.initial * actor.devices / devices)
    )
    for k in range(1, start.minibatches + 1):
        ready, left = max(alone[k * size - 1], sum(decoded[: k * size]) / rate), start.minibatches - k + 1
        train, tokens = speeds.train * left, sum(trained[: left * size]) * speeds.train_per_token
        rest = max(0.0, sum(decoded) - rate * ready) * each + (train + tokens) * actor.devices
        found = max(found, ready + rest / devices + home_shared, ready + train + tokens / actor.most + home)
    return found
