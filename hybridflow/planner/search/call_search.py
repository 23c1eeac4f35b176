"""Searches over execution plans (ReaL): a mesh and a layout for every call. Pure.

`exact` tries all combinations, except those that a bound rules out; `mcmc` is Markov chain Monte Carlo (section 5). A
state lists the option number of each call: its score looks up everything by these numbers and computes only the
timeline."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hybridflow.planner.cost.costs import Costs, Option
from hybridflow.planner.cost.reallocation_cost import CONTROLLER
from hybridflow.planner.cost.timeline import GraphSchedule
from hybridflow.planner.describe.graph import Call
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, meshes
from hybridflow.planner.search.deadline import NEVER, Deadline
from hybridflow.planner.search.stages import Floats, undominated

State = list[int]
Chosen = Sequence[Option | None]  # by call; None where it is not decided yet
_REMEMBERED = 200_000
_PENALTY, _PENALTY_RATE = 2.0, 10.0


class Score(NamedTuple):
    cost: float
    """What searches make small: the seconds, with the margin for each further layout; a multiple if it cannot run."""
    seconds: float
    """Per iteration."""
    good: bool
    """The plan fits into memory and keeps the constraints."""


@dataclass(frozen=True)
class Found:
    """The best plan of a search, and its seconds per iteration."""

    plan: ExecutionPlan
    seconds: float
    evaluations: int
    """Plans that were looked at."""
    elapsed: float
    complete: bool = False
    """All other plans are known to be no better."""
    history: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    """When [s] which cost was the best."""


def options_of(
    costs: Costs, *, prune: bool = True, also: Sequence[ExecutionPlan] = (), deadline: Deadline = NEVER
) -> list[list[Option]]:
    """For each call its options, and those that the plans in `also` choose.

    With `prune`, a layout is left out on a mesh if others of it are at least as fast and as small for every call of the
    group (and wait as much, where devices share something): it could only save moves between them. Calls without any
    option have an empty list. Errors: TimeUpError when the deadline comes before all are known."""
    given = dict.fromkeys((costs.graph.call(name).group, at) for plan in also for name, at in plan.items())
    pinned = [Mesh(devices) for group in costs.graph.groups if (devices := costs.rules.devices(group))]
    where = list(dict.fromkeys([*meshes(costs.cluster), *(at.mesh for _, at in given), *pinned]))
    by_shape: dict[tuple[str, tuple], list] = {}
    found: dict[str, list[Option]] = {call.name: [] for call in costs.calls}
    for group in costs.graph.groups:
        calls = costs.graph.of_group(group)
        for mesh in where:
            deadline.check()
            key = (group, shape := costs.shape(mesh))
            if key not in by_shape:
                by_shape[key] = _layouts(costs, calls, mesh, prune)
            more = [at.parallel for of, at in given if of == group and at.mesh == mesh]
            for call in calls:
                for parallel in dict.fromkeys([*by_shape[key], *more]):
                    if costs.rules.allows(group, mesh, parallel, call.kind == "generation"):
                        option = costs.option(call, mesh, parallel, shape)
                        found[call.name] += [option] if option else []
    return list(found.values())


def _layouts(costs: Costs, calls: Sequence[Call], mesh: Mesh, prune: bool) -> list:
    group = calls[0].group
    layouts = list(dict.fromkeys(x for g in (False, True) for x in costs.strategies(group, mesh, g)))
    if not prune:
        return layouts
    kept, width = {}, 6 if costs.sharing else 5  # who waits more leaves more to others that share
    for call in calls:
        options = [option for parallel in layouts if (option := costs.option(call, mesh, parallel)) is not None]
        values = np.array([option[1:width] for option in options]).reshape(len(options), width - 1)
        kept |= {options[i].plan.parallel: None for i in undominated(values)}
    return [x for x in layouts if x in kept or costs.rules.pinned_sizes(group, x)]


class Evaluator:
    """Scores states over `options` (those of `options_of`)."""

    def __init__(self, costs: Costs, options: Sequence[Sequence[Option]]) -> None:
        self.costs, self.calls, self.options, self.evaluations = costs, costs.calls, options, 0
        self.schedule = GraphSchedule(costs.graph, sharing=costs.sharing)
        number = {call.name: i for i, call in enumerate(self.calls)}
        self.homes = [number[costs.homes[call.group]] for call in self.calls]
        at = [number.get(call.name) for call in costs.graph.calls]
        self.nodes = [(at[to], None if source is None else at[source]) for to, source, _ in self.schedule.nodes]
        self.numbers = [{option.plan: i for i, option in enumerate(own)} for own in options]  # by call and plan
        self._alike = [[number[name] for name in names] for names in costs.alike]
        self._hybrid = [(number[name], number[home]) for name, home in costs.hybrid]
        calls = [(node, call) for node, (call, source) in enumerate(self.nodes) if call is not None and source is None]
        nodes = {call: node for node, call in calls}
        self._reads = [(nodes[number[r.reader]], number[r.reader], number.get(r.writer), r.nbytes) for r in costs.reads]
        self._generating = [(node, call) for node, call in calls if self.calls[call].kind == "generation"]
        self.fastest = [min((option.seconds for option in own), default=math.inf) for own in options]
        self._at_home = sorted(set(self.homes))
        self._vectors: dict[Mesh, Floats] = {}
        self._moves: dict[tuple[int, int, int, int], float] = {}  # seconds by call, its option, source, its option
        self._scores: dict[tuple[int, ...], Score] = {}

    def state(self, plan: ExecutionPlan) -> State | None:
        """None where the plan is not made of options."""
        numbers = [self.numbers[i].get(plan[call.name]) for i, call in enumerate(self.calls)]
        return [n for n in numbers if n is not None] if None not in numbers else None

    def plan(self, state: Sequence[int]) -> Mapping[str, CallPlan]:
        return {call.name: self.options[i][state[i]].plan for i, call in enumerate(self.calls)}

    def score(self, state: Sequence[int], limit: float = math.inf) -> Score | None:
        """None when a bound shows that the cost is at least `limit`, which saves the timeline."""
        key = tuple(state)
        if (known := self._scores.get(key)) is not None:
            return known
        self.evaluations += 1
        chosen = [options[n] for options, n in zip(self.options, state, strict=True)]
        static = self._static(chosen)
        excess = float(self.memory(chosen, static).max()) / self.costs.capacity - 1.0
        broken = self._broken(chosen)
        good = excess <= 0 and not broken
        factor = self.costs.weighted(1.0, self.plan(state)) if self.costs.margin else 1.0
        factor *= 1.0 if good else _PENALTY + _PENALTY_RATE * (max(0.0, excess) + broken)
        seconds, masks = self.loads(state)
        latency: dict[int, float] = {}
        for node, call in self._generating:
            plan = chosen[call].plan
            cost = self.costs.generation(self.calls[call], plan, float((static * self.vector(plan.mesh)).max()))
            seconds[node], latency[node] = cost.seconds, cost.latency
        for node, call, writer, nbytes in self._reads:
            there = CONTROLLER if writer is None else chosen[writer].plan.mesh
            seconds[node] += self.costs.arrival(nbytes, there, chosen[call].plan.mesh)
        least = self.schedule.least(seconds, masks, latency)
        if least * factor >= limit:
            return None
        shares = None
        if self.costs.sharing:
            shares = [1.0 if call is None or source is not None else chosen[call].busy for call, source in self.nodes]
        took = max(least, self.schedule.gap(self.schedule.run(seconds, masks, shares)[1]))
        if len(self._scores) >= _REMEMBERED:
            self._scores.clear()
        self._scores[key] = Score(took * factor, took, good)
        return self._scores[key]

    def loads(self, state: Sequence[int | None]) -> tuple[list[float], list[int]]:
        """Seconds and devices of every node of the schedule, generation with all memory for it. A call that is not
        decided (None) takes its least seconds and no device."""
        seconds, masks = [], []
        for call, source in self.nodes:
            took, mask = 0.0, 0
            if call is not None and source is None:
                took = self.fastest[call]
                if (number := state[call]) is not None:
                    option = self.options[call][number]
                    took, mask = option.seconds, option.plan.mesh.bits
            elif call is not None and source is not None:
                number, there = state[call], state[source]
                if number is not None and there is not None:
                    here, home = self.options[call][number].plan, self.options[source][there].plan
                    if (key := (call, number, source, there)) not in self._moves:
                        self._moves[key] = self.costs.moved(self.calls[call].group, home, here)
                    took = self._moves[key]
                    mask = here.mesh.bits | home.mesh.bits if took else 0
            seconds.append(took)
            masks.append(mask)
        return seconds, masks

    def _static(self, chosen: Chosen) -> Floats:
        static = np.zeros(self.costs.cluster.size)
        for i in self._at_home:
            if (option := chosen[i]) is not None:
                static += option.static * self.vector(option.plan.mesh)
        return static

    def memory(self, chosen: Chosen, static: Floats | None = None) -> Floats:
        """[devices] Bytes at the fullest moment of what is decided, without copies of weights whose home is open."""
        active = np.zeros(self.costs.cluster.size)
        for i, option in enumerate(chosen):
            if option is None:
                continue
            home = chosen[self.homes[i]]
            elsewhere = home is not None and home is not option and option.plan != home.plan
            more = (option.active + option.copy if elsewhere else option.active) * self.vector(option.plan.mesh)
            np.maximum(active, more, out=active)
        return (self._static(chosen) if static is None else static) + active

    def vector(self, mesh: Mesh) -> Floats:
        """[devices]: 1 on the mesh, 0 elsewhere."""
        if mesh not in self._vectors:
            on = np.zeros(self.costs.cluster.size)
            on[list(mesh.devices)] = 1.0
            self._vectors[mesh] = on
        return self._vectors[mesh]

    def _broken(self, chosen: Sequence[Option]) -> int:
        """How many constraints."""
        rules = self.costs.rules
        broken = sum(len({chosen[i].plan for i in calls}) - 1 for calls in self._alike)
        broken += sum(not chosen[call].plan.within(chosen[home].plan) for call, home in self._hybrid)
        if not rules.apart and not rules.together:
            return broken
        at: dict[str, list[Mesh]] = {}
        for call, option in zip(self.calls, chosen, strict=True):
            at.setdefault(call.group, []).append(option.plan.mesh)
        broken += sum(any(a.overlaps(b) for a in at[x.first] for b in at[x.second]) for x in rules.apart)
        return broken + sum(len({*at[x.first], *at[x.second]}) - 1 for x in rules.together)


def space_size(costs: Costs, deadline: Deadline = NEVER) -> int:
    """How many execution plans there are. Errors: TimeUpError when the deadline comes before."""
    return math.prod(len(options) for options in options_of(costs, prune=False, deadline=deadline))


def exact(costs: Costs, *, start: ExecutionPlan | None = None, deadline: Deadline = NEVER) -> Found | None:
    """The best of all execution plans; None when none can run.

    Calls are settled one after the other, the longest first. Settled calls bound what the rest can still reach: by the
    work of their devices, the shortest chain of calls through an iteration, and memory. A good `start` rules out more.
    The result is `complete` unless the `deadline` came. Errors: TimeUpError when it comes before the search has begun.
    """
    began, late = deadline.clock(), False
    options = options_of(costs, prune=False, also=[start] if start else [], deadline=deadline)
    if not all(options):
        return None
    evaluator, best, limit = Evaluator(costs, options), State(), math.inf
    least_work = [min(o.seconds * o.plan.mesh.size for o in own) for own in options]
    order = sorted(range(len(options)), key=lambda call: -evaluator.fastest[call])
    numbers = [sorted(range(len(own)), key=lambda n: own[n].seconds) for own in options]
    devices, alike = costs.cluster.size, len(costs.cluster.nodes) == 1 and not costs.constraints
    if alike and not devices & (devices - 1):  # slices of a size: the first call may as well take the first of them
        numbers[order[0]] = [n for n in numbers[order[0]] if not options[order[0]][n].plan.mesh.devices[0]]
    chosen = list[int | None]([None] * len(options))

    def look_at(state: State) -> None:
        nonlocal best, limit
        score = evaluator.score(state, limit)
        if score is not None and score.good and score.cost < limit:
            best, limit = state, score.cost

    def may_be_better() -> bool:
        seconds, masks = evaluator.loads(chosen)
        work = sum(took * mask.bit_count() for took, mask in zip(seconds, masks, strict=True))
        work += sum(least_work[call] for call, number in enumerate(chosen) if number is None)
        if work / devices >= limit or evaluator.schedule.least(seconds, masks) >= limit:
            return False
        some = [None if number is None else own[number] for own, number in zip(options, chosen, strict=True)]
        return bool(evaluator.memory(some).max() <= costs.capacity)

    def settle(depth: int) -> None:
        """All combinations of what is not settled yet."""
        nonlocal late
        if depth == len(order):
            look_at([number for number in chosen if number is not None])
            return
        for number in numbers[order[depth]]:
            late = late or deadline.over
            if late:
                break
            chosen[order[depth]] = number
            if may_be_better():
                settle(depth + 1)
        chosen[order[depth]] = None

    if start is not None and (state := evaluator.state(start)) is not None:
        look_at(state)
    settle(0)
    if not best:
        return None
    return Found(evaluator.plan(best), limit, evaluator.evaluations, deadline.clock() - began, complete=not late)


ROUND = 2500
"""Proposals from one start until the best plan is polished and the next start taken."""
PATIENCE = 12
"""Rounds without anything better after which few plans are not looked at any more."""
HOT, COLD = 0.15, 0.003
"""Temperatures at the ends of a round, relative to the best cost: a rise by so much is accepted once in e times."""


def mcmc(
    costs: Costs,
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
    does not run out. Errors: TimeUpError when the deadline comes before the search has begun."""
    began = deadline.clock()
    options = options_of(costs, also=starts, deadline=deadline)
    if not all(options):
        return None
    if math.prod(map(len, options)) <= ROUND:
        patience = min(patience, PATIENCE)
    return _Chain(Evaluator(costs, options), random.Random(seed), deadline, evaluations, began).search(starts, patience)


class _Chain:
    def __init__(
        self, evaluator: Evaluator, chance: random.Random, deadline: Deadline, limit: float, began: float
    ) -> None:
        self.evaluator, self.options, self.random = evaluator, evaluator.options, chance
        self.deadline, self.limit, self.began = deadline, limit, began
        self.best: State = []
        self.best_cost = math.inf
        self.history: list[tuple[float, float]] = []
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
        for pair in self.evaluator.costs.rules.together:  # they can only move together
            joined = [*groups[pair.first], *(i for i in groups[pair.second] if i not in groups[pair.first])]
            for group in [g for g, calls in groups.items() if calls in (groups[pair.first], groups[pair.second])]:
                groups[group] = joined
        self.groups = list(groups.values())

    def over(self) -> bool:
        return self.deadline.over or self.evaluator.evaluations >= self.limit

    def search(self, starts: Sequence[ExecutionPlan], patience: float) -> Found | None:
        given, idle = [state for plan in starts if (state := self.evaluator.state(plan)) is not None], 0
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
        found = evaluator.plan(self.best), score.seconds, evaluator.evaluations, elapsed
        return Found(*found, history=tuple(self.history))

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
                number = self.evaluator.numbers[call].get(wanted) if wanted.mesh == mesh else None
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
