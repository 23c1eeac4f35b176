"""When an iteration would end under each plan of further moves: a mean-field forecast. Pure, deterministic.

All instances of a placement decode at one pace, that of a row among the mean number of rows, so that a plan only needs
the number of rows alive after each further decoding step, drawn from the lengths seen: x steps after now, a row is
alive if its drawn length is above its tokens + x. A plan is a first move, at most one further move at a later boundary
of mini-batches, and the actor's growth to all devices when no row is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hybridflow.planner.elastic.state import DeviceSplit, State

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]
_POINTS = 768  # of the curve of rows alive
_BOUNDARIES = 4  # the next ones, at which the further move may be
_SCENARIOS = 8
_DRAWN = 8192  # rows of all scenarios


class First(NamedTuple):
    """A move to `split`, when `alive` rows run; None: now."""

    split: DeviceSplit
    alive: int | None = None


class SeenLengths:
    """Response lengths seen, ascending, and the mean of those up to each."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.given = lengths
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


@dataclass(frozen=True)
class RunningRows:
    """Running rows as arrays: tokens, the index of their group; tokens of the prompts of the groups."""

    tokens: Floats
    groups: NDArray[np.int64]
    prompts: Floats

    @classmethod
    def of(cls, state: State) -> RunningRows:
        running = [group for present in state.running.values() for group in present]
        counts = np.fromiter((len(group.tokens) for group in running), dtype=np.int64, count=len(running))
        tokens = np.fromiter(chain.from_iterable(g.tokens for g in running), dtype=np.float64, count=int(counts.sum()))
        prompts = np.fromiter((group.prompt for group in running), dtype=np.float64, count=len(running))
        return cls(tokens, np.repeat(np.arange(len(running)), counts), prompts)


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
        self.state, self.splits = state, splits
        self.instances = np.array([split.rollout for split in splits], dtype=np.float64)
        self.actors = np.array([split.actor for split in splits], dtype=np.float64)
        self.speed = np.maximum(self.actors, 1e-9)  # lent devices train in no time of interest
        self.largest = int(np.argmax(self.actors))
        self.now = splits.index(DeviceSplit(state.rollout.instances, state.actor.instances))
        self.lent = self.now if not state.actor.instances else int(np.argmin(self.actors))
        rows = RunningRows.of(state)
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
        """Seconds to the end, per plan."""
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

    def after_first(self, scenario: Scenario, plans: _Plans) -> tuple[Floats, Floats, Indices]:
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

    def moved(
        self, scenario: Scenario, seconds: Floats, x: Floats, c: Indices, to: Indices
    ) -> tuple[Floats, Floats, Indices]:
        """After moves from split to split; where rows cannot move to no instance, none is made."""
        to = np.where((x < scenario.last) & (self.instances[to] == 0), c, to)
        speeds, before, after = self.state.speeds, self.instances[c], self.instances[to]
        away, joins, rows = c != to, after > before, x < scenario.last
        hand_over = speeds.hand_over * (away & rows)
        share = np.abs(after - before) / np.maximum(1.0, np.maximum(after, before))
        held = (
            hand_over
            + speeds.join * joins
            + share * scenario.recomputed(x) / np.maximum(1.0, np.minimum(before, after))
        )
        a, b = self.actors[c], self.actors[to]
        lent = speeds.join + speeds.resize * (b != self.state.actor.initial)
        free = hand_over + speeds.join * joins + np.where(a == 0, lent, speeds.resize * (a != b))
        moved = scenario.shifted(to, x, free - held)
        return np.where(away, seconds + free, seconds), np.where(away, moved, x), to
