"""Two trainings on the same pipeline stages, each in the other's bubbles (PUZZLE, section 4). Pure.

    serial    1 2 3 4 . . . A B C D ...   drain, then the other model
    together  one in-order 1F1B over the micro-batches of both models: only its two ends are bubbles

Eq. (1): with P stages and N micro-batches of each model, equal in time, the makespan is (2N + P - 1)(F + B) instead of
2(N + P - 1)(F + B). No schedule is shorter: the last stage begins after (P - 1)F, works without a pause, and its last
gradient travels for (P - 1)B.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

from hybridflow.planner.pipeline.schedule import Instruction, Schedule, Work, scheduled
from hybridflow.planner.pipeline.schedule_simulation import WINDOW, check
from hybridflow.settings import require

Order = tuple[int, ...]
"""The model of each micro-batch, in the order of both forwards and backwards; each model's own stay in order."""
EVALUATIONS, OPERATIONS = 200, 10_000
"""Limits of a search: orders that it tries, and forwards and backwards of all of them."""
AT_ONCE = 1_000
"""Forwards and backwards of all orders that an update tries: devices wait for it."""


def serial_makespan(stages: int, works: Sequence[Work]) -> float:
    """The time of one model after the other, each by 1F1B that drains the pipeline at each of its steps."""
    return sum(
        (count + stages - 1) * (work.forward + work.backward) + work.finish
        for work in works
        for count in work.micro_batches
    )


def shortest(stages: int, works: Sequence[Work]) -> float:
    """No schedule takes less: the last stage has to wait, to work, and to be waited for."""
    ends = (stages - 1) * (min(work.forward for work in works) + min(work.backward for work in works))
    return ends + sum(work.seconds for work in works)


def memory_limits(stages: int, works: Sequence[Work]) -> tuple[float, ...]:
    """Live activations of each stage: P - s micro-batches of the model with the larger ones, as in serial 1F1B, and no
    more than both models hold when their mini-batches have fewer."""
    largest = max(work.activations for work in works)
    return tuple(
        min(most * largest, sum(min(max(work.micro_batches), most) * work.activations for work in works))
        for most in range(stages, 0, -1)
    )


@lru_cache(maxsize=16)
def together(
    stages: int, works: tuple[Work, ...], limits: tuple[float, ...] | None = None, at_once: bool = False
) -> Schedule:
    """The schedule of all works on these stages with the shortest makespan that a small search finds.

    Live activations stay within `limits` on every stage (default: `memory_limits`). The search tries orders of the
    models' micro-batches, `at_once` only the first few, and is the same on every rank. Errors: ConfigError for a limit
    below one micro-batch.
    """
    limits = memory_limits(stages, works) if limits is None else limits
    largest = max(work.activations for work in works)
    good = len(limits) == stages and min(limits) >= largest
    require(good, f"together(limits={limits}): give each of {stages} stages room for a micro-batch of {largest:g}.")
    size = 2 * stages * sum(work.total for work in works)
    tries = min(3, AT_ONCE // size) if at_once else min(EVALUATIONS, 3 + OPERATIONS // size)

    def tried(order: Order) -> tuple[float, Order, _InOrder]:
        found = _run(stages, works, order, limits)
        return found.makespan, order, found

    bound, chance = shortest(stages, works) * (1 + 1e-9), random.Random(0)
    best = tried(next(orders := _orders(works)))
    for _ in range(tries):
        if best[0] <= bound or len(works) == 1:
            break
        found = tried(next(orders, None) or _exchanged(best[1], chance))
        best = found if found[0] <= best[0] else best
    found = scheduled(works, best[2].computed)
    check(found, limits)
    return found


def _orders(works: Sequence[Work]) -> Iterator[Order]:
    """Orders to begin with: mini-batches in rounds, micro-batches mixed evenly, or one model after the other; either
    model first."""
    for models in (range(len(works)), reversed(range(len(works)))):
        first = list(models)
        rounds = max(len(work.micro_batches) for work in works)
        counts = [
            [(m, works[m].micro_batches[k]) for m in first if k < len(works[m].micro_batches)] for k in range(rounds)
        ]
        yield tuple(model for each in counts for model, count in each for _ in range(count))
        places = [((i + 0.5) / works[m].total, first.index(m), m) for m in first for i in range(works[m].total)]
        yield tuple(model for *_, model in sorted(places))
        if rounds > 1:
            yield tuple(m for m in first for _ in range(works[m].total))


def _exchanged(order: Order, chance: random.Random) -> Order:
    """The order with two micro-batches of different models exchanged, or one moved to another place."""
    out = list(order)
    i, j = chance.randrange(len(out)), chance.randrange(len(out))
    if chance.random() < 0.5:
        out[i], out[j] = out[j], out[i]
    else:
        out.insert(j, out.pop(i))
    return tuple(out)


def in_order(stages: int, works: Sequence[Work], order: Order, limits: Sequence[float]) -> Schedule:
    """Each stage runs forwards in this order and backwards in the same: a backward as soon as its gradient is there,
    else the next forward that `limits` has room for, unless its message would have to wait (`WINDOW`). A mini-batch
    begins when the step before it has been made.

    It always ends: the first unfinished micro-batch of the order never waits for a later one.
    """
    return scheduled(works, _run(stages, works, order, limits).computed)


def _run(stages: int, works: Sequence[Work], order: Order, limits: Sequence[float]) -> _InOrder:
    state = _InOrder(stages, works, _micro_batches(works, order), limits)
    while (found := state.next()) is not None:
        state.run(*found)
    return state


def _micro_batches(works: Sequence[Work], order: Order) -> list[Instruction]:
    own = [
        iter([(step, micro) for step, count in enumerate(work.micro_batches) for micro in range(count)])
        for work in works
    ]
    return [Instruction("forward", model, *next(own[model])) for model in order]


class _InOrder:
    """The state of all stages while they run micro-batches in one order."""

    def __init__(
        self, stages: int, works: Sequence[Work], micro_batches: Sequence[Instruction], limits: Sequence[float]
    ) -> None:
        self.stages, self.works, self.all, self.limits = stages, works, micro_batches, limits
        self.computed: list[list[Instruction]] = [[] for _ in range(stages)]
        self._clock, self._live = [0.0] * stages, [0.0] * stages
        self._begun: list[tuple[list[float], list[float]]] = [([], []) for _ in range(stages)]  # forwards, backwards
        own = [[turn for turn, each in enumerate(micro_batches) if each.model == m] for m in range(len(works))]
        # the turn whose message must be awaited already when this one's is sent
        self._before: list[int | None] = [None] * len(micro_batches)
        for turns in own:
            for before, turn in zip(turns, turns[WINDOW:], strict=False):
                self._before[turn] = before
        self._arrival: list[list[list[float | None]]] = [
            [[0.0 if stage == 0 else None] * len(micro_batches), [None] * len(micro_batches)] for stage in range(stages)
        ]
        self._left = {
            (m, k): stages * count for m, work in enumerate(works) for k, count in enumerate(work.micro_batches)
        }
        self._steps = {(m, -1): 0.0 for m in range(len(works))}
        self._starts: list[tuple[float, int] | None] = [None] * stages  # of the next computation, and minus its kind
        self._changed = set(range(stages))

    @property
    def makespan(self) -> float:
        return max(*self._clock, *self._steps.values())

    def next(self) -> tuple[int, int, float] | None:
        """The stage that begins first, whether it runs a backward (1) or a forward (0), and when; None at the end."""
        for stage in self._changed:
            starts = [(start, -kind) for kind in (1, 0) if (start := self._start(stage, kind)) is not None]
            self._starts[stage] = min(starts, default=None)
        self._changed.clear()
        found = min(((*each, stage) for stage, each in enumerate(self._starts) if each), default=None)
        return None if found is None else (found[2], -found[1], found[0])

    def _start(self, stage: int, backward: int) -> float | None:
        turn = len(self._begun[stage][backward])
        if turn == len(self.all) or (arrival := self._arrival[stage][backward][turn]) is None:
            return None
        start, peer, before = max(self._clock[stage], arrival), stage + (-1 if backward else 1), self._before[turn]
        if 0 <= peer < self.stages and before is not None:
            if before >= len(awaited := self._begun[peer][backward]):
                return None
            start = max(start, awaited[before])
        if backward:
            return start
        each = self.all[turn]
        if self._live[stage] + self.works[each.model].activations > self.limits[stage] * (1 + 1e-9):
            return None
        made = self._steps.get((each.model, each.step - 1))
        return None if made is None else max(start, made)

    def run(self, stage: int, backward: int, start: float) -> None:
        turn = len(self._begun[stage][backward])
        each = self.all[turn].of("backward" if backward else "forward")
        work = self.works[each.model]
        end = start + (work.backward if backward else work.forward)
        self._begun[stage][backward].append(start)
        self._clock[stage] = end
        self._live[stage] += -work.activations if backward else work.activations
        self.computed[stage].append(each)
        last = stage == self.stages - 1
        self._changed |= {max(0, stage - 1), stage, min(stage + 1, self.stages - 1)}
        if not backward:
            self._arrival[stage if last else stage + 1][int(last)][turn] = end
            return
        if stage:
            self._arrival[stage - 1][1][turn] = end
        key = each.model, each.step
        self._left[key] -= 1
        if not self._left[key]:
            self._steps[key] = end + work.finish
            self._changed = set(range(self.stages))
