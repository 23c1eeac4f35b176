"""Similarity-oriented search for the layouts of training and of generation (PUZZLE, ATC '24). Pure.

All groups share all devices. The more of its generation shard a device holds from training, the cheaper the switch
between the two, so pairs of layouts are visited in the order of their cost if weights that a device lacks come over a
link. A switch needs a weight plan; it is priced only where the pair could still be the best without it. The result is
that of the full grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hybridflow.errors import PlacementError
from hybridflow.planner.describe.graph import Call
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, Parallel
from hybridflow.planner.search.problem import Problem
from hybridflow.planner.search.stages import STAGES, Floats, Front, Layouts, group_layouts


@dataclass(frozen=True)
class LayoutPair:
    """Layouts of a group, the seconds of an iteration in which it and its `peers` take turns, with the switches.

    `priced` switches were priced of the `grid` of pairs that fit.
    """

    train: Parallel
    generate: Parallel
    seconds: float
    similarity: float
    peers: tuple[Layouts, ...]
    priced: int
    grid: int


class _Side(NamedTuple):
    """All training and inference calls, or all generation calls, in one layout; seconds without generation."""

    parallel: Parallel
    seconds: float
    static: float
    active: float
    copy: float
    least: float  # seconds of generation with all memory for its KV cache


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


def similarity_map(problem: Problem) -> ExecutionPlan | None:
    """All groups on all devices: the one that generates in its best pair of layouts, others in those that are fastest
    beside it. None when constraints or memory forbid it.

    Errors: PlacementError unless exactly one group generates, and trains as well.
    """
    graph, mesh = problem.graph, Mesh.of(0, problem.cluster.size)
    both = [group for group in graph.groups if group in graph.generating and group in graph.trained]
    if len(both) != 1 or len(graph.generating) != 1:
        raise PlacementError(
            f"search='similarity' is for one group that trains and generates; {', '.join(sorted(graph.generating))} "
            f"generate{'s' * (len(graph.generating) == 1)}. Use search='auto'."
        )
    rules, (actor,) = problem.rules, both
    if not rules.allows_sets([graph.groups]) or not all(rules.allows_mesh(group, mesh) for group in graph.groups):
        return None
    peers, others = _alone(mesh), [group for group in graph.groups if group != actor]
    for group in others:
        own = Front.of(group_layouts(problem, group, mesh), mesh.size, min(problem.capacity))
        peers = peers.with_peers(own, min(problem.capacity))
    found = best_pair(problem, actor, mesh, peers=peers)
    if found is None:
        return None
    layouts = {actor: Layouts(found.train, found.generate), **dict(zip(others, found.peers, strict=True))}
    return {call.name: CallPlan(mesh, layouts[call.group].of(call)) for call in problem.calls}


def best_pair(
    problem: Problem, group: str, mesh: Mesh, *, peers: Front | None = None, full: bool = False
) -> LayoutPair | None:
    """The pair of layouts with which all calls of `group` and of its `peers` on `mesh` take least time; None where no
    pair fits into memory. `full` prices the switch of every pair."""
    beside = _alone(mesh) if peers is None else peers
    calls = problem.graph.of_group(group)
    generation = [call for call in calls if call.kind == "generation"]
    train, generate = (_sides(problem, [c for c in calls if (c in generation) == side], mesh) for side in (False, True))
    bandwidth = min(problem.cluster.nodes[node].bandwidth for node in problem.counts(mesh))
    pairs = []
    for a in train:
        for b in generate:
            rows = _fitting(problem, group, mesh, a, b, beside)
            if len(rows):
                alike = 1.0 if a.parallel == b.parallel else similarity(a.parallel, b.parallel)
                least = a.seconds + b.least + beside.values[rows, :STAGES].sum(axis=1).min()
                pairs.append((least + (1 - alike) * b.copy / bandwidth, alike, least, a, b, rows))
    best: LayoutPair | None = None
    priced = 0
    for _, alike, least, a, b, rows in sorted(pairs, key=lambda pair: pair[:2]):
        if best is not None and least >= best.seconds and not full:
            continue
        seconds, row = _fastest(problem, generation, mesh, a, b, beside, rows)
        if best is not None and seconds >= best.seconds and not full:
            continue
        priced += 1
        switch = problem.reallocation(group, CallPlan(mesh, a.parallel), CallPlan(mesh, b.parallel))
        seconds += len(generation) * switch
        if best is None or seconds < best.seconds:
            best = LayoutPair(a.parallel, b.parallel, seconds, alike, beside.layouts[row], 0, 0)
    return best and replace(best, priced=priced, grid=len(pairs))


def _alone(mesh: Mesh) -> Front:
    """No peers: nothing to choose, and nothing that takes time or memory."""
    return Front(np.zeros((1, STAGES + 2)), [()], [()], [mesh.size])


def _sides(problem: Problem, calls: Sequence[Call], mesh: Mesh) -> list[_Side]:
    generates, group = calls[0].kind == "generation", calls[0].group
    found = []
    for parallel in problem.strategies(group, mesh, generates):
        if not problem.rules.allows(group, mesh, parallel, generates):
            continue
        options = [option for call in calls if (option := problem.option(call, mesh, parallel)) is not None]
        if len(options) == len(calls):
            seconds, active = sum(o.seconds for o in options), max(o.active for o in options)
            took = (0.0, seconds) if generates else (seconds, 0.0)
            found.append(_Side(parallel, took[0], options[0].static, active, options[0].copy, took[1]))
    return found


def _fitting(problem: Problem, group: str, mesh: Mesh, a: _Side, b: _Side, beside: Front) -> np.ndarray:
    """The choices of the peers that fit beside a pair."""
    if group in problem.rules.one_layout and not CallPlan(mesh, b.parallel).within(CallPlan(mesh, a.parallel)):
        return np.zeros(0, dtype=np.intp)
    active = max(a.active, b.active + (b.copy if a.parallel != b.parallel else 0.0))
    used: Floats = a.static + beside.values[:, STAGES] + np.maximum(active, beside.values[:, STAGES + 1])
    return np.flatnonzero(used <= min(problem.capacity[device] for device in mesh.devices))


def _fastest(
    problem: Problem, generation: Sequence[Call], mesh: Mesh, a: _Side, b: _Side, beside: Front, rows: np.ndarray
) -> tuple[float, int]:
    """Seconds of a pair without its switches, and the choice of the peers for which they are least: peers that keep
    less leave generation more KV cache."""
    plan, found = CallPlan(mesh, b.parallel), []
    for row in rows.tolist():
        static = a.static + float(beside.values[row, STAGES])
        took = sum(problem.generation(call, plan, static) for call in generation)
        found.append((a.seconds + took + float(beside.values[row, :STAGES].sum()), row))
    return min(found)


def _common(index: int, parts: int, other_index: int, other_parts: int) -> float:
    """Share of the other's part [i/n, (i+1)/n) that lies within one's own."""
    low = max(index / parts, other_index / other_parts)
    high = min((index + 1) / parts, (other_index + 1) / other_parts)
    return max(0.0, high - low) * other_parts
