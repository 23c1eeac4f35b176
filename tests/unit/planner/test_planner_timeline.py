"""Timelines of execution plans against published ones, and their laws."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import plan as weight_plan
from hybridflow.errors import ConfigError, PlacementError
from hybridflow.planner.cost.reallocation_cost import Grid, LayoutChange, Volume, layer_spans, spans_of_stage, volume
from hybridflow.planner.cost.timeline import busiest, simulate
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Graph, moves
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, Parallel, meshes, strategies
from hybridflow.planner.describe.model_sizes import Sizes
from tests.example_plans import LLAMA_7B, SMALL, grpo_of, ppo_of

SIX = ppo_of(LLAMA_7B, LLAMA_7B, log_probs=False)
NAMES = (
    "actor.generate_sequences",
    "reward.compute_reward",
    "reference.compute_ref_log_prob",
    "critic.compute_values",
    "critic.update_critic",
    "actor.update_actor",
)


def on(start: int, size: int) -> CallPlan:
    return CallPlan(Mesh.of(start, size), Parallel(d=size))


@pytest.mark.parametrize("seconds", [(185.1, 5.6, 35.6, 5.6, 20.8, 108.0), (241.8, 12.6, 63.5, 12.5, 35.7, 163.4)])
def test_calls_on_the_same_devices_take_turns(seconds: tuple[float, ...]):
    """The two published plans of 70B + 7B on 128 devices: 360.7 s and 529.5 s."""
    plan = dict.fromkeys(NAMES, on(0, 128))
    found = simulate(SIX, plan, dict(zip(NAMES, seconds, strict=True)))
    assert found.per_iteration == pytest.approx(sum(seconds))
    assert found.seconds == pytest.approx(3 * sum(seconds))


@pytest.mark.parametrize("order", [(1, 3, 2), (3, 1, 2)])
def test_disjoint_meshes_overlap(order: tuple[int, ...]):
    """A published plan of 7B + 7B on 16 devices: 57.1 s, if no device waits for a call that comes before."""
    both, first, second = on(0, 16), on(0, 8), on(8, 8)
    plan = dict(zip(NAMES, (both, first, second, both, second, first), strict=True))
    seconds = dict(zip(NAMES, (16.3, 6.0, 8.0, 4.7, 28.1, 26.6), strict=True))
    calls = SIX.calls
    graph = replace(SIX, calls=(calls[0], *(calls[i] for i in order), *calls[4:]))
    found = simulate(graph, plan, seconds)
    assert found.per_iteration == pytest.approx(57.1)
    assert simulate(graph, plan, seconds, iterations=1).seconds == pytest.approx(57.1)


def test_hosts_keep_the_order_of_the_program():
    """Values before the reward, on both nodes, keep node 1 waiting for the reference on node 2."""
    both, first, second = on(0, 16), on(0, 8), on(8, 8)
    plan = dict(zip(NAMES, (both, first, second, both, second, first), strict=True))
    seconds = dict(zip(NAMES, (16.3, 6.0, 8.0, 4.7, 28.1, 26.6), strict=True))
    found = simulate(SIX, plan, seconds)
    assert found.per_iteration == pytest.approx(16.3 + 8.0 + 4.7 + 6.0 + 28.1)


def test_an_update_overlaps_the_next_iteration():
    """GRPO's reference on a device of its own can work while the actor steps; iterations follow each other by what the
    actor does."""
    graph = grpo_of(SMALL)
    plan = {
        call.name: on(1 if call.group == "reference" else 0, 1) for call in graph.calls if call.group != "hybridflow"
    }
    names = [call.name for call in graph.calls]
    seconds = dict.fromkeys(names, 0.0) | {names[0]: 5.0, "actor.compute_log_prob": 1.0, "actor.update_actor": 4.0}
    seconds["reference.compute_ref_log_prob"] = 1.0
    assert simulate(graph, plan, seconds).per_iteration == pytest.approx(10.0)
    seconds["reference.compute_ref_log_prob"] = 3.0  # longer than the log-probabilities beside it
    assert simulate(graph, plan, seconds).per_iteration == pytest.approx(12.0)


def test_weights_are_moved_before_a_call_in_another_layout():
    graph, plan = SIX, dict.fromkeys(NAMES, on(0, 8))
    plan[NAMES[0]] = CallPlan(Mesh.of(0, 8), Parallel(t=2, d=4))
    asked = []

    def reallocation(group: str, source: CallPlan, target: CallPlan) -> float:
        asked.append((group, source, target))
        return 2.5

    found = simulate(graph, plan, dict.fromkeys(NAMES, 1.0), reallocation=reallocation)
    assert set(asked) == {("actor", plan[NAMES[5]], plan[NAMES[0]])}
    assert found.per_iteration == pytest.approx(6 + 2.5)
    moved = [span for span in found.spans if span.moves]
    assert [(span.moves, span.call, span.seconds) for span in moved] == [("actor", NAMES[0], 2.5)] * 3


def test_which_calls_weights_come_from():
    assert {(m.source, m.target, m.distance) for m in moves(ppo_of(SMALL, SMALL)) if m.group == "actor"} == {
        ("actor.update_actor", "actor.generate_sequences", 1),
        ("actor.update_actor", "actor.compute_log_prob", 1),
    }


@st.composite
def timed(draw) -> tuple[Graph, ExecutionPlan, dict[str, float]]:
    graph = draw(st.sampled_from([SIX, grpo_of(SMALL), ppo_of(SMALL, SMALL)]))
    plan, seconds = {}, {}
    for call in graph.calls:
        seconds[call.name] = draw(st.integers(0, 20)) / 2
        if call.group in graph.groups:
            size = 2 ** draw(st.integers(0, 3))
            plan[call.name] = on(size * draw(st.integers(0, 8 // size - 1)), size)
    return graph, plan, seconds


def _no_time(group: str, source: CallPlan, target: CallPlan) -> float:
    return 0.0


@settings(max_examples=60, deadline=None)
@given(timed(), st.integers(1, 4))
def test_laws_of_timelines(given_, iterations):
    """Calls wait for what they read and for their devices, and an iteration takes at least what its devices work."""
    graph, plan, seconds = given_
    found = simulate(graph, plan, seconds, iterations=iterations)
    at = {(span.call, span.iteration): span for span in found.spans}
    assert len(at) == iterations * len(graph.calls)
    for edge in graph.edges:
        for i in range(edge.distance, iterations):
            assert at[edge.target, i].start >= at[edge.source, i - edge.distance].stop
    for i in range(2, iterations):
        assert min(s.start for s in found.of(i)) >= max(s.stop for s in found.of(i - 2))
    spans = [span for span in found.spans if span.mesh and span.seconds]
    for a in spans:
        assert a.seconds == pytest.approx(seconds[a.call])
        for b in spans:
            if a is not b and a.mesh.overlaps(b.mesh):
                assert a.stop <= b.start or b.stop <= a.start
    work = [sum(seconds[n] for n, at in plan.items() if d in at.mesh.devices) for d in range(8)]
    assert found.per_iteration >= max(work) - 1e-9
    assert found.seconds <= iterations * sum(seconds.values()) + 1e-9
    still = simulate(graph, plan, seconds, iterations=iterations, reallocation=_no_time)
    assert still.spans == found.spans, "what moves in no time keeps nobody waiting"
    names = list(plan)
    assert busiest([seconds[n] for n in names], [plan[n].mesh.bits for n in names]) == pytest.approx(max(work))


def test_bad_plans_are_refused():
    with pytest.raises(PlacementError, match="2\\*2\\*1 = 4 devices do not fill a mesh of 8"):
        CallPlan(Mesh.of(0, 8), Parallel(2, 2))
    with pytest.raises(PlacementError, match="ascending"):
        Mesh((1, 0))
    with pytest.raises(ConfigError, match="nothing of critic"):
        simulate(SIX, dict.fromkeys(NAMES[:4], on(0, 8)), dict.fromkeys(NAMES, 1.0))
    with pytest.raises(ConfigError, match="no entry for 'reference"):
        simulate(SIX, dict.fromkeys(NAMES, on(0, 8)), {NAMES[0]: 1.0})


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
    made = weight_plan(*layouts, node_of=exchange.nodes.__getitem__)
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
