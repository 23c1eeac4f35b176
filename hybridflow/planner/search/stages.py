"""Stage-wise cost of a placement (HybridFlow, section 6: d_cost), and the choices of a set of colocated models. Pure.

An iteration is three stages, generation, preparation and learning. Within a stage the models of one colocated set run
one after another, and sets run at the same time; stages follow each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import le
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.graph import Call
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel

Floats = NDArray[np.float64]
STAGES, STATIC, ACTIVE, _WIDTH = 3, 3, 4, 5
"""Columns of a choice's values: seconds of the three stages, static and active bytes."""
_AT_ONCE = 16  # rows that others are compared with at a time
Generates = tuple[str, Parallel]
"""A generation call and its layout. Its seconds depend on the memory that the whole set leaves for KV cache."""


class Layouts(NamedTuple):
    """How a group's model is cut in training and inference, and in generation (None: likewise)."""

    parallel: Parallel
    generate: Parallel | None = None

    def of(self, call: Call) -> Parallel:
        return self.generate if call.kind == "generation" and self.generate is not None else self.parallel


class Choice(NamedTuple):
    """Layouts of the groups of a set, what it generates and how, and the number of devices that it takes."""

    layouts: tuple[Layouts, ...] = ()
    generates: tuple[Generates, ...] = ()
    size: int = 0


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


def group_layout(costs: Costs, group: str, mesh: Mesh, layouts: Layouts) -> tuple[float, ...] | None:
    """Values of a group in these layouts, without transitions and the seconds of generation; None where it cannot run
    so."""
    seconds, static, active = [0.0] * STAGES, 0.0, 0.0
    for call in costs.graph.of_group(group):
        parallel, generation = layouts.of(call), call.kind == "generation"
        allowed = costs.rules.allows(group, mesh, parallel, generation)
        if not allowed or (option := costs.option(call, mesh, parallel)) is None:
            return None
        if not generation:
            seconds[2 if call.kind == "training" else 1] += option.seconds  # learning or preparation
        if parallel == layouts.parallel:
            static, active = option.static, max(active, option.active)
        else:
            active = max(active, option.active + option.copy)
    return (*seconds, static, active)


@dataclass(frozen=True)
class Front:
    """Choices for the groups of a set that no other choice beats, and their values [choices, 5]."""

    values: Floats
    choices: list[Choice]

    @classmethod
    def of(cls, costs: Costs, group: str, mesh: Mesh, capacity: float) -> Front:
        """Ways to run a group on a mesh (algorithm 2) that its constraints and `capacity` bytes of a device allow.

        One layout serves training and inference. Generation has one within it; getting the weights there belongs to the
        generation stage. What is beaten even if that took no time is left out: weight plans take a while."""
        calls, found = costs.graph.of_group(group), []
        generation = [call for call in calls if call.kind == "generation"]
        both = 0 < len(generation) < len(calls)
        for parallel in costs.strategies(group, mesh, generates=len(generation) == len(calls)):
            for generate in costs.generation_sizes(group, mesh, parallel) if both else [None]:
                layouts = Layouts(parallel, generate)
                if (values := group_layout(costs, group, mesh, layouts)) is not None:
                    found.append((values, layouts))
        kept: dict[Parallel | None, list[tuple[tuple[float, ...], Layouts]]] = {}
        for values, layouts in sorted(found, key=lambda one: sum(one[0][:STAGES])):
            alike = kept.setdefault(layouts.of(generation[0]) if generation else None, [])
            if not any(all(map(le, other, values)) for other, _ in alike):
                home, here = (CallPlan(mesh, sizes or layouts.parallel) for sizes in layouts)
                alike.append(((values[0] + len(generation) * costs.moved(group, home, here), *values[1:]), layouts))
        given = [own for alike in kept.values() for own in alike if own[0][STATIC] + own[0][ACTIVE] <= capacity]
        choices = [
            Choice((layouts,), tuple((call.name, layouts.of(call)) for call in generation), mesh.size)
            for _, layouts in given
        ]
        made = cls(np.array([values for values, _ in given]).reshape(-1, _WIDTH), choices)
        return made._kept(_undominated_alike(made.values, made._kinds()))

    @cached_property
    def least(self) -> Floats:
        """The smallest seconds of each stage."""
        return self.values[:, :STAGES].min(axis=0) if len(self.values) else np.full(STAGES, np.inf)

    def with_peers(self, other: Front, capacity: float) -> Front:
        """Both sets on the same devices: stages and static bytes add up, the largest active bytes count."""
        first, second = self.values[:, None], other.values[None]
        both = (first + second).reshape(-1, _WIDTH)
        both[:, ACTIVE] = np.maximum(first[..., ACTIVE], second[..., ACTIVE]).reshape(-1)
        kinds = (self._kinds()[:, None] * len(other.values) + other._kinds()[None]).reshape(-1)
        fitting = np.flatnonzero(both[:, STATIC] + both[:, ACTIVE] <= capacity)
        kept = fitting[_undominated_alike(both[fitting], kinds[fitting])]
        pairs = [(self.choices[i // len(other.choices)], other.choices[i % len(other.choices)]) for i in kept.tolist()]
        return Front(both[kept], [Choice(a.layouts + b.layouts, a.generates + b.generates, a.size) for a, b in pairs])

    def generating(self, costs: Costs, mesh: Mesh) -> Front:
        """With the seconds of generation, which depend on the static bytes."""
        steps = np.ceil(self.values[:, STATIC] / costs.step - 1e-9).astype(np.int64)
        alike = self._kinds() * (int(steps.max(initial=0)) + 1) + steps
        made = self._kept(rows := _undominated_alike(self.values[:, :STAGES], alike))
        known: dict[int, float] = {}
        for row, (kind, taken) in enumerate(zip(alike[rows].tolist(), steps[rows].tolist(), strict=True)):
            if kind not in known:
                calls = [(costs.graph.call(name), CallPlan(mesh, how)) for name, how in made.choices[row].generates]
                known[kind] = sum(costs.generation(call, plan, taken * costs.step).seconds for call, plan in calls)
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
