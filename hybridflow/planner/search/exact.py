"""Exact search over small spaces of execution plans: all combinations, or a bound that rules them out. Pure."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from hybridflow.planner.describe.mesh import ExecutionPlan
from hybridflow.planner.search.evaluation import Evaluator, Found, State, options_of
from hybridflow.planner.search.problem import Problem


def space_size(problem: Problem, *, prune: bool = False) -> int:
    """How many execution plans there are."""
    return math.prod(len(options) for options in options_of(problem, prune=prune))


def exact(
    problem: Problem,
    *,
    prune: bool = False,
    start: ExecutionPlan | None = None,
    budget_s: float = math.inf,
    **how,
) -> Found | None:
    """The best of all execution plans; None when none can run.

    Calls are settled one after the other, the longest first. Settled calls bound what the rest can still reach: by the
    work of their devices, the shortest chain of calls through an iteration, and memory. A good `start` rules out more.
    The result is `complete` unless `budget_s` seconds ran out. Keywords for the timeline as for `GraphSchedule`.
    """
    options = options_of(problem, prune=prune, also=[start] if start else [])
    if not all(options):
        return None
    evaluator = Evaluator(problem, options, **how)
    search = _Tree(evaluator, time.monotonic() + budget_s)
    if start is not None and (state := evaluator.state(start)) is not None:
        search.look_at(state)
    search.settle(0)
    if search.best is None:
        return None
    elapsed = time.monotonic() - search.began
    return Found(evaluator.plan(search.best), search.cost, evaluator.evaluations, elapsed, complete=not search.late)


@dataclass
class _Tree:
    evaluator: Evaluator
    deadline: float
    best: State | None = None
    cost: float = math.inf
    late: bool = False
    _chosen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began, options = time.monotonic(), self.evaluator.options
        self.order = sorted(range(len(options)), key=lambda i: -self.evaluator.fastest[i])
        self.numbers = [sorted(range(len(own)), key=lambda n: own[n].seconds) for own in options]
        if self._buddies():
            first = self.order[0]
            self.numbers[first] = [n for n in self.numbers[first] if not options[first][n].plan.mesh.devices[0]]
        self.least_work = [min(o.seconds * o.plan.mesh.size for o in own) for own in options]
        self.devices = self.evaluator.problem.cluster.size

    def _buddies(self) -> bool:
        """On one node of 2^n devices slices of a size are alike: the first call may as well take the first of them."""
        problem = self.evaluator.problem
        size = problem.cluster.size
        return len(problem.cluster.nodes) == 1 and not size & (size - 1) and not problem.constraints

    def look_at(self, state: State) -> None:
        score = self.evaluator.score(state, self.cost)
        if score is not None and score.good and score.cost < self.cost:
            self.best, self.cost = state.copy(), score.cost

    def settle(self, depth: int) -> None:
        """All combinations of what is not settled yet."""
        if depth == len(self.order):
            self.look_at([self._chosen[i] for i in range(len(self.order))])
            return
        call = self.order[depth]
        for number in self.numbers[call]:
            self.late = self.late or time.monotonic() >= self.deadline
            if self.late:
                break
            self._chosen[call] = number
            if self._may_be_better():
                self.settle(depth + 1)
        self._chosen.pop(call, None)

    def _may_be_better(self) -> bool:
        evaluator = self.evaluator
        state = [self._chosen.get(i) for i in range(len(evaluator.calls))]
        seconds, masks = evaluator.loads(state)
        work = sum(took * mask.bit_count() for took, mask in zip(seconds, masks, strict=True))
        work += sum(self.least_work[i] for i, number in enumerate(state) if number is None)
        if work / self.devices >= self.cost or evaluator.schedule.least(seconds, masks) >= self.cost:
            return False
        chosen = [None if n is None else own[n] for own, n in zip(evaluator.options, state, strict=True)]
        return bool((evaluator.memory(chosen) <= evaluator.capacity).all())
