"""Bytes of a reallocation against its weight plan."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import plan
from hybridflow.planner.cost.reallocation_cost import Grid, LayoutChange, Volume, layer_spans, spans_of_stage, volume
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.mesh import CallPlan, meshes, strategies
from hybridflow.planner.describe.model_sizes import Sizes
from tests.example_plans import LLAMA_7B

SPEC, SIZE = ClusterSpec.of("a100:3x4"), Sizes.of(LLAMA_7B)
PLANS = [CallPlan(mesh, p) for mesh in meshes(SPEC) for p in strategies(LLAMA_7B, mesh.size, min(4, mesh.size))]


def planned_volume(exchange: LayoutChange, itemsize: int) -> Volume:
    """What an exchange moves, by its weight plan."""
    size, (source, target) = exchange.size, exchange.grids
    rows = math.lcm(source.t, target.t)
    tensors, weight = layer_spans(size, source.p, target.p)
    shapes = dict.fromkeys(tensors, (rows,))
    layouts = [
        _layout(shapes, tensors, grid, rows, size.layers).placed(at, len(exchange.nodes))
        for grid, at in ((source, exchange.source_at), (target, exchange.target_at))
    ]
    made = plan(*layouts, node_of=exchange.nodes.__getitem__)
    inside, between = defaultdict[tuple[str, int], float](float), defaultdict[tuple[str, int], float](float)
    messages = Counter[int]()
    for move in made.moves:
        if move.local:
            continue
        nbytes = weight[move.box.tensor] * move.box.numel / rows * itemsize
        here, there = exchange.nodes[move.source], exchange.nodes[move.destination]
        messages[move.destination] += 1
        if here == there:
            inside["out", move.source] += nbytes
            inside["in", move.destination] += nbytes
        else:
            between["out", here] += nbytes
            between["in", there] += nbytes
    return Volume(
        max(inside.values(), default=0.0), max(between.values(), default=0.0), max(messages.values(), default=0)
    )


def _layout(
    shapes: dict[str, tuple[int]], spans: dict[str, tuple[int, int]], grid: Grid, rows: int, layers: int
) -> Layout:
    share = rows // grid.t
    parts: dict[tuple[int, int], Sequence[Region]] = {
        (stage, t): [
            Region(Box(name, (t * share,), ((t + 1) * share,)), name, (0,))
            for name in spans_of_stage(spans, grid.p, stage, layers)
        ]
        for stage in range(grid.p)
        for t in range(grid.t)
    }

    def part(rank: int) -> tuple[int, int]:
        at = grid.coords(rank)
        return at.p, at.t

    return Layout(shapes, grid.size, lambda rank: parts[part(rank)], part)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PLANS), st.sampled_from(PLANS))
def test_volumes_are_those_of_the_weight_plan(source: CallPlan, target: CallPlan):
    """What the network carries is equal, and what a device gets is never more than the plan's busiest device moves: of
    a few large pieces the plan gives one rank to relay what in a real model many ranks share."""
    exchange = LayoutChange.of(SIZE, SPEC, source, target)
    planned, counted = planned_volume(exchange, 2), volume(exchange, 2)
    assert counted.messages == planned.messages
    assert counted.between <= planned.between * 1.001
    assert counted.between >= planned.between / 2
    assert counted.inside <= planned.inside * 1.001
    if not planned.between:
        assert counted.inside >= planned.inside / 2
