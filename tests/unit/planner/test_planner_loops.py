"""Which loop: the graphs of the four, their table, and the staleness that a stream needs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import hybridflow as hf
from hybridflow.cluster.session import Session
from hybridflow.errors import ConfigError
from hybridflow.placement import LoopPrice, Placement, loop_table
from hybridflow.planner import Apart, Cap, OneLayout, Workload, plan, plan_elastic, simulate_stream
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Graph
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Lengths
from hybridflow.planner.loops import as_loop, generating_calls, needed_staleness, price_loops
from tests.example_plans import SMALL, grpo_of, ppo_of
from tests.unit.planner.test_planner_streams import GENERATE, UPDATE, drawn, graph_of, problem_of, run_of

WORK = Workload(rows=64, responses_per_prompt=4, prompt=64, response=(100, 400), minibatches=2)
NAMES = ["colocated", "split", "streamed", "elastic"]


def loops_of(graph: Graph, cluster: str = "a100:1x2", work: Workload = WORK, constraints=(), **how):
    placed = plan(graph, cluster, work, constraints, budget_s=3, **how)
    assert placed.loops is not None
    return placed, {one.name: one for one in placed.loops()}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("bound", [1, 3])
def test_a_loop_of_a_graph_is_that_of_the_driver_that_is_written_so(bound: int, whole: bool):
    """By the trace of that driver."""
    for other in (0, 1, 4):
        assert as_loop(graph_of(other), "rollout", bound, not whole) == graph_of(bound, whole)
    assert as_loop(graph_of(bound, whole), "rollout") == graph_of(0)


@pytest.mark.parametrize("graph", [grpo_of(SMALL), ppo_of(SMALL, SMALL), ppo_of(SMALL, SMALL, log_probs=False)])
def test_the_way_from_a_loop_to_another_and_back(graph: Graph):
    away = as_loop(graph, "rollout", 2, continuous=True)
    calls, trained = generating_calls(away)
    assert (calls[0].name, trained) == ("rollout.generate_sequences", "actor")
    assert away.models["rollout"] == graph.models["actor"]
    assert "rollout" not in away.trained
    steps = [edge for edge in away.into(calls[0].name) if edge.kind == "parameters"]
    assert [(edge.source, edge.distance) for edge in steps] == [("actor.update_actor", 3)]
    assert as_loop(away) == graph


def test_the_table_has_what_each_loop_is_planned_to_take():
    graph = grpo_of(SMALL)
    placed, found = loops_of(graph, staleness=3)
    assert list(found) == NAMES
    assert found["colocated"].seconds == placed.seconds
    assert [one.staleness for one in found.values()] == [0, 1, 3, 0]
    for name, bound, continuous, rule in (
        ("split", 1, False, Apart("rollout", "actor")),
        ("streamed", 3, True, OneLayout("rollout")),
    ):
        alone = plan(as_loop(graph, "rollout", bound, continuous), "a100:1x2", WORK, [rule], budget_s=3)
        assert found[name].seconds == pytest.approx(alone.seconds, rel=0.03)
    moving = plan_elastic(graph, ClusterSpec.of("a100:1x2"), WORK, minibatches=2, iterations=1)
    assert found["elastic"].seconds == moving.elastic
    for one in found.values():
        assert one.tokens_per_second == pytest.approx(WORK.rows * WORK.tokens / one.seconds)
        assert " on " in one.devices
    lines = loop_table(list(found.values())).splitlines()
    assert len(lines) == 2 + len(NAMES) + 1
    assert lines[-1] == f"fastest: {min(found.values(), key=lambda one: one.seconds).name}"


def test_a_group_may_have_the_name_that_generation_would_get():
    """The reference is called rollout: its calls stay its own in all loops."""
    graph = grpo_of(SMALL, replace(SMALL, layers=3 * SMALL.layers))
    names = {call.name: call.name.replace("reference.", "rollout.") for call in graph.calls}
    calls = [replace(call, name=names[call.name], group=names[call.name].partition(".")[0]) for call in graph.calls]
    edges = [replace(edge, source=names[edge.source], target=names[edge.target]) for edge in graph.edges]
    models = {name.replace("reference", "rollout"): model for name, model in graph.models.items()}
    _, found = loops_of(replace(graph, calls=tuple(calls), edges=tuple(edges), models=models))
    _, wanted = loops_of(graph)
    for name in ("split", "streamed"):
        assert found[name].seconds == pytest.approx(wanted[name].seconds, rel=1e-5), found[name]


def test_the_loop_of_a_stream_is_its_own_row():
    placed, found = loops_of(graph_of(2), "a100:1x4", replace(WORK, rows=16))
    assert found["streamed"].seconds == placed.seconds
    assert found["streamed"].staleness == 2
    assert found["colocated"].seconds > 0


def test_constraints_hold_in_every_loop_that_has_their_groups():
    _, found = loops_of(grpo_of(SMALL), "a100:1x4", constraints=[Cap("reference", 1), Cap("actor", 2)])
    for name in ("colocated", "split", "streamed"):
        parts = [part.rpartition(" on ") for part in found[name].devices.split("; ")]
        assert not any("actor" in groups and where == "0-3" for groups, _, where in parts), found[name]


def test_why_a_loop_cannot_be():
    graph = grpo_of(SMALL)
    _, found = loops_of(graph, "a100:1x1", staleness=0)
    assert "Apart(rollout, actor)" in found["split"].against
    assert found["streamed"] == LoopPrice("streamed", against="the bound on staleness is 0")
    assert "need more than the 1 devices" in found["elastic"].against
    assert found["colocated"].seconds > 0
    table = loop_table(list(found.values()))
    assert "streamed   -        -         0          not possible: the bound on staleness is 0" in table
    assert "fastest: colocated" in table
    frozen = replace(graph, calls=graph.calls[1:4], edges=(), trained=frozenset())
    reasons = {one.against for one in price_loops(Costs(ClusterSpec.of("a100:1x1"), frozen, WORK), plan, None)}
    assert reasons == {"no group generates with weights that the loop trains; one can."}
    with pytest.raises(ConfigError, match="staleness=-1: give a whole number"):
        plan(graph, "a100:1x1", WORK, staleness=-1)


@pytest.mark.parametrize(("rows", "ratio", "train"), list(itertools.product((64, 512), (2.0, 12.0), (2, 4))))
def test_loops_on_devices_of_each_side_are_priced_as_they_are_simulated(rows: int, ratio: float, train: int):
    """Synchronous, split and streamed, event by event under the admission of streams: within 15 %, in the same order
    where they differ by more than that."""
    lengths = drawn(rows, ratio)
    base = problem_of(0, rows, Lengths.of(lengths))
    plan = {
        GENERATE: CallPlan(Mesh.of(train, 8 - train), Parallel(d=8 - train)),
        UPDATE: CallPlan(Mesh.of(0, train), Parallel(t=train)),
    }
    priced, simulated = dict[str, float](), dict[str, float]()
    for name, bound, whole in (
        ("synchronous", 0, True),
        ("split", 1, True),
        ("streamed", 1, False),
        ("ahead", 3, False),
    ):
        problem = Costs(base.cluster, as_loop(base.graph, "rollout", bound, not whole), base.workload)
        run = replace(run_of(problem, plan, lengths, bound), whole_batches=whole and bound > 0)
        priced[name] = problem.timeline(plan).per_iteration
        simulated[name] = rows / simulate_stream(run).rows_per_second
    assert priced == pytest.approx(simulated, rel=0.15)
    for first, second in itertools.combinations(priced, 2):
        if simulated[first] > 1.15 * simulated[second]:
            assert priced[first] > priced[second], (first, second)


def test_a_stream_of_two_groups_keeps_its_bound_and_has_no_other_loop():
    graph = graph_of(3)
    call = graph.call(GENERATE)
    other = replace(call, name="second.generate_sequences", group="second")
    edges = [replace(edge, target=other.name) for edge in graph.into(GENERATE)]
    models = {**graph.models, "second": graph.models["rollout"]}
    both = replace(graph, calls=(call, other, *graph.calls[1:]), edges=(*graph.edges, *edges), models=models)
    placed, found = loops_of(both, "a100:1x4", replace(WORK, rows=16), per_call=False)
    assert placed.staleness == 3
    said = "the groups rollout, second generate with weights that the loop trains; one can."
    assert {one.against for one in found.values()} == {said}


@pytest.mark.parametrize("max_staleness", [0, 1, 4, 8])
def test_the_least_staleness_that_is_as_fast(max_staleness: int):
    """By timelines of the same placement with every bound."""
    work = (300, 2048)
    problem = problem_of(max_staleness, 64, work)
    split = {GENERATE: CallPlan(Mesh.of(4, 4), Parallel(d=4)), UPDATE: CallPlan(Mesh.of(0, 4), Parallel(t=4))}
    needed = needed_staleness(problem, split)
    if not max_staleness:
        assert needed is None
        return
    seconds = {k: problem_of(k, 64, work).timeline(split).per_iteration for k in range(1, max_staleness + 1)}
    good = [k for k, took in seconds.items() if took <= seconds[max_staleness] * (1 + 1e-9)]
    assert needed == min(good)


def test_a_stream_takes_the_bound_of_its_placement(tmp_path):
    placed = plan(graph_of(4), "a100:1x4", replace(WORK, rows=16), budget_s=2)
    assert placed.staleness is not None
    assert 1 <= placed.staleness <= 4
    placed.save(tmp_path / "plan.yaml")
    assert Placement.load(tmp_path / "plan.yaml").staleness == placed.staleness
    loader = hf.PromptLoader([{"prompt": "a"}], batch_size=1)
    with Session.assigning(replace(placed, staleness=2)):
        bounds = [hf.stream(loader, lambda b: b, rows=1, max_staleness=k).options.max_staleness for k in (0, 1, 2, 5)]
    assert bounds == [0, 1, 2, 2]
    assert hf.stream(loader, lambda b: b, rows=1, max_staleness=5).options.max_staleness == 5
