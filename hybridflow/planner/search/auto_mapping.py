"""Auto-mapping: the best placement of models by stage-wise cost (HybridFlow, algorithms 1 and 2). Pure.

Every way to colocate groups in sets is tried, every way to share the devices between the sets, and every layout of
every group in its set. The result is that of trying all of them together; most are ruled out by bounds before that:

- the choices of a group on a number of devices are found once for every architecture and workload, without those that
  another beats in the seconds of all stages and in memory;
- an allocation costs at least the sum over stages of the largest least seconds of its sets.

Where devices are unlike, bounds are those of the best devices for every set, and every place of its sets is tried. Only
timelines have weights that one group gives to another (rollout engines), and contention.

A stage-wise cost lets every stage wait for the one before. Calls do not: each begins once what it reads is there and
its devices are free (paper, section 4.1), so an actor generates for the next iteration while a critic on other devices
is still trained. `overlap_map` therefore times the allocations whose busiest set has least to do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product

import numpy as np

from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, packings, powers, sizes
from hybridflow.planner.search.deadline import NEVER, Deadline, TimeUpError
from hybridflow.planner.search.problem import Problem
from hybridflow.planner.search.stages import (
    STAGES,
    Floats,
    Front,
    Generates,
    Layouts,
    cheapest,
    group_layouts,
    partitions,
    stage_cost,
)

GRID = 4_000_000
"""Allocations looked at for one way to colocate; with more, sets get fewer different sizes."""
PLACES = 256
"""Ways to place an allocation on unlike devices that are looked at, by the square of the nodes; at least 4."""
TIMED, TIMED_PLACES = 24, 4
"""Allocations of each way to colocate that are timed, and places on unlike devices for each of them."""
NOTHING = Front.of((), 0, 0.0)
_Placed = tuple[float, list[tuple[str, ...]], list[Mesh], list[tuple[Front, int]]]


@dataclass(frozen=True)
class Mapped:
    """The best placement: meshes of the sets of colocated groups, `seconds` of an iteration by stage-wise cost, and its
    execution plan. `allocations` were bounded, `tried` of them timed."""

    sets: Mapping[tuple[str, ...], Mesh]
    seconds: float
    plan: ExecutionPlan
    allocations: int
    tried: int


def auto_map(problem: Problem) -> Mapped | None:
    """HybridFlow's algorithm 1. None when no placement keeps the constraints and fits into memory."""
    return AutoMapping(problem).best


class AutoMapping:
    """The choices of every set of groups on every number of devices, and the best way to share devices between sets.

    After `deadline` searches return the best placement so far, once they have one.
    """

    def __init__(self, problem: Problem, deadline: Deadline = NEVER) -> None:
        self.deadline, self._found = deadline, False
        self.problem, cluster, pins = problem, problem.cluster, problem.rules.pins.values()
        self.pinned = {size for pin in pins for size in pin.sizes}
        self.usual = frozenset(sizes(cluster)) | {size for size in self.pinned if size % cluster.nodes[0].count == 0}
        self.sizes = sorted(self.usual | self.pinned)
        self.most_places = max(4, PLACES // len(cluster.nodes) ** 2)
        known: dict[tuple, int] = {}
        self.keys = {group: known.setdefault(self._kind(group), len(known)) for group in problem.graph.groups}
        self.example = {key: group for group, key in self.keys.items()}
        # what generates comes last in a set: only then is there more than one kind of choice to tell apart
        self.last = {group: (group in problem.graph.generating, key) for group, key in self.keys.items()}
        self.allocations = self.tried = 0
        self._fronts: dict[tuple, Front] = {}
        self._ready: dict[tuple, Front] = {}
        self._places: dict[tuple[tuple[int, ...] | None, int], list[Mesh]] = {}
        self._known: dict[tuple[tuple[int, ...], int, int], Front] = {}
        self._lone: dict[tuple[tuple[int, ...], int], Floats] = {}

    def _kind(self, group: str) -> tuple:
        """Groups of one kind cost the same wherever they are."""
        graph, rules = self.problem.graph, self.problem.rules
        calls = tuple((c.kind, c.rows, c.minibatches, c.epochs) for c in graph.of_group(group))
        own = graph.models[group], graph.strategies.get(group), group in graph.trained, calls
        return *own, rules.pins.get(group), rules.caps.get(group)

    @cached_property
    def first(self) -> Mapped | None:
        """A placement that keeps the constraints and fits into memory; None where none does."""
        found = next(self._placements(), None)
        return self.mapped(*found) if found else None

    @cached_property
    def best(self) -> Mapped | None:
        """The placement of least stage-wise cost; None where no placement fits."""
        found = deque(self._placements(), maxlen=1)
        return self.mapped(*found[0]) if found else None

    def _placements(self) -> Iterator[_Placed]:
        """Seconds, sets, their meshes and choices of placements that take less and less time, down to the least."""
        limit = np.inf
        with suppress(TimeUpError):
            for sets, some in self._spaces():
                self.check()
                for found in self._better(sets, some, limit):
                    limit, self._found = found[0], True
                    yield found

    def _spaces(self) -> Iterator[tuple[list[tuple[str, ...]], list[int]]]:
        """Ways to colocate with the sizes of their sets; with a deadline few sizes of the first way come before."""
        ways = self.ways()
        if ways and self.deadline.at < math.inf:
            few = {self.sizes[-1]} if len(ways[0]) == 1 else {*powers(self.sizes[-1]), self.sizes[-1], *self.pinned}
            yield ways[0], [size for size in self.sizes if size in few]
        yield from ((sets, self.some_sizes(len(sets))) for sets in ways)

    def _better(self, sets: list[tuple[str, ...]], some: list[int], limit: float) -> Iterator[_Placed]:
        """Placements of these sets that take less and less time, below `limit`."""
        keys = [tuple(self.keys[name] for name in names) for names in sets]
        least = [self._least(own, some, exact=own != keys[-1]) for own in keys]
        for bound, allocation in self.bounded(least, some, limit):
            if bound >= limit:
                break
            for fronts, where in self._choices(sets, some, allocation, limit):
                if stage_cost([front.least.tolist() for front in fronts]) >= limit:
                    continue
                self.tried += 1
                seconds, rows = cheapest(fronts)
                if seconds < limit:
                    limit = seconds
                    yield seconds, sets, where, list(zip(fronts, rows, strict=True))

    def ways(self) -> list[list[tuple[str, ...]]]:
        """To colocate groups; few sets first: they are quick to look at, and their best bounds the others."""
        ways = [sets for sets in partitions(self.problem.graph.groups) if self.problem.rules.allows_sets(sets)]
        return [[tuple(sorted(names, key=self.last.__getitem__)) for names in sets] for sets in sorted(ways, key=len)]

    def _choices(
        self, sets: Sequence[tuple[str, ...]], some: list[int], allocation: Sequence[int], limit: float
    ) -> Iterator[tuple[list[Front], list[Mesh]]]:
        """The choices and meshes of each set with these numbers of devices.

        The last set gets all devices that are left, or fewer where these are not neighbours.
        """
        keys = [tuple(self.keys[name] for name in names) for names in sets]
        *others, last = allocation
        if not self.problem.homogeneous:
            for fewer in range(last, -1, -1):
                allocated = [some[i] for i in (*others, fewer)]
                alone = [self.alone(own, size).tolist() for own, size in zip(keys, allocated, strict=True)]
                if stage_cost(alone) >= limit:
                    continue
                for where in islice(self.packed(sets, allocated), self.most_places):
                    bounds = [self._alone_on(own, mesh).tolist() for own, mesh in zip(keys, where, strict=True)]
                    if stage_cost(bounds) < limit:
                        yield [self.generating(own, mesh) for own, mesh in zip(keys, where, strict=True)], where
            return
        for fewer in range(last, -1, -1):
            numbers = (*others, fewer)
            fronts = [self._up_to(own, some, i, limit) for own, i in zip(keys, numbers, strict=True)]
            if stage_cost([front.least.tolist() for front in fronts]) >= limit:
                return  # with still fewer devices it takes no less
            if (where := next(self.packed(sets, [some[i] for i in numbers]), None)) is not None:
                yield fronts, where
                return

    def bounded(
        self, least: Sequence[Floats], some: list[int], limit: float
    ) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Allocations, by number of the size for each set, and what each costs at least; the lowest bounds first.

        `least` [sizes, stages] of each set are the least seconds of stages with so many devices or fewer.
        """
        *others, last = least
        count = len(others)
        used = np.zeros((1,) * count, dtype=np.int64)
        stages = np.zeros((*(1,) * count, last.shape[-1]))
        numbers = np.array(some)
        for axis, table in enumerate(others):
            shape = [1] * count
            shape[axis] = len(some)
            used = used + numbers.reshape(shape)
            stages = np.maximum(stages, table.reshape(*shape, -1))
        # the last set gets all that is left: with more devices it can always do what it could with fewer
        left = np.searchsorted(numbers, self.problem.cluster.size - used, side="right") - 1
        bounds = np.where(left >= 0, np.maximum(stages, last[left]).sum(axis=-1), np.inf).reshape(-1)
        self.allocations += int((left >= 0).sum())
        good = np.flatnonzero(bounds < limit)
        for at in good[np.argsort(bounds[good], kind="stable")].tolist():
            where = np.unravel_index(at, left.shape) if count else ()
            yield float(bounds[at]), (*(int(i) for i in where), int(left.reshape(-1)[at]))

    def some_sizes(self, sets: int) -> list[int]:
        """All sizes, or with many sets as many of them as can be looked at."""
        found = self.sizes
        if len(found) ** (sets - 1) <= GRID:
            return found
        wanted = int(GRID ** (1 / (sets - 1)))
        steps = np.unique(np.geomspace(1, len(found), wanted).round().astype(int)) - 1
        return [found[i] for i in steps.tolist()]

    def alone(self, keys: tuple[int, ...], size: int) -> Floats:
        """[stages] Least seconds of a set if each of its groups had the devices for itself, on the best ones."""
        if (keys, size) not in self._lone:
            each = [self._alone_on(keys, mesh) for mesh in self.places(keys, size)]
            self._lone[keys, size] = np.min([np.full(STAGES, np.inf), *each], axis=0)
        return self._lone[keys, size]

    def _alone_on(self, keys: tuple[int, ...], mesh: Mesh) -> Floats:
        return np.sum([self.generating((key,), mesh).least for key in keys], axis=0)

    def _least(self, keys: tuple[int, ...], some: list[int], exact: bool) -> Floats:
        """[sizes, stages] `alone` with each size or a smaller one; `exact`: a pinned set has its own size only."""
        found = np.array([self.alone(keys, size) for size in some])
        return found if exact and self._pinned(keys) is not None else np.minimum.accumulate(found, axis=0)

    def _up_to(self, keys: tuple[int, ...], some: list[int], last: int, limit: float) -> Front:
        """Choices of a set on `some[last]` equal devices or fewer, without those that alone take `limit` seconds.

        A bound that has fallen since leaves choices in that are too slow, which does not matter.
        """
        at = (keys, some[last], len(some))
        if at not in self._known:
            found = self._exactly(keys, some[last])
            # sizes that promise most come first: a set that has all devices then bounds the others
            for size in sorted(some[:last], key=lambda size: self.alone(keys, size).sum()):
                reached = limit
                if len(keys) == len(self.keys) and len(found.values):
                    reached = min(limit, found.values[:, :STAGES].sum(axis=1).min())
                least = self.alone(keys, size)
                if least.sum() >= reached:
                    break
                if not (found.values[:, :STAGES] <= least).all(axis=1).any():  # else it has nothing better
                    found = found.or_(self._exactly(keys, size))
            self._known[at] = found
        return self._known[at]

    def _exactly(self, keys: tuple[int, ...], size: int) -> Front:
        """Choices on exactly `size` of a cluster's equal devices: they are the same wherever those are."""
        where = self.places(keys, size)
        return self.generating(keys, where[0]) if where else NOTHING

    def generating(self, keys: tuple[int, ...], mesh: Mesh) -> Front:
        """Choices on exactly this mesh, with the seconds of generation."""
        at = (keys, self._like(keys, mesh))
        self.check()
        if at not in self._ready:

            def seconds(generates: Generates, steps: int) -> float:
                call = self.problem.graph.call(generates.call)
                plan = CallPlan(mesh, generates.parallel)
                return self.problem.generation(call, plan, steps * self.problem.step).seconds

            self._ready[at] = self._front(keys, mesh).generating(seconds, self.problem.step)
        return self._ready[at]

    def check(self) -> None:
        """Errors: TimeUpError after the deadline, once there is a placement."""
        if self._found:
            self.deadline.check()

    def _front(self, keys: tuple[int, ...], mesh: Mesh) -> Front:
        """Choices of groups of these kinds together on exactly this mesh."""
        at = (keys, self._like(keys, mesh))
        if at not in self._fronts:
            capacity = min(self.problem.capacity[device] for device in mesh.devices)
            if len(keys) == 1:
                group = self.example[keys[0]]
                fits = self.problem.rules.allows_mesh(group, mesh)
                layouts = group_layouts(self.problem, group, mesh) if fits else ()
                self._fronts[at] = Front.of(layouts, mesh.size, capacity)
            else:
                self._fronts[at] = self._front(keys[:-1], mesh).with_peers(self._front(keys[-1:], mesh), capacity)
        return self._fronts[at]

    def _like(self, keys: tuple[int, ...], mesh: Mesh) -> tuple:
        """Equal for meshes on which groups of these kinds have the same choices."""
        shape = self.problem.shape(mesh)
        return shape if self._pinned(keys) is None else (shape, mesh.bits)

    def _pinned(self, keys: tuple[int, ...]) -> tuple[int, ...] | None:
        """The devices to which the first of these kinds that is pinned is."""
        pins = (self.problem.rules.devices(self.example[key]) for key in keys)
        return next((pinned for pinned in pins if pinned is not None), None)

    def places(self, keys: tuple[int, ...], size: int) -> list[Mesh]:
        """A mesh of each shape with `size` devices; for pinned groups their own."""
        pinned = self._pinned(keys)
        if (pinned, size) not in self._places:
            if pinned is not None:
                found = [Mesh(pinned)] if len(pinned) == size else []
            elif self.problem.homogeneous:
                found = [Mesh.of(0, size)] if size in self.usual else []
            else:
                fitting = (where for (where,) in packings(self.problem.cluster, [size]))
                found = list({self.problem.shape(mesh): mesh for mesh in fitting}.values())
            self._places[pinned, size] = found
        return self._places[pinned, size]

    def packed(self, sets: Sequence[tuple[str, ...]], allocated: Sequence[int]) -> Iterator[list[Mesh]]:
        """Meshes for sets of these sizes; one of several equivalent ways."""
        asked: list[int | Mesh] = []
        for names, size in zip(sets, allocated, strict=True):
            pins = {pinned for name in names if (pinned := self.problem.rules.devices(name)) is not None}
            if len(pins) > 1 or any(len(pinned) != size for pinned in pins):
                return
            asked.append(Mesh(pins.pop()) if pins else size)
        yield from packings(self.problem.cluster, asked)

    def mapped(
        self, seconds: float, sets: Sequence[tuple[str, ...]], where: list[Mesh], chosen: list[tuple[Front, int]]
    ) -> Mapped:
        """The placement in which each set takes its row of what it can choose."""
        layouts, meshes = dict[str, Layouts](), dict[tuple[str, ...], Mesh]()
        for names, mesh, (front, row) in zip(sets, where, chosen, strict=True):
            choice = front.choices[row]
            meshes[names] = Mesh(mesh.devices[: choice.size])
            layouts |= zip(names, choice.layouts, strict=True)
        at = {group: mesh for names, mesh in meshes.items() for group in names}
        plan = {call.name: CallPlan(at[call.group], layouts[call.group].of(call)) for call in self.problem.calls}
        return Mapped(meshes, seconds, plan, self.allocations, self.tried)


def overlap_map(problem: Problem, search: AutoMapping | None = None, start: Mapped | None = None) -> Mapped | None:
    """The placement of least `seconds` per iteration by its timeline, of those that are tried and of `start` (default:
    the best one by its stages). None when no placement keeps the constraints and fits into memory. `search` knows what
    it has found of the problem before."""
    search = search or AutoMapping(problem)
    if (mapped := start or search.best) is None:
        return None
    limit, best = problem.timeline(mapped.plan).per_iteration, None
    with suppress(TimeUpError):
        for sets in search.ways():
            search.check()
            for bound, where, fronts in _promising(search, sets, limit):
                if bound >= limit:
                    break
                for rows in product(*map(_rows, fronts)):
                    search.check()
                    chosen = list(zip(fronts, rows, strict=True))
                    if max(front.values[row, :STAGES].sum() for front, row in chosen) >= limit:
                        continue
                    search.tried += 1
                    found = search.mapped(0.0, sets, where, chosen)
                    seconds = problem.timeline(found.plan).per_iteration
                    if seconds < limit:
                        limit, best = seconds, (sets, where, chosen)
    return search.mapped(limit, *best) if best else replace(mapped, seconds=limit)


def _promising(
    search: AutoMapping, sets: Sequence[tuple[str, ...]], limit: float
) -> Iterator[tuple[float, list[Mesh], list[Front]]]:
    """Allocations that fit on the cluster and into memory, with what each set can choose there, and the seconds that
    the busiest set works at least, below `limit`; the least of these first."""
    some = search.some_sizes(len(sets))
    keys = [tuple(search.keys[name] for name in names) for names in sets]
    work = [np.array([search.alone(own, size).sum() for size in some]) for own in keys]
    # more devices than the best number are no reason to take longer
    best = [[int(own[: i + 1].argmin()) for i in range(len(some))] for own in work]
    least = [own[numbers].reshape(-1, 1) for own, numbers in zip(work, best, strict=True)]
    timed = 0
    for bound, allocation in search.bounded(least, some, limit):
        allocated = [some[numbers[i]] for numbers, i in zip(best, allocation, strict=True)]
        for where in islice(search.packed(sets, allocated), TIMED_PLACES):
            fronts = [search.generating(own, mesh) for own, mesh in zip(keys, where, strict=True)]
            if all(len(front.values) for front in fronts):
                yield bound, where, fronts
                timed += 1
            if timed == TIMED:
                return


def _rows(front: Front) -> list[int]:
    """The choices that take least in all, and in each stage."""
    seconds = front.values[:, :STAGES]
    return list(dict.fromkeys([int(seconds.sum(axis=1).argmin()), *(int(stage.argmin()) for stage in seconds.T)]))
