"""Symmetric plans: the heuristic one of an expert (ReaL's baseline), the fastest, and what is said against them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import PlacementError
from hybridflow.placement import Placement
from hybridflow.planner.cost.call_cost import cache_bytes
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import DEFAULT
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Apart, Cap, Pin
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search.all_devices import compared_with, heuristic, heuristic_map, symmetric_plans
from hybridflow.planner.search.planning import plan
from tests.example_plans import LLAMA_7B, LLAMA_34B, LLAMA_70B, SMALL, fits, grpo_of, ppo_of
from tests.unit.planner.test_planner_published import GRAPH, H100S, HEURISTIC, WORKLOAD

WORK = Workload(rows=1024, prompt=1024, response=1024, minibatches=8)


def test_the_heuristic_is_the_plan_of_reals_baseline():
    found = heuristic_map(Costs(H100S, GRAPH, WORKLOAD, margin=DEFAULT.error))
    assert found is not None
    sizes = {call.name: found[call.name].parallel.sizes for call in GRAPH.calls if call.name in found}
    assert set(sizes.values()) == {cut[:3] for cut in HEURISTIC}
    assert len(sizes) == len(HEURISTIC)


@given(
    st.sampled_from(["a100:1x8", "a100:2x8", "a100:4x4", "h100:3x8"]),
    st.sampled_from([LLAMA_7B, LLAMA_34B, SMALL]),
    st.sampled_from([LLAMA_7B, SMALL]),
    st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_the_heuristic_is_the_first_that_fits_and_the_symmetric_one_the_fastest(cluster, actor, critic, recompute):
    """Against all (p, t) by hand."""
    work = Workload(rows=256, prompt=512, response=512, recompute=recompute)
    costs = Costs(ClusterSpec.of(cluster), ppo_of(actor, critic), work, margin=DEFAULT.error)
    size, node = costs.cluster.size, costs.cluster.nodes[0].count
    plain, expert, fastest = compared_with(costs)
    every = symmetric_plans(costs)
    good, first = dict[tuple[int, int], float](), list[tuple[int, int, int]]()
    for t in (t for t in range(1, node + 1) if node % t == 0):
        for p in (p for p in range(1, size // t + 1) if size // t % p == 0):
            if any(m is not None and (p > m.layers or not m.divides(t)) for m in costs.graph.models.values()):  # type: ignore[union-attr]
                continue
            by_hand = {c.name: CallPlan(Mesh.of(0, size), Parallel(p, t, size // t // p)) for c in costs.calls}
            if fits(costs, by_hand):
                good[p, t] = costs.timeline(by_hand).per_iteration
            if (p == 1 or t == node) and any(x.plan == by_hand and x.fits(costs.margin) for x in every):
                first.append((waves(costs, by_hand), t, p))
    if good:
        assert fastest.seconds <= min(good.values()) * (1 + 1e-9)
    if first:
        assert (expert.tp, expert.pp) == min(first)[1:]
        assert expert.seconds == pytest.approx(good[expert.pp, expert.tp])
    if plain.seconds and expert.pp == 1:
        assert plain.tp <= expert.tp


def waves(costs: Costs, plan: ExecutionPlan) -> int:
    """Times that the rows of a replica, 256 for each stage at most, fill what is left for their keys and values."""
    (call,), work = (c for c in costs.calls if c.kind == "generation"), costs.workload
    at = plan[call.name]
    context = costs.context(call.group, at, call.kind)
    assert context is not None
    rows = min(-(-work.rows // at.parallel.d), 256 * at.parallel.p)
    room = costs.kv_budget(call.name, at, max(costs.kept(plan)))
    wanted = max(rows * work.under_way, min(rows, 8 * at.parallel.p) * work.longest)
    return math.ceil(wanted * cache_bytes(context) / max(room, 1.0))


def test_an_answer_says_how_much_faster_it_is(tmp_path: Path):
    """34B actor, 7B critic: in the text, the explanation, the fields and the saved file."""
    found = plan(ppo_of(LLAMA_34B, LLAMA_7B), "a100:4x8", WORK, per_call=False)
    assert found.heuristic is not None
    assert found.symmetric is not None
    assert found.faster == {
        "heuristic": found.heuristic.seconds / found.seconds - 1,
        "symmetric": found.symmetric.seconds / found.seconds - 1,
    }
    over, best = found.faster["heuristic"], found.faster["symmetric"]
    assert over is not None
    assert best is not None
    assert over >= best > 0
    said = (
        f"{over:.0%} faster than the heuristic (tp={found.heuristic.tp}, pp={found.heuristic.pp}), "
        f"{best:.0%} faster than the best symmetric plan (tp={found.symmetric.tp}, pp={found.symmetric.pp})."
    )
    assert said in repr(found)
    assert said in found.explain()
    found.save(tmp_path / "plan.yaml")
    loaded = Placement.load(tmp_path / "plan.yaml")
    assert (loaded.heuristic, loaded.symmetric, loaded.faster) == (found.heuristic, found.symmetric, found.faster)


def test_the_heuristic_can_be_asked_for():
    found = plan(ppo_of(LLAMA_34B, LLAMA_7B), "a100:4x8", WORK, search="heuristic")
    assert found.heuristic is not None
    assert found.seconds == pytest.approx(found.heuristic.seconds)
    assert found.faster["heuristic"] == pytest.approx(0)
    assert found.found_by.startswith("heuristic")
    assert {call.devices for call in found.calls.values()} == {tuple(range(32))}


def test_where_no_symmetric_plan_can_be_it_says_so():
    apart = plan(ppo_of(SMALL, SMALL), "a100:1x4", WORK, [Apart("actor", "critic")], per_call=False)
    assert "No symmetric plan (all groups on all devices, cut alike): against Apart(actor, critic)." in repr(apart)
    assert apart.faster == {"heuristic": None, "symmetric": None}
    tight = Costs(ClusterSpec.of("a100:1x2"), ppo_of(LLAMA_70B, LLAMA_70B), WORK)
    assert heuristic(tight, symmetric_plans(tight)) is None
    assert [one.seconds for one in compared_with(tight)] == [0.0] * 3
    none = compared_with(tight)[2]
    assert none.memory > none.capacity


def test_the_heuristic_is_refused_where_groups_cannot_share_all_devices():
    work = Workload(rows=64, prompt=64, response=64)
    for constraint in (Apart("actor", "reference"), Cap("actor", 2), Pin("reference", (0, 1))):
        with pytest.raises(PlacementError, match="search='heuristic' puts all groups on all 4 devices"):
            plan(grpo_of(SMALL), "a100:1x4", work, [constraint], search="heuristic")
