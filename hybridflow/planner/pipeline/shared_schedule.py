"""Trainings, or forward passes, on the same pipeline stages, each in the others' bubbles (PUZZLE, section 4). Pure.

    serial    1 2 3 4 . . . A B C D ...   drain, then the other model
    together  one in-order 1F1B over the micro-batches of all models: only its two ends are bubbles

Eq. (1): with P stages and N micro-batches of each model, equal in time, the makespan is (2N + P - 1)(F + B) instead of
2(N + P - 1)(F + B). No schedule is shorter: the last stage begins after (P - 1)F, works without a pause, and its last
gradient travels for (P - 1)B."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from hybridflow.planner.pipeline.schedule import WINDOW, Instruction, Schedule, Work, check, scheduled
from hybridflow.settings import require

Order = tuple[int, ...]
"""The model of each micro-batch, in the order of both forwards and backwards; each model's own stay in order."""
EVALUATIONS, OPERATIONS = 200, 10_000
"""Limits of a search: orders that it tries, and forwards and backwards of all of them."""
AT_ONCE = 1_000
"""Forwards and backwards of all orders that an update tries beside the first four: devices wait for it."""


def serial_makespan(stages: int, works: Sequence[Work]) -> float:
    """The time of one model after the other, each by 1F1B that drains the pipeline at each of its steps."""
    steps = ((work, count + stages - 1) for work in works for count in work.micro_batches)
    return sum(count * work.each + work.finish for work, count in steps)


def shortest(stages: int, works: Sequence[Work]) -> float:
    """No schedule takes less: the last stage has to wait, to work, and to be waited for."""
    ends = (stages - 1) * (min(work.forward for work in works) + min(work.each - work.forward for work in works))
    return ends + sum(work.seconds for work in works)


def memory_limits(stages: int, works: Sequence[Work]) -> tuple[float, ...]:
    """Live activations of each stage: P - s micro-batches of the model with the larger ones, as in serial 1F1B, and no
    more than both models hold when their mini-batches have fewer."""
    largest = max(work.held for work in works)
    return tuple(
        min(most * largest, sum(min(max(work.micro_batches), most) * work.held for work in works))
        for most in range(stages, 0, -1)
    )


@lru_cache(maxsize=16)
def together(
    stages: int, works: tuple[Work, ...], limits: tuple[float, ...] | None = None, at_once: bool = False
) -> Schedule:
    """The schedule of all works on these stages with the shortest makespan that a small search finds.

    Live activations stay within `limits` on every stage (default: `memory_limits`). The search tries orders of the
    models' micro-batches, `at_once` only those that it begins with. To try an order is to run it with all waits and
    limits; the result passes `check`. Errors: ConfigError for a limit below one micro-batch."""
    limits = memory_limits(stages, works) if limits is None else limits
    largest = max(work.held for work in works)
    good = len(limits) == stages and min(limits) >= largest
    require(good, f"together(limits={limits}): give each of {stages} stages room for a micro-batch of {largest:g}.")
    size = 2 * stages * sum(work.total for work in works)
    tries = max(3, AT_ONCE // size) if at_once else min(EVALUATIONS, 3 + OPERATIONS // size)

    def tried(order: Order, patience: float) -> tuple[float, Order, InOrder]:
        found = InOrder(stages, works, order, limits, patience)
        return found.makespan, order, found

    bound, chance = shortest(stages, works) * (1 + 1e-9), random.Random(0)
    waits = (0.0, min(work.forward for work in works), max(work.forward for work in works))
    best = tried(*next(orders := _orders(works, waits[:2])))
    for _ in range(tries):
        following = next(orders, None)
        if best[0] <= bound or len(works) == 1 or (at_once and following is None):
            break
        other = tried(*(following or (_exchanged(best[1], chance), chance.choice(waits))))
        best = other if other[0] <= best[0] else best
    found = best[2].schedule
    check(found, limits)
    return found


def _orders(works: Sequence[Work], waits: Sequence[float]) -> Iterator[tuple[Order, float]]:
    """Orders to begin with, either model first, with each patience: mini-batches in rounds, which are the paper's two;
    then micro-batches mixed evenly, and one model after the other."""
    rounds = range(max(len(work.micro_batches) for work in works))
    both = [(patience, list(range(len(works)))[::ahead]) for patience in waits for ahead in (1, -1)]
    for patience, first in both:
        turns = [(m, works[m].micro_batches[k]) for k in rounds for m in first if k < len(works[m].micro_batches)]
        yield tuple(model for model, count in turns for _ in range(count)), patience
    for patience, first in both:
        places = [((i + 0.5) / works[m].total, first.index(m), m) for m in first for i in range(works[m].total)]
        yield tuple(model for *_, model in sorted(places)), patience
        if len(rounds) > 1:
            yield tuple(m for m in first for _ in range(works[m].total)), patience


def _exchanged(order: Order, chance: random.Random) -> Order:
    """The order with two micro-batches of different models exchanged, or one moved to another place."""
    out = list(order)
    i, j = chance.randrange(len(out)), chance.randrange(len(out))
    if chance.random() < 0.5:
        out[i], out[j] = out[j], out[i]
    else:
        out.insert(j, out.pop(i))
    return tuple(out)


class _Turn(NamedTuple):
    """A micro-batch at its place in the order: its model's work, the indices of its mini-batch and of the one before it
    (-1: none), and for its forward and its backward the places, among those of all models, of the ones whose messages
    must be awaited when this one begins on a stage (-1: none): one that only sends, one that has to receive first, too,
    which its communicator does behind the message before."""

    work: Work
    step: int
    made: int
    before: tuple[tuple[int, ...], ...]


class InOrder:
    """Each stage runs forwards in one order and backwards in the same: a backward as soon as its gradient is there,
    else the next forward that `limits` has room for, unless its message would have to wait (`WINDOW`). A mini-batch
    begins when the step before it has been made. With `patience` a forward that could begin at most so much later goes
    before a backward.

    It always ends: the first unfinished micro-batch of the order never waits for a later one."""

    def __init__(
        self, stages: int, works: Sequence[Work], order: Order, limits: Sequence[float], patience: float
    ) -> None:
        # kinds: 0 forward, 1 backward
        self._works, self._stages, self._patience = works, stages, patience
        self._names: list[tuple[Instruction, Instruction]] = []
        self._turns: list[_Turn] = []
        self._left: list[int] = []  # computations of each step
        self._order: tuple[list[int], list[int]] = [], []  # turns by kind
        first, own = [0], [[list[int]() for _ in work.kinds] for work in self._works]
        for work in self._works:
            first.append(first[-1] + len(work.micro_batches))
            self._left += [self._stages * count for count in work.micro_batches]
        following = [((k, i) for k, n in enumerate(work.micro_batches) for i in range(n)) for work in self._works]
        for turn, model in enumerate(order):
            step, micro = next(following[model])
            work, at = self._works[model], first[model] + step
            for mine, every in zip(own[model], self._order, strict=False):
                mine.append(len(every))
                every.append(turn)
            before = tuple(tuple(mine[-1 - n] if len(mine) > n else -1 for n in (WINDOW, 1)) for mine in own[model])
            self._turns.append(_Turn(work, at, at - 1 if step else -1, before))
            forward = Instruction("forward", model, step, micro)
            self._names.append((forward, forward.of("backward")))
        self._limits = [limit * (1 + 1e-9) for limit in limits]
        self._clock, self._live = [0.0] * stages, [0.0] * stages
        self._made: list[float | None] = [None] * len(self._left) + [0.0]
        self._computed: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        self._begun: list[list[list[float]]] = [[[] for _ in range(stages)] for _ in (0, 1)]
        self._arrived: list[list[list[float]]] = [[[] for _ in range(stages)] for _ in (0, 1)]
        self._arrived[0][0] = [0.0] * len(order)
        self._awaited = [[*self._begun[0][1:], None], [None, *self._begun[1][:-1]]]  # by the peer
        self._run()
        total = sum(map(len, self._order))
        assert all(len(computed) == total for computed in self._computed), "the stages wait for each other"

    @property
    def makespan(self) -> float:
        return max(*self._clock, *(made or 0.0 for made in self._made))

    @property
    def schedule(self) -> Schedule:
        computed = [[self._names[turn][kind] for turn, kind in stage] for stage in self._computed]
        return scheduled(self._works, computed)

    def _run(self) -> None:
        """The stage that can begin first runs next; at equal times one with a backward, then the first stage."""
        heap: list[tuple[float, int, int]] = []
        everyone = changed = range(self._stages)
        current: list[tuple[float, int, int] | None] = [None] * self._stages
        near = [range(max(0, stage - 1), min(stage + 2, self._stages)) for stage in everyone]
        while True:
            for stage in changed:
                found = self._next(stage)
                if found is not None and found != current[stage]:
                    heappush(heap, found)
                current[stage] = found
            while heap and heap[0] != current[heap[0][2]]:  # an earlier plan of its stage
                heappop(heap)
            if not heap:
                return
            start, kind, stage = heappop(heap)
            changed = everyone if self._compute(stage, -kind, start) else near[stage]

    def _next(self, stage: int) -> tuple[float, int, int] | None:
        """When this stage can begin its next computation, minus its kind, and the stage."""
        backward, forward = self._start(stage, 1), self._start(stage, 0)
        if backward is not None and (
            forward is None or not (forward < backward or (self._patience and forward <= backward + self._patience))
        ):
            return backward, -1, stage
        return None if forward is None else (forward, 0, stage)

    def _start(self, stage: int, kind: int) -> float | None:
        at, arrived = len(self._begun[kind][stage]), self._arrived[kind][stage]
        if at >= len(arrived):
            return None
        start = max(self._clock[stage], arrived[at])
        turn = self._turns[self._order[kind][at]]
        receives = stage != (self._stages - 1 if kind else 0)
        if (before := turn.before[kind][receives]) >= 0 and (awaited := self._awaited[kind][stage]) is not None:
            if before >= len(awaited):
                return None
            start = max(start, awaited[before])
        if kind:
            return start
        ready = self._made[turn.made]
        if ready is None or self._live[stage] + turn.work.held > self._limits[stage]:
            return None
        return max(start, ready)

    def _compute(self, stage: int, kind: int, start: float) -> bool:
        """Run the next computation of this kind; whether a mini-batch ends."""
        turn = self._order[kind][len(self._begun[kind][stage])]
        work, step, *_ = self._turns[turn]
        self._begun[kind][stage].append(start)
        self._clock[stage] = end = start + (work.backward if kind else work.forward)
        self._computed[stage].append((turn, kind))
        self._live[stage] += -work.held if kind else work.held
        if not kind and stage < self._stages - 1:
            self._arrived[0][stage + 1].append(end)
        elif kind and stage:
            self._arrived[1][stage - 1].append(end)
        elif not kind and work.trains:
            self._arrived[1][stage].append(end)
        if work.trains > kind:
            return False
        self._left[step] -= 1
        if self._left[step]:
            return False
        self._made[step] = end + work.finish
        return True
