"""Timelines of execution plans against published ones, and their laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError, PlacementError
from hybridflow.planner.cost.timeline import busiest, simulate
from hybridflow.planner.describe.graph import Graph, moves
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, Parallel
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
