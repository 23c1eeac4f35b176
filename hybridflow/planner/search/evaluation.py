"""Evaluation: fast costs of execution plans, for searches over very many.

Pure. A state lists the option number of each call. A score looks up everything by these numbers and computes only the
timeline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hybridflow.planner.cost.timeline import GraphSchedule
from hybridflow.planner.describe.graph import Call
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, meshes
from hybridflow.planner.search.deadline import NEVER, Deadline
from hybridflow.planner.search.problem import Option, Problem
from hybridflow.planner.search.stages import Floats, undominated

State = list[int]
Chosen = Sequence[Option | None]  # by call; None where it is not decided yet
_REMEMBERED = 200_000
_PENALTY, _PENALTY_RATE = 2.0, 10.0


class Score(NamedTuple):
    """`cost` is what searches make small: `seconds` per iteration, with the problem's margin for each further layout,
    if the plan can run, else a multiple of them.

    `good`: it fits into memory and keeps the constraints.
    """

    cost: float
    seconds: float
    good: bool


@dataclass(frozen=True)
class Found:
    """The best plan of a search, its `seconds` per iteration, how many plans were looked at, and in what time [s].

    `complete`: all others are known to be no better.
    """

    plan: ExecutionPlan
    seconds: float
    evaluations: int
    elapsed: float
    complete: bool = False
    history: tuple[tuple[float, float], ...] = field(default=(), repr=False)


def options_of(
    problem: Problem, *, prune: bool = True, also: Sequence[ExecutionPlan] = (), deadline: Deadline = NEVER
) -> list[list[Option]]:
    """For each of the problem's calls its options, and those that the plans in `also` choose.

    With `prune`, a layout is left out on a mesh if others of it are at least as fast and as small for every call of
    the group (and wait as much, where devices share something): it could only save moves between them. Calls without
    any option have an empty list. Errors: TimeUpError when the deadline comes before all are known.
    """
    given = dict.fromkeys((problem.graph.call(name).group, at) for plan in also for name, at in plan.items())
    where = list(dict.fromkeys([*meshes(problem.cluster), *(at.mesh for _, at in given)]))
    where += [Mesh(p) for g in problem.graph.groups if (p := problem.rules.devices(g)) and Mesh(p) not in where]
    shapes = {mesh: problem.shape(mesh) for mesh in where}
    by_shape: dict[tuple[str, tuple], list] = {}
    found: dict[str, list[Option]] = {call.name: [] for call in problem.calls}
    for group in problem.graph.groups:
        calls = problem.graph.of_group(group)
        for mesh in where:
            deadline.check()
            key = (group, shapes[mesh])
            if key not in by_shape:
                by_shape[key] = _layouts(problem, calls, mesh, prune)
            more = [at.parallel for of, at in given if of == group and at.mesh == mesh]
            for call in calls:
                for parallel in dict.fromkeys([*by_shape[key], *more]):
                    if problem.rules.allows(group, mesh, parallel, call.kind == "generation"):
                        option = problem.option(call, mesh, parallel, shapes[mesh])
                        found[call.name] += [option] if option else []
    return list(found.values())


def _layouts(problem: Problem, calls: Sequence[Call], mesh: Mesh, prune: bool) -> list:
    group = calls[0].group
    layouts = list(dict.fromkeys(x for g in (False, True) for x in problem.strategies(group, mesh, g)))
    if not prune:
        return layouts
    kept, width = {}, 6 if problem.sharing else 5  # who waits more leaves more to others that share
    for call in calls:
        options = [option for parallel in layouts if (option := problem.option(call, mesh, parallel)) is not None]
        values = np.array([option[1:width] for option in options]).reshape(len(options), width - 1)
        kept |= {options[i].plan.parallel: None for i in undominated(values)}
    return [x for x in layouts if x in kept or problem.rules.pinned_sizes(group, x)]


class Evaluator:
    """Scores states over `options` (those of `options_of`)."""

    def __init__(self, problem: Problem, options: Sequence[Sequence[Option]]) -> None:
        self.problem, self.options, self.evaluations = problem, options, 0
        self.schedule = GraphSchedule(problem.graph, sharing=problem.sharing)
        self.calls = problem.calls
        number = {call.name: i for i, call in enumerate(self.calls)}
        self.homes = [number[problem.homes[call.group]] for call in self.calls]
        program = problem.graph.calls
        self.nodes = [
            (number.get(program[to].name), None if source is None else number[program[source].name])
            for to, source, _ in self.schedule.nodes
        ]
        self._numbers = [{(o.plan.mesh, o.plan.parallel): i for i, o in enumerate(own)} for own in options]
        self._alike = [[number[name] for name in names] for names in problem.alike]
        self._hybrid = [(number[name], number[home]) for name, home in problem.hybrid]
        self._generating = [
            (at, call)
            for at, (call, source) in enumerate(self.nodes)
            if call is not None and source is None and self.calls[call].kind == "generation"
        ]
        self.fastest = [min((option.seconds for option in own), default=math.inf) for own in options]
        self._at_home = sorted(set(self.homes))
        self.capacity = np.array(problem.capacity)
        self._vectors: dict[Mesh, Floats] = {}
        self._seconds: dict[tuple[int, int, int, int], float] = {}
        self._scores: dict[tuple[int, ...], Score] = {}

    def number(self, call: int, plan: CallPlan) -> int | None:
        """Which of a call's options this plan is."""
        return self._numbers[call].get((plan.mesh, plan.parallel))

    def state(self, plan: ExecutionPlan) -> State | None:
        """None where the plan is not made of options."""
        numbers = [self.number(i, plan[call.name]) for i, call in enumerate(self.calls)]
        return [n for n in numbers if n is not None] if None not in numbers else None

    def plan(self, state: Sequence[int]) -> Mapping[str, CallPlan]:
        return {call.name: self.options[i][state[i]].plan for i, call in enumerate(self.calls)}

    def score(self, state: Sequence[int], limit: float = math.inf) -> Score | None:
        """None when a bound shows that the cost is at least `limit`, which saves the timeline."""
        key = tuple(state)
        if (known := self._scores.get(key)) is not None:
            return known
        self.evaluations += 1
        found = self._score(state, limit)
        if found is not None:
            if len(self._scores) >= _REMEMBERED:
                self._scores.clear()
            self._scores[key] = found
        return found

    def _score(self, state: Sequence[int], limit: float) -> Score | None:
        chosen = [options[n] for options, n in zip(self.options, state, strict=True)]
        static = self._static(chosen)
        excess = float((self.memory(chosen, static) / self.capacity).max()) - 1.0
        broken = self._broken(chosen)
        good = excess <= 0 and not broken
        factor = (1 + self.problem.margin) ** self.problem.further(self.plan(state)) if self.problem.margin else 1.0
        factor *= 1.0 if good else _PENALTY + _PENALTY_RATE * (max(0.0, excess) + broken)
        seconds, masks = self.loads(state)
        latency: dict[int, float] = {}
        for node, call in self._generating:
            cost = self.problem.generation(
                self.calls[call], chosen[call].plan, float((static * self.vector(chosen[call].plan.mesh)).max())
            )
            seconds[node], latency[node] = cost.seconds, cost.latency
        least = self.schedule.least(seconds, masks, latency)
        if least * factor >= limit:
            return None
        _, stops = self.schedule.run(seconds, masks, self._shares(chosen))
        took = max(least, self.schedule.gap(stops))
        return Score(took * factor, took, good)

    def loads(self, state: Sequence[int | None]) -> tuple[list[float], list[int]]:
        """Seconds and devices of every node of the schedule, generation with all memory for it. A call that is not
        decided (None) takes its least seconds and no device."""
        seconds, masks = [], []
        for call, source in self.nodes:
            took, mask = 0.0, 0
            if call is not None:
                number, there = state[call], None if source is None else state[source]
                if source is None and number is None:
                    took = self.fastest[call]
                elif number is not None and source is None:
                    option = self.options[call][number]
                    took, mask = option.seconds, option.plan.mesh.bits
                elif number is not None and source is not None and there is not None:
                    took = self.moved(call, source, number, there)
                    here, home = self.options[call][number].plan.mesh, self.options[source][there].plan.mesh
                    mask = here.bits | home.bits if took else 0
            seconds.append(took)
            masks.append(mask)
        return seconds, masks

    def _shares(self, chosen: Sequence[Option]) -> list[float] | None:
        """For every node of the schedule the share of its seconds in which devices compute; None if irrelevant."""
        if self.schedule.sharing is None:
            return None
        return [1.0 if call is None or source is not None else chosen[call].busy for call, source in self.nodes]

    def moved(self, call: int, source: int, number: int, source_number: int) -> float:
        """Seconds in which weights get from one call's option to another's."""
        key = (source, source_number, call, number)
        if key not in self._seconds:
            here, there = self.options[call][number].plan, self.options[source][source_number].plan
            self._seconds[key] = self.problem.reallocation(self.calls[call].group, there, here)
        return self._seconds[key]

    def _static(self, chosen: Chosen) -> Floats:
        """[devices] Bytes that stay between calls."""
        static = np.zeros_like(self.capacity)
        for i in self._at_home:
            if (option := chosen[i]) is not None:
                static += option.static * self.vector(option.plan.mesh)
        return static

    def memory(self, chosen: Chosen, static: Floats | None = None) -> Floats:
        """[devices] Bytes at the fullest moment of what is decided, without copies of weights whose home is open."""
        active = np.zeros_like(self.capacity)
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
            on = np.zeros_like(self.capacity)
            on[list(mesh.devices)] = 1.0
            self._vectors[mesh] = on
        return self._vectors[mesh]

    def _broken(self, chosen: Sequence[Option]) -> int:
        rules, broken = self.problem.rules, 0
        for calls in self._alike:
            broken += len({chosen[i].plan for i in calls}) - 1
        for call, home in self._hybrid:
            broken += not chosen[call].plan.within(chosen[home].plan)
        if not rules.apart and not rules.together:
            return broken
        at: dict[str, list[Mesh]] = {}
        for call, option in zip(self.calls, chosen, strict=True):
            at.setdefault(call.group, []).append(option.plan.mesh)
        broken += sum(any(a.overlaps(b) for a in at[x.first] for b in at[x.second]) for x in rules.apart)
        return broken + sum(len({*at[x.first], *at[x.second]}) - 1 for x in rules.together)
