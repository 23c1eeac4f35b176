"""Auto-mapping: the best placement of models by stage-wise cost (HybridFlow, algorithms 1 and 2). Pure.

The result is that of trying all sets of colocated groups, all shares of the devices and all layouts. Bounds rule out
most: an allocation costs at least the sum over stages of the largest least seconds of its sets. Weights that one group
gives to another, and contention, are in timelines only.

A stage-wise cost lets every stage wait for the one before. Calls do not (paper, section 4.1): an actor generates for
the next iteration while a critic on other devices is still trained. So `overlap_map` times the allocations whose
busiest set has least to do."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product

import numpy as np

from hybridflow.planner.cost.costs import Costs, Remembered
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, packings, powers, sizes
from hybridflow.planner.search.deadline import NEVER, Deadline, TimeUpError
from hybridflow.planner.search.stages import STAGES, Floats, Front, Layouts, cheapest, partitions, stage_cost

GRID = 4_000_000
"""Allocations looked at for one way to colocate; with more, sets get fewer different sizes."""
TIMED, TIMED_PLACES = 24, 4
"""Allocations of each way to colocate that are timed, and places for each of them."""
NOTHING = Front(np.zeros((0, STAGES + 2)), [])
Sets = Sequence[tuple[str, ...]]
Kinds = tuple[int, ...]
"""Numbers of the kinds of a set's groups: groups of one kind cost the same wherever they are."""
Numbers = tuple[int, ...]
"""Of the size of each set, among those that are looked at."""
_Placed = tuple[float, Sets, list[Mesh], list[tuple[Front, int]]]


@dataclass(frozen=True)
class Mapped:
    """The best placement, as an execution plan and as the meshes of the sets of colocated groups."""

    sets: Mapping[tuple[str, ...], Mesh]
    seconds: float
    """Of an iteration, by stage-wise cost."""
    plan: ExecutionPlan
    allocations: int
    """Those that were bounded; `tried` of them were timed."""
    tried: int


def auto_map(costs: Costs) -> Mapped | None:
    """HybridFlow's algorithm 1. None when no placement keeps the constraints and fits into memory."""
    return AutoMapping(costs).best


class AutoMapping:
    """The choices of every set of groups on every number of devices, and the best way to share devices between sets.

    After `deadline` searches return the best placement so far, once they have one. Those of `limit` seconds or more are
    not looked for."""

    def __init__(self, costs: Costs, deadline: Deadline = NEVER, limit: float = math.inf) -> None:
        self.costs, self.deadline, self.limit, self._found = costs, deadline, limit, limit < math.inf
        graph, cluster, rules = costs.graph, costs.cluster, costs.rules
        self.pinned = {size for pin in rules.pins.values() for size in pin.sizes}
        self.usual = frozenset(sizes(cluster)) | {size for size in self.pinned if size % cluster.node.count == 0}
        self.sizes = sorted(self.usual | self.pinned)
        known: dict[tuple, int] = {}
        self.kinds: dict[str, int] = {}
        for group in graph.groups:
            calls = tuple((c.kind, c.rows, c.minibatches, c.epochs) for c in graph.of_group(group))
            own = graph.models[group], graph.strategies.get(group), group in graph.trained, calls
            kind = (*own, group in graph.averaged, rules.pins.get(group), rules.caps.get(group), group in costs.away)
            self.kinds[group] = known.setdefault(kind, len(known))
        self.example = {kind: group for group, kind in self.kinds.items()}
        self.allocations = self.tried = 0
        self._known = Remembered()

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
        ways, limit = self.ways(), self.limit
        spaces = [(sets, self.some_sizes(len(sets))) for sets in ways]
        if ways and self.deadline.at < math.inf:  # few sizes of the first way come before all others
            few = {self.sizes[-1]} if len(ways[0]) == 1 else {*powers(self.sizes[-1]), self.sizes[-1], *self.pinned}
            spaces.insert(0, (ways[0], [size for size in self.sizes if size in few]))
        with suppress(TimeUpError):
            for sets, some in spaces:
                self.check()
                for found in self._better(sets, some, limit):
                    limit, self._found = found[0], True
                    yield found

    def _better(self, sets: Sets, some: list[int], limit: float) -> Iterator[_Placed]:
        """Placements of these sets that take less and less time, below `limit`."""
        kinds = self.kinds_of(sets)
        least = []
        for own in kinds:  # with each size or a smaller one; a pinned set has its own size only
            alone = np.array([self.alone(own, size) for size in some])
            exact = own != kinds[-1] and self._pinned(own) is not None
            least.append(alone if exact else np.minimum.accumulate(alone, axis=0))
        for bound, allocation in self.bounded(least, some, limit):
            if bound >= limit:
                break
            if (found := self._choices(sets, some, allocation, limit)) is None:
                continue
            fronts, where = found
            self.tried += 1
            seconds, rows = cheapest(fronts)
            if seconds < limit:
                limit = seconds
                yield seconds, sets, where, list(zip(fronts, rows, strict=True))

    def ways(self) -> list[list[tuple[str, ...]]]:
        """To colocate groups; few sets first: they are quick to look at, and their best bounds the others."""
        ways = [sets for sets in partitions(self.costs.graph.groups) if self.costs.rules.allows_sets(sets)]
        # what generates comes last in a set: only then is there more than one kind of choice to tell apart
        last = {group: (group in self.costs.graph.generating, kind) for group, kind in self.kinds.items()}
        return [[tuple(sorted(names, key=last.__getitem__)) for names in sets] for sets in sorted(ways, key=len)]

    def kinds_of(self, sets: Sets) -> list[Kinds]:
        return [tuple(self.kinds[name] for name in names) for names in sets]

    def _choices(
        self, sets: Sets, some: list[int], allocation: Sequence[int], limit: float
    ) -> tuple[list[Front], list[Mesh]] | None:
        """The choices and meshes of each set with these numbers of devices; None where they take `limit` or more.

        The last set gets all devices that are left, or fewer where these are not neighbours."""
        kinds = self.kinds_of(sets)
        *others, last = allocation
        for fewer in range(last, -1, -1):
            numbers = (*others, fewer)
            fronts = [self._up_to(own, some, i, limit) for own, i in zip(kinds, numbers, strict=True)]
            if stage_cost([front.least.tolist() for front in fronts]) >= limit:
                return None  # with still fewer devices it takes no less
            if (where := next(self.packed(sets, [some[i] for i in numbers]), None)) is not None:
                return fronts, where
        return None

    def bounded(self, least: Sequence[Floats], some: list[int], limit: float) -> Iterator[tuple[float, Numbers]]:
        """Allocations, by number of the size for each set, and what each costs at least; the lowest bounds first.

        `least` [sizes, stages] of each set are the least seconds of stages with this number of devices or fewer."""
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
        left = np.searchsorted(numbers, self.costs.cluster.size - used, side="right") - 1
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

    def alone(self, kinds: Kinds, size: int) -> Floats:
        """[stages] Least seconds of a set if each of its groups had the devices for itself."""

        def least() -> Floats:
            if (mesh := self.place(kinds, size)) is None:
                return np.full(STAGES, np.inf)
            return np.sum([self.generating((kind,), mesh).least for kind in kinds], axis=0)

        return self._known.once(("alone", kinds, size), least)

    def _up_to(self, kinds: Kinds, some: list[int], last: int, limit: float) -> Front:
        """Choices of a set on `some[last]` equal devices or fewer, without those that alone take `limit` seconds.

        A bound that has fallen since leaves choices in that are too slow, which does not matter."""

        def choices() -> Front:
            found = NOTHING
            for size in some[last], *sorted(some[:last], key=lambda size: self.alone(kinds, size).sum()):
                least, reached = self.alone(kinds, size), limit
                if size != some[last]:  # those that promise most come first: a set that has all devices bounds others
                    if len(kinds) == len(self.kinds) and len(found.values):
                        reached = min(limit, found.values[:, :STAGES].sum(axis=1).min())
                    if least.sum() >= reached:
                        break
                    if (found.values[:, :STAGES] <= least).all(axis=1).any():  # it has nothing better
                        continue
                if (mesh := self.place(kinds, size)) is not None:
                    found = found.or_(self.generating(kinds, mesh))
            return found

        return self._known.once(("up to", kinds, some[last], len(some)), choices)

    def generating(self, kinds: Kinds, mesh: Mesh) -> Front:
        """Choices on exactly this mesh, with the seconds of generation."""
        self.check()
        key = "generating", kinds, self._like(kinds, mesh)
        return self._known.once(key, lambda: self._front(kinds, mesh).generating(self.costs, mesh))

    def check(self) -> None:
        """Errors: TimeUpError after the deadline, once there is a placement."""
        if self._found:
            self.deadline.check()

    def _front(self, kinds: Kinds, mesh: Mesh) -> Front:
        """Choices of groups of these kinds together on exactly this mesh."""

        def front() -> Front:
            if len(kinds) == 1:
                return Front.of(self.costs, self.example[kinds[0]], mesh, self.costs.capacity)
            return self._front(kinds[:-1], mesh).with_peers(self._front(kinds[-1:], mesh), self.costs.capacity)

        return self._known.once(("front", kinds, self._like(kinds, mesh)), front)

    def _like(self, kinds: Kinds, mesh: Mesh) -> tuple:
        """Equal for meshes on which groups of these kinds have the same choices."""
        shape = self.costs.shape(mesh)
        return shape if self._pinned(kinds) is None else (shape, mesh.bits)

    def _pinned(self, kinds: Kinds) -> tuple[int, ...] | None:
        """The devices to which the first of these kinds that is pinned is."""
        pins = (self.costs.rules.devices(self.example[kind]) for kind in kinds)
        return next((pinned for pinned in pins if pinned is not None), None)

    def place(self, kinds: Kinds, size: int) -> Mesh | None:
        """Some `size` devices, on which choices are as on any others; for pinned groups their own."""
        if (pinned := self._pinned(kinds)) is not None:
            return Mesh(pinned) if len(pinned) == size else None
        return Mesh.of(0, size) if size in self.usual else None

    def packed(self, sets: Sets, allocated: Sequence[int]) -> Iterator[list[Mesh]]:
        """Meshes for sets of these sizes; one of several equivalent ways."""
        asked: list[int | Mesh] = []
        for names, size in zip(sets, allocated, strict=True):
            pins = {pinned for name in names if (pinned := self.costs.rules.devices(name)) is not None}
            if len(pins) > 1 or any(len(pinned) != size for pinned in pins):
                return
            asked.append(Mesh(pins.pop()) if pins else size)
        yield from packings(self.costs.cluster, asked)

    def mapped(self, seconds: float, sets: Sets, where: list[Mesh], chosen: list[tuple[Front, int]]) -> Mapped:
        layouts, meshes = dict[str, Layouts](), dict[tuple[str, ...], Mesh]()
        for names, mesh, (front, row) in zip(sets, where, chosen, strict=True):
            choice = front.choices[row]
            meshes[names] = Mesh(mesh.devices[: choice.size])
            layouts |= zip(names, choice.layouts, strict=True)
        at = {group: mesh for names, mesh in meshes.items() for group in names}
        plan = {call.name: CallPlan(at[call.group], layouts[call.group].of(call)) for call in self.costs.calls}
        return Mapped(meshes, seconds, plan, self.allocations, self.tried)


def overlap_map(costs: Costs, search: AutoMapping | None = None, start: Mapped | None = None) -> Mapped | None:
    """The placement of least `seconds` per iteration by its timeline, of those that are tried and of `start` (default:
    the best one by its stages). None when no placement keeps the constraints and fits into memory. `search`: what was
    found before."""
    search = search or AutoMapping(costs)
    if (mapped := start or search.best) is None:
        return None
    limit, best = costs.timeline(mapped.plan).per_iteration, None
    with suppress(TimeUpError):
        for sets in search.ways():
            search.check()
            for bound, where, fronts in _promising(search, sets, limit):
                if bound >= limit:
                    break
                # of each set the choices that take least in all, and in each stage
                stages = [front.values[:, :STAGES] for front in fronts]
                rows = ([own.sum(axis=1).argmin(), *own.argmin(axis=0)] for own in stages)
                for chosen in product(*(dict.fromkeys(map(int, own)) for own in rows)):
                    search.check()
                    if max(own[row].sum() for own, row in zip(stages, chosen, strict=True)) >= limit:
                        continue
                    search.tried += 1
                    placed = (sets, where, list(zip(fronts, chosen, strict=True)))
                    seconds = costs.timeline(search.mapped(0.0, *placed).plan).per_iteration
                    if seconds < limit:
                        limit, best = seconds, placed
    return search.mapped(limit, *best) if best else replace(mapped, seconds=limit)


def _promising(search: AutoMapping, sets: Sets, limit: float) -> Iterator[tuple[float, list[Mesh], list[Front]]]:
    """Allocations that fit on the cluster and into memory, with what each set can choose there, and the seconds that
    the busiest set works at least, below `limit`; the least of these first."""
    some, kinds = search.some_sizes(len(sets)), search.kinds_of(sets)
    work = [np.array([search.alone(own, size).sum() for size in some]) for own in kinds]
    # more devices than the best number are no reason to take longer
    best = [[int(own[: i + 1].argmin()) for i in range(len(some))] for own in work]
    least = [own[numbers].reshape(-1, 1) for own, numbers in zip(work, best, strict=True)]
    timed = 0
    for bound, allocation in search.bounded(least, some, limit):
        allocated = [some[numbers[i]] for numbers, i in zip(best, allocation, strict=True)]
        for where in islice(search.packed(sets, allocated), TIMED_PLACES):
            fronts = [search.generating(own, mesh) for own, mesh in zip(kinds, where, strict=True)]
            if all(len(front.values) for front in fronts):
                yield bound, where, fronts
                timed += 1
            if timed == TIMED:
                return
