"""Similarity-oriented search for an actor's pair of layouts, of training and of generation (PUZZLE, ATC '24). Pure.

The more of its generation shard a device holds from training, the cheaper the switch between the two. Pairs are looked
at in the order of what they cost if weights that are not held come over a link; the switch of a pair, which needs a
weight plan, is priced only where the two layouts alone do not already cost more than the best pair. The result is that
of the full grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.errors import PlacementError
from hybridflow.planner.plans import CallPlan, Mesh, Parallel
from hybridflow.planner.space import Problem


@dataclass(frozen=True)
class Pair:
    """Layouts of an actor and the seconds of its calls in an iteration, with the switch between the two.

    `priced` switches were priced of the `grid` that there is.
    """

    train: Parallel
    generate: Parallel
    seconds: float
    similarity: float
    priced: int
    grid: int


def similarity(train: Parallel, generate: Parallel) -> float:
    """Mean share of a device's generation shard that it holds from training: 1 where nothing has to move.

    Layers and tensors count as if they could be cut anywhere. Generation groups are those of `RankGrid.generation`.
    """
    grid = train.grid
    rule = "hybridflow" if train.p % generate.p == 0 and train.t % generate.t == 0 else "general"
    generation, held = grid.generation(generate.p, generate.t, rule), 0.0
    for rank in range(grid.size):
        here, there = grid.coords(rank), generation.coords(rank)
        held += _common(here.p, train.p, there.p, generate.p) * _common(here.t, train.t, there.t, generate.t)
    return held / grid.size


def best_pair(problem: Problem, group: str, mesh: Mesh, *, full: bool = False) -> Pair:
    """The pair of layouts with which all calls of `group` on `mesh` take least time.

    `full` prices every pair of the grid. Errors: PlacementError when no pair fits into memory.
    """
    train, generate = _layouts(problem, group, mesh, "training"), _layouts(problem, group, mesh, "generation")
    bandwidth = min(problem.cluster.nodes[problem.cluster.node_of(d)].bandwidth for d in mesh.devices)
    capacity = min(problem.capacity[d] for d in mesh.devices)
    pairs = []
    for a in train:
        for b in generate:
            more = b.copy if a.parallel != b.parallel else 0.0
            if a.static + max(a.active, b.active + more) <= capacity:
                alike = 1.0 if a.parallel == b.parallel else similarity(a.parallel, b.parallel)
                pairs.append((a.seconds + b.seconds + (1 - alike) * b.copy / bandwidth, alike, a, b))
    found: Pair | None = None
    priced = 0
    for _, alike, a, b in sorted(pairs, key=lambda pair: pair[:2]):
        alone = a.seconds + b.seconds
        if found is not None and alone >= found.seconds and not full:
            continue
        priced += 1
        moved = problem.reallocation(group, CallPlan(mesh, a.parallel), CallPlan(mesh, b.parallel))
        if found is None or alone + b.times * moved < found.seconds:
            found = Pair(a.parallel, b.parallel, alone + b.times * moved, alike, priced, len(pairs))
    if found is None:
        raise PlacementError(f"{group} fits in no layout on {mesh.size} devices. Use more devices or a smaller batch.")
    return Pair(found.train, found.generate, found.seconds, found.similarity, priced, len(pairs))


@dataclass(frozen=True)
class _Layout:
    """All calls of one side in one layout; `times` they are."""

    parallel: Parallel
    seconds: float
    static: float
    active: float
    copy: float
    times: int


def _layouts(problem: Problem, group: str, mesh: Mesh, side: str) -> Sequence[_Layout]:
    calls = [c for c in problem.graph.of_group(group) if (c.kind == "generation") == (side == "generation")]
    if not calls:
        raise PlacementError(f"{group} has no {side} call: a pair of layouts is for a group that trains and generates.")
    found = []
    for parallel in problem.strategies(group, mesh, side == "generation"):
        options = [problem.option(call, mesh, parallel) for call in calls]
        allowed = problem.rules.allows(group, mesh, parallel, side == "generation")
        if allowed and (known := [option for option in options if option is not None]) == options:
            seconds, active = sum(o.seconds for o in known), max(o.active for o in known)
            found.append(_Layout(parallel, seconds, known[0].static, active, known[0].copy, len(known)))
    return found


def _common(index: int, parts: int, other_index: int, other_parts: int) -> float:
    """Share of the other's part [i/n, (i+1)/n) that lies within one's own."""
    low = max(index / parts, other_index / other_parts)
    high = min((index + 1) / parts, (other_index + 1) / other_parts)
    return max(0.0, high - low) * other_parts
