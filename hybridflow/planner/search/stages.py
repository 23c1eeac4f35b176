"""Stage-wise cost of a placement (HybridFlow, section 6: d_cost), and the choices of a set of colocated models. Pure.

An iteration is three stages, generation, preparation and learning. Within a stage the models of one colocated set run
one after another, and sets run at the same time; stages follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import le
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.planner.describe.graph import Call
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.search.problem import Problem

Floats = NDArray[np.float64]
STAGES = 3
_STATIC, _ACTIVE, _WIDTH = 3, 4, 5
_AT_ONCE = 16  # rows that others are compared with at a time


class Layouts(NamedTuple):
    """How a group's model is cut in training and inference, and in generation (None: likewise)."""

    parallel: Parallel
    generate: Parallel | None = None

    def of(self, call: Call) -> Parallel:
        return self.generate if call.kind == "generation" and self.generate is not None else self.parallel


class Generates(NamedTuple):
    """A generation call and its layout. Its seconds depend on the memory that the whole set leaves for KV cache."""

    call: str
    parallel: Parallel


class GroupLayout(NamedTuple):
    """One choice for a group on a mesh. `values` are those of `Front`, without the seconds of `generates`."""

    layouts: Layouts
    values: tuple[float, ...]
    generates: tuple[Generates, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.values[:STAGES])

    @property
    def static(self) -> float:
        return self.values[_STATIC]

    @property
    def active(self) -> float:
        return self.values[_ACTIVE]


def stage_of(call: Call) -> int:
    """Index of the stage that a call belongs to: 0 generation, 1 preparation, 2 learning."""
    return {"generation": 0, "training": 2}.get(call.kind, 1)


def stage_cost(sets: Iterable[Sequence[float]]) -> float:
    """Seconds of an iteration from the three stage seconds of each colocated set."""
    return float(sum(max(stage) for stage in zip(*sets, strict=True)))


def partitions(groups: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All ways to colocate groups in sets."""
    if not groups:
        yield ()
        return
    first, rest = groups[0], groups[1:]
    for sets in partitions(rest):
        for i, names in enumerate(sets):
            yield (*sets[:i], (first, *names), *sets[i + 1 :])
        yield ((first,), *sets)


def group_layouts(problem: Problem, group: str, mesh: Mesh) -> Iterator[GroupLayout]:
    """Every way to run a group on a mesh (algorithm 2) that its constraints and the simulator allow.

    One layout serves training and inference. Generation has one within it; getting the weights there belongs to the
    generation stage. What is beaten even if that took no time is left out: weight plans take a while.
    """
    calls = problem.graph.of_group(group)
    hybrid = len({call.kind == "generation" for call in calls}) == 2
    found = []
    for parallel in problem.strategies(group, mesh, all(call.kind == "generation" for call in calls)):
        for generate in problem.generation_sizes(group, mesh, parallel) if hybrid else [None]:
            found.append(group_layout(problem, group, calls, mesh, Layouts(parallel, generate)))
    kept: dict[tuple[Generates, ...], list[GroupLayout]] = {}
    for one in sorted(filter(None, found), key=lambda s: s.seconds):
        alike = kept.setdefault(one.generates, [])
        if not any(all(map(le, other.values, one.values)) for other in alike):
            alike.append(_with_transition(problem, group, mesh, one))
    yield from (one for alike in kept.values() for one in alike)


def group_layout(
    problem: Problem, group: str, calls: Sequence[Call], mesh: Mesh, layouts: Layouts
) -> GroupLayout | None:
    """Without the transition to the generation layout."""
    seconds, static, active, generates = [0.0] * STAGES, 0.0, 0.0, []
    for call in calls:
        parallel = layouts.of(call)
        if not problem.rules.allows(group, mesh, parallel, call.kind == "generation"):
            return None
        option = problem.option(call, mesh, parallel)
        if option is None:
            return None
        if call.kind == "generation":
            generates.append(Generates(call.name, parallel))
        else:
            seconds[stage_of(call)] += option.seconds
        if parallel == layouts.parallel:
            static, active = option.static, max(active, option.active)
        else:
            active = max(active, option.active + option.copy)
    return GroupLayout(layouts, (*seconds, static, active), tuple(generates))


def _with_transition(problem: Problem, group: str, mesh: Mesh, layout: GroupLayout) -> GroupLayout:
    """Weights get into the layout of each generation call before it."""
    home, (generation, *others) = CallPlan(mesh, layout.layouts.parallel), layout.values
    for call in layout.generates:
        if call.parallel != home.parallel:
            generation += problem.reallocation(group, home, CallPlan(mesh, call.parallel))
    return layout._replace(values=(generation, *others))


class Choice(NamedTuple):
    """Layouts of the groups of a set, what it generates and how, and the number of devices that it takes."""

    layouts: tuple[Layouts, ...] = ()
    generates: tuple[Generates, ...] = ()
    size: int = 0


@dataclass(frozen=True)
class Front:
    """Choices for the groups of a set that no other choice beats.

    `values` [choices, 5]: seconds of the three stages, static and active bytes.
    """

    values: Floats
    choices: list[Choice]

    @classmethod
    def of(cls, layouts: Iterable[GroupLayout], size: int, capacity: float) -> Front:
        """Choices of one group on `size` devices of `capacity` bytes."""
        given = [s for s in layouts if s.static + s.active <= capacity]
        values = np.array([s.values for s in given]).reshape(-1, _WIDTH)
        made = cls(values, [Choice((s.layouts,), s.generates, size) for s in given])
        return made._kept(_undominated_alike(values, made._kinds()))

    @cached_property
    def least(self) -> Floats:
        """The smallest seconds of each stage."""
        return self.values[:, :STAGES].min(axis=0) if len(self.values) else np.full(STAGES, np.inf)

    def with_peers(self, other: Front, capacity: float) -> Front:
        """Both sets on the same devices: stages and static bytes add up, the largest active bytes count."""
        first, second = self.values[:, None], other.values[None]
        both = (first + second).reshape(-1, _WIDTH)
        both[:, _ACTIVE] = np.maximum(first[..., _ACTIVE], second[..., _ACTIVE]).reshape(-1)
        kinds = (self._kinds()[:, None] * len(other.values) + other._kinds()[None]).reshape(-1)
        fitting = np.flatnonzero(both[:, _STATIC] + both[:, _ACTIVE] <= capacity)
        kept = fitting[_undominated_alike(both[fitting], kinds[fitting])]
        pairs = [(self.choices[i // len(other.choices)], other.choices[i % len(other.choices)]) for i in kept.tolist()]
        return Front(both[kept], [Choice(a.layouts + b.layouts, a.generates + b.generates, a.size) for a, b in pairs])

    def generating(self, seconds: Callable[[Generates, int], float], step: float) -> Front:
        """Adds the seconds of generation: `seconds(call, n)` where static bytes take n times `step`."""
        steps = np.ceil(self.values[:, _STATIC] / step - 1e-9).astype(np.int64)
        alike = self._kinds() * (int(steps.max(initial=0)) + 1) + steps
        made = self._kept(rows := _undominated_alike(self.values[:, :STAGES], alike))
        known: dict[int, float] = {}
        for row, (kind, taken) in enumerate(zip(alike[rows].tolist(), steps[rows].tolist(), strict=True)):
            if kind not in known:
                known[kind] = sum(seconds(call, taken) for call in made.choices[row].generates)
            made.values[row, 0] += known[kind]
        return made._kept(undominated(made.values[:, :STAGES]))

    def _kinds(self) -> NDArray[np.int64]:
        """A number for each choice, equal for those of equal generation."""
        known: dict[tuple[Generates, ...], int] = {}
        return np.array([known.setdefault(one.generates, len(known)) for one in self.choices], dtype=np.int64)

    def or_(self, other: Front) -> Front:
        """The better choices of both, by seconds alone."""
        values = np.concatenate([self.values, other.values])
        return Front(values, self.choices + other.choices)._kept(undominated(values[:, :STAGES]))

    def _kept(self, rows: NDArray[np.intp]) -> Front:
        return Front(self.values[rows], [self.choices[i] for i in rows])


def cheapest(fronts: Sequence[Front]) -> tuple[float, list[int]]:
    """The choice of each set for which the sum over stages of the largest seconds is least, and that sum."""
    worst: Floats = np.zeros((1, STAGES))
    rows: list[list[int]] = [[]]
    for front in fronts:
        both = np.maximum(worst[:, None], front.values[None, :, :STAGES]).reshape(-1, STAGES)
        kept = undominated(both)
        width = max(1, len(front.values))
        rows = [[*rows[i // width], i % width] for i in kept.tolist()]
        worst = both[kept]
    if not len(worst):
        return np.inf, []
    totals = worst.sum(axis=1)
    at = int(totals.argmin())
    return float(totals[at]), rows[at]


def _undominated_alike(values: Floats, kinds: NDArray[np.int64]) -> NDArray[np.intp]:
    """Rows that no row of equal kind beats: among those, less static memory never makes generation slower."""
    order = np.argsort(kinds, kind="stable")
    starts = np.flatnonzero(np.diff(kinds[order])) + 1
    alike = np.split(order, starts) if len(order) else []
    kept = [rows[undominated(values[rows])] for rows in alike]
    return np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.intp)


def undominated(values: Floats) -> NDArray[np.intp]:
    """Rows of `values` [n, k] that no other row is at most equal to in every column; of equal rows, one."""
    order = np.lexsort(values.T[::-1]) if len(values) else np.zeros(0, dtype=np.intp)
    kept: list[int] = []
    while len(order):
        # what comes later in this order cannot beat an earlier row
        first, order = order[:_AT_ONCE], order[_AT_ONCE:]
        known = values[first]
        beats = (known[None] <= known[:, None]).all(axis=-1)
        first = first[~np.tril(beats, -1).any(axis=1)]
        kept += first.tolist()
        if len(order):
            order = order[(values[order][:, None] < values[first][None]).any(axis=-1).all(axis=-1)]
    return np.array(sorted(kept), dtype=np.intp)
