"""Overlap: auto-mapping by the timeline of an iteration instead of its stages. Pure.

A stage-wise cost lets every stage wait for the one before. Calls do not: each begins once what it reads is there and
its devices are free (paper, section 4.1: asynchronous dataflow execution). So an actor generates the next iteration's
responses while a critic that has devices of its own is still being trained.

For every way to colocate groups the allocations whose busiest set has least to do are timed, each set with the choices
that take least in all and in each stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

import numpy as np

from hybridflow.planner.auto_mapping import Mapped, Search
from hybridflow.planner.plans import Mesh
from hybridflow.planner.space import Problem
from hybridflow.planner.stages import STAGES, Front
from hybridflow.planner.timeline import Order

TIMED = 24
"""Allocations of each way to colocate that are timed."""
PLACES = 4
"""Ways to place an allocation on unlike devices that are timed."""


def overlap_map(problem: Problem, order: Order = "ready", search: Search | None = None) -> Mapped | None:
    """The placement of least `seconds` per iteration by its timeline, of those that are tried and the one that is best
    by its stages. None when no placement keeps the constraints and fits into memory. `search` knows what it has found
    of the problem before."""
    search = search or Search(problem)
    if (mapped := search.best()) is None:
        return None
    limit, best = problem.timeline(mapped.plan, order=order).per_iteration, None
    for sets in search.ways():
        for bound, where, fronts in _promising(search, sets, limit):
            if bound >= limit:
                break
            for rows in product(*map(_rows, fronts)):
                chosen = list(zip(fronts, rows, strict=True))
                if max(front.values[row, :STAGES].sum() for front, row in chosen) >= limit:
                    continue
                search.tried += 1
                found = search.mapped(0.0, sets, where, chosen)
                seconds = problem.timeline(found.plan, order=order).per_iteration
                if seconds < limit:
                    limit, best = seconds, (sets, where, chosen)
    return search.mapped(limit, *best) if best else replace(mapped, seconds=limit)


def _promising(
    search: Search, sets: Sequence[tuple[str, ...]], limit: float
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
        for where in islice(search.packed(sets, allocated), PLACES):
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
