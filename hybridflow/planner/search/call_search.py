"""Searches over execution plans (ReaL): a mesh and a layout for every call. `exact` tries all combinations, except
those that a bound rules out; `mcmc` is Markov chain Monte Carlo (section 5). Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hybridflow.planner.describe.mesh import ExecutionPlan, Mesh
from hybridflow.planner.search.deadline import NEVER, Deadline
from hybridflow.planner.search.evaluation import Evaluator, Found, State, options_of
from hybridflow.planner.search.problem import Problem


def space_size(problem: Problem, deadline: Deadline = NEVER) -> int:
    """How many execution plans there are. Errors: TimeUpError when the deadline comes before."""
    return math.prod(len(options) for options in options_of(problem, prune=False, deadline=deadline))


def exact(problem: Problem, *, start: ExecutionPlan | None = None, deadline: Deadline = NEVER) -> Found | None:
    """The best of all execution plans; None when none can run.

    Calls are settled one after the other, the longest first. Settled calls bound what the rest can still reach: by the
    work of their devices, the shortest chain of calls through an iteration, and memory. A good `start` rules out more.
    The result is `complete` unless the `deadline` came. Errors: TimeUpError when it comes before the search has begun.
    """
    began = deadline.clock()
    options = options_of(problem, prune=False, also=[start] if start else [], deadline=deadline)
    if not all(options):
        return None
    evaluator = Evaluator(problem, options)
    search = _Tree(evaluator, deadline)
    if start is not None and (state := evaluator.state(start)) is not None:
        search.look_at(state)
    search.settle(0)
    if search.best is None:
        return None
    elapsed = deadline.clock() - began
    return Found(evaluator.plan(search.best), search.cost, evaluator.evaluations, elapsed, complete=not search.late)


@dataclass
class _Tree:
    evaluator: Evaluator
    deadline: Deadline
    best: State | None = None
    cost: float = math.inf
    late: bool = False
    _chosen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = self.evaluator.options
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
            self.late = self.late or self.deadline.over
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


ROUND = 2500
"""Proposals from one start until the best plan is polished and the next start taken."""
PATIENCE = 12
"""Rounds without anything better after which few plans are not looked at any more."""
HOT, COLD = 0.15, 0.003
"""Temperatures at the ends of a round, relative to the best cost: a rise by so much is accepted once in e times."""


def mcmc(
    problem: Problem,
    *,
    starts: Sequence[ExecutionPlan] = (),
    seed: int = 0,
    deadline: Deadline = NEVER,
    evaluations: float = math.inf,
    patience: float = math.inf,
) -> Found | None:
    """The best plan found until the `deadline` and within `evaluations` plans; None if none that can run was found.

    Rounds begin at `starts`, at the fastest option of each call (greedy), at the best plan so far and at random; each
    is a chain whose temperature falls, and ends with the best single changes. It stops after `patience` rounds without
    anything better (default: never, unless there are few plans). Equal seeds and `evaluations` give equal plans if time
    does not run out. Errors: TimeUpError when the deadline comes before the search has begun.
    """
    began = deadline.clock()
    options = options_of(problem, also=starts, deadline=deadline)
    if not all(options):
        return None
    evaluator = Evaluator(problem, options)
    given = [state for plan in starts if (state := evaluator.state(plan)) is not None]
    if math.prod(map(len, options)) <= ROUND:
        patience = min(patience, PATIENCE)
    return _Chain(evaluator, random.Random(seed), deadline, evaluations, began).search(given, patience)


@dataclass
class _Chain:
    evaluator: Evaluator
    random: random.Random
    deadline: Deadline
    limit: float
    began: float
    best: State = field(default_factory=list)
    best_cost: float = math.inf
    history: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.options = self.evaluator.options
        self.on_mesh: list[dict[Mesh, list[int]]] = []  # by call and mesh: numbers of its options, fastest first
        for options in self.options:
            found: dict[Mesh, list[int]] = {}
            for number in sorted(range(len(options)), key=lambda n: options[n].seconds):
                found.setdefault(options[number].plan.mesh, []).append(number)
            self.on_mesh.append(found)
        self.meshes = [list(found) for found in self.on_mesh]
        groups: dict[str, list[int]] = {}
        for i, call in enumerate(self.evaluator.calls):
            groups.setdefault(call.group, []).append(i)
        for pair in self.evaluator.problem.rules.together:  # they can only move together
            joined = [*groups[pair.first], *(i for i in groups[pair.second] if i not in groups[pair.first])]
            for group in [g for g, calls in groups.items() if calls in (groups[pair.first], groups[pair.second])]:
                groups[group] = joined
        self.groups = list(groups.values())

    def over(self) -> bool:
        return self.deadline.over or self.evaluator.evaluations >= self.limit

    def search(self, given: Sequence[State], patience: float) -> Found | None:
        idle = 0
        for start in self._starts(given):
            before = self.best_cost
            state = self._round(start, HOT if start is not self.best else HOT / 4)
            self._polish(state)
            self._polish(self.best)
            idle = 0 if self.best_cost < before * (1 - 1e-9) else idle + 1
            if self.over() or idle >= patience:
                break
        evaluator, score = self.evaluator, self.evaluator.score(self.best)
        if score is None or not score.good:
            return None
        elapsed = self.deadline.clock() - self.began
        return Found(
            evaluator.plan(self.best), score.seconds, evaluator.evaluations, elapsed, history=tuple(self.history)
        )

    def _starts(self, given: Sequence[State]) -> Iterator[State]:
        for state in given:
            self._note(state)
        yield from given
        yield [min(range(len(options)), key=lambda n: options[n].seconds) for options in self.options]
        while True:
            yield [self.random.randrange(len(options)) for options in self.options]
            yield self.best

    def _note(self, state: State, limit: float = math.inf) -> float:
        """The cost of a state, which is remembered if it is the best; infinite if it is not below `limit`."""
        score = self.evaluator.score(state, limit)
        if score is None or score.cost >= limit:
            return math.inf
        cost = score.cost
        if cost < self.best_cost or not self.best:
            self.best, self.best_cost = state.copy(), cost
            self.history.append((self.deadline.clock() - self.began, cost))
        return cost

    def _round(self, start: State, hot: float) -> State:
        state, cost = start.copy(), self._note(start)
        for step in range(ROUND):
            if self.over():
                break
            temperature = hot * (COLD / hot) ** (step / ROUND)
            proposed = self._proposed(state)
            if proposed == state:
                continue
            # accepted with probability exp(-rise / temperature): the number is drawn first, so that bounds can refuse
            rise = -math.log(1.0 - self.random.random()) * temperature * min(cost, self.best_cost)
            new = self._note(proposed, (cost + rise) * (1 + 1e-12))
            if new < math.inf:
                state, cost = proposed, new
        return state

    def _proposed(self, state: State) -> State:
        """One call elsewhere, or cut otherwise; a call where another is; a group elsewhere; two groups exchanged."""
        proposed, kind = state.copy(), self.random.random()
        call = self.random.randrange(len(state))
        mesh = self.options[call][state[call]].plan.mesh
        if kind < 0.35:
            self._put(proposed, call, self.random.choice(self.meshes[call]))
        elif kind < 0.55:
            self._put(proposed, call, mesh)
        elif kind < 0.7:
            other = self.random.randrange(len(state))
            self._put(proposed, call, self.options[other][state[other]].plan.mesh)
        elif kind < 0.9:
            calls = self.random.choice(self.groups)
            self._put_all(proposed, calls, self.random.choice(self.meshes[calls[0]]))
        else:
            first, second = self.random.choice(self.groups), self.random.choice(self.groups)
            at = [self.options[calls[0]][state[calls[0]]].plan.mesh for calls in (first, second)]
            self._put_all(proposed, first, at[1])
            self._put_all(proposed, second, at[0])
        return proposed

    def _put(self, state: State, call: int, mesh: Mesh) -> None:
        """A call on a mesh, in a layout that is the likelier the faster."""
        if found := self.on_mesh[call].get(mesh):
            state[call] = found[int(len(found) * self.random.random() ** 2)]

    def _put_all(self, state: State, calls: Sequence[int], mesh: Mesh) -> None:
        alike = self.random.random() < 0.5
        for call in calls:
            self._put(state, call, mesh)
        if alike:  # one layout for all of them saves moves
            wanted = self.options[calls[-1]][state[calls[-1]]].plan
            for call in calls:
                number = self.evaluator.number(call, wanted) if wanted.mesh == mesh else None
                state[call] = number if number is not None else state[call]

    def _polish(self, state: State) -> None:
        """Single changes of calls, and changes of mesh of groups, as long as one helps."""
        state, cost, better = state.copy(), self._note(state), True
        while better and not self.over():
            better = False
            for proposed in self._neighbours(state):
                if self.over():
                    return
                if (new := self._note(proposed, cost * (1 - 1e-9))) < math.inf:
                    state[:], cost, better = proposed, new, True

    def _neighbours(self, state: State) -> Iterator[State]:
        """All states one change away from `state`, which may itself change meanwhile."""
        for call in self.random.sample(range(len(state)), len(state)):
            for number in range(len(self.options[call])):
                if number != state[call]:
                    yield [*state[:call], number, *state[call + 1 :]]
        for calls in self.groups:
            for mesh in self.meshes[calls[0]]:
                proposed = state.copy()
                self._put_all(proposed, calls, mesh)
                yield proposed
