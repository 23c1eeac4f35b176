"""Searches for placements: each against one that tries everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError
from hybridflow.placement import Placement
from hybridflow.planner.cost.call_cost import cache_bytes
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import DEFAULT
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Apart, Cap, Constraint, Pin, Together
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, Parallel, meshes, packings, sizes
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search.all_devices import (
    best_pair,
    compared_with,
    heuristic,
    heuristic_map,
    similarity,
    similarity_map,
    symmetric_plans,
)
from hybridflow.planner.search.auto_mapping import auto_map
from hybridflow.planner.search.call_search import Evaluator, exact, mcmc, options_of, space_size
from hybridflow.planner.search.planning import plan
from tests.example_plans import (
    LARGE,
    LLAMA_7B,
    LLAMA_13B,
    LLAMA_34B,
    LLAMA_70B,
    SMALL,
    PlainCosts,
    cluster,
    fits,
    grpo_of,
    obeys,
    ppo_of,
)
from tests.unit.planner.test_planner_mapping import by_force
from tests.unit.planner.test_planner_published import GRAPH, H100S, HEURISTIC, WORKLOAD

TOKENS = 2e5


def problem_of(graph, spec, constraints: Sequence[Constraint] = (), tokens: float = TOKENS) -> Costs:
    return PlainCosts(graph, spec, tokens).keeping(*constraints)


@pytest.mark.parametrize(
    ("graph", "nodes", "count", "memory"),
    [
        (grpo_of(SMALL, LARGE), 1, 8, 1e12),
        (grpo_of(LLAMA_7B, LLAMA_13B), 2, 4, 1e11),
        (ppo_of(SMALL, LARGE), 1, 4, 1e12),
        (ppo_of(SMALL, LARGE, log_probs=False), 1, 4, 1.2e9),
        (ppo_of(LLAMA_7B, LLAMA_13B), 2, 2, 3.2e11),
        (ppo_of(SMALL, LARGE), 1, 3, 1e12),
    ],
)
def test_auto_mapping_equals_brute_force(graph, nodes: int, count: int, memory: float):
    problem = problem_of(graph, cluster(nodes, count, memory))
    found, best = auto_map(problem), by_force(problem)
    assert (found.seconds if found else np.inf) == pytest.approx(best, rel=1e-12)
    if found:
        assert fits(problem, found.plan)
        taken = [device for mesh in found.sets.values() for device in mesh.devices]
        assert len(taken) == len(set(taken))
        assert {group for groups in found.sets for group in groups} == set(graph.groups)


def test_exact_enumeration_tries_everything():
    problem = problem_of(grpo_of(SMALL, LARGE), cluster(1, 2, 2e9))
    evaluator = Evaluator(problem, options_of(problem, prune=False))
    scores = [evaluator.score(state) for state in product(*(range(len(own)) for own in evaluator.options))]
    assert len(scores) == space_size(problem)
    best = min(score.seconds for score in scores if score and score.good)
    found = exact(problem)
    assert found is not None
    assert found.complete
    assert found.seconds == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    ("graph", "spec", "tokens"),
    [
        (ppo_of(SMALL, LARGE), cluster(1, 4), 1e6),
        (ppo_of(LLAMA_7B, LLAMA_13B), cluster(1, 4, 9e11), 1e5),
        (grpo_of(LLAMA_7B, LLAMA_13B), cluster(2, 4, 3e11), 1e5),
        (grpo_of(LLAMA_7B, LLAMA_7B), cluster(2, 2, 3e11), 1e3),
    ],
)
def test_mcmc_comes_within_2_percent_of_the_optimum_with_every_seed(graph, spec, tokens: float):
    problem = problem_of(graph, spec, tokens=tokens)
    best = exact(problem)
    assert best is not None
    assert best.complete
    for seed in range(4):
        found = mcmc(problem, seed=seed, evaluations=4000)
        assert found is not None
        assert best.seconds * (1 - 1e-9) <= found.seconds <= 1.02 * best.seconds
        assert fits(problem, found.plan)
        assert problem.timeline(found.plan).per_iteration == pytest.approx(found.seconds)


def test_equal_seeds_give_equal_plans():
    problem = problem_of(ppo_of(LLAMA_7B, LLAMA_13B), cluster(2, 8, 2e11))
    first, second = (mcmc(problem, seed=3, evaluations=2000) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.plan == second.plan


def test_searches_keep_constraints():
    graph, spec = ppo_of(SMALL, LARGE), cluster(1, 4)
    asked = (Pin("critic", devices=(2, 3)), Apart("actor", "critic"), Together("reference", "reward"), Cap("reward", 1))
    problem = problem_of(graph, spec, asked)
    mapped = auto_map(problem)
    assert mapped is not None
    best = exact(problem, start=mapped.plan)
    sampled = mcmc(problem, seed=0, evaluations=4000)
    assert best is not None
    assert sampled is not None
    for found in (mapped.plan, best.plan, sampled.plan):
        assert obeys(problem, found)
        assert found["critic.update_critic"].mesh.devices == (2, 3)
        assert max(found["actor.update_actor"].mesh.devices) < 2
    sizes_only = problem_of(graph, spec, [Pin("actor", parallel=Parallel(2, 1, 1))])
    found = auto_map(sizes_only)
    assert found is not None
    assert found.plan["actor.update_actor"].parallel == Parallel(2, 1, 1)


@pytest.mark.parametrize("devices", [4, 8])
def test_similar_layouts_are_found_as_in_the_full_grid(devices: int, monkeypatch: pytest.MonkeyPatch):
    problem, mesh = problem_of(grpo_of(LLAMA_7B, LLAMA_7B), cluster(1, devices, 2e11)), Mesh.of(0, devices)
    priced, moved = list[str](), Costs.moved
    monkeypatch.setattr(Costs, "moved", lambda *given: priced.append(given[1]) or moved(*given))
    found, few = best_pair(problem, "actor", mesh), len(priced)
    assert found is not None
    layouts = problem.strategies("actor", mesh)
    pins = [Pin("actor", parallel=train, generate=generate) for train in layouts for generate in layouts]
    grid = [pair for pin in pins if (pair := best_pair(problem.keeping(pin), "actor", mesh)) is not None]
    assert found == min(grid, key=lambda pair: pair.seconds)
    assert few < len(grid)


def test_similarity_is_the_share_that_a_device_holds():
    assert similarity(Parallel(2, 4, 1), Parallel(2, 4, 1)) == 1
    assert similarity(Parallel(1, 4, 2), Parallel(1, 2, 4)) == 0.5
    assert similarity(Parallel(2, 2, 2), Parallel(1, 2, 4)) == 0.5
    assert similarity(Parallel(1, 1, 4), Parallel(2, 2, 1)) == 1  # every device has everything
    assert similarity(Parallel(4, 1, 1), Parallel(1, 4, 1)) == 0.25


def test_sets_are_packed_without_overlap():
    spec = cluster(3, 4)
    assert list(packings(spec, [4, 2, 4, 2]))
    assert not list(packings(spec, [3, 3, 3, 3]))
    assert next(packings(spec, [8, Mesh((0, 1)), 2])) == [Mesh.of(4, 8), Mesh((0, 1)), Mesh((2, 3))]
    assert not list(packings(spec, [12, 1]))
    assert sizes(spec) == [1, 2, 3, 4, 8, 12]


def test_meshes_are_slices_of_a_node_or_runs_of_nodes():
    found = {str(mesh) for mesh in meshes(cluster(3, 4))}
    slices = {"0", "1", "2", "3", "0-1", "2-3", "0-3"}
    assert slices | {"4-7", "8-11", "0-7", "4-11", "0-11"} <= found
    assert len(found) == 3 * 7 + 3


def test_a_search_by_similarity_finds_what_auto_mapping_finds_with_all_groups_together():
    graph, work = grpo_of(LLAMA_7B), Workload(rows=512, prompt=512, response=512)
    alone = [Together("actor", group) for group in graph.groups[1:]]
    costs = Costs(ClusterSpec.of("a100:1x8"), graph, work)
    found, mapped = similarity_map(costs), auto_map(costs.keeping(*alone))
    assert found is not None
    assert mapped is not None
    seconds = [costs.timeline(each).per_iteration for each in (found, mapped.plan)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)
    assert {call.mesh for call in found.values()} == {Mesh.of(0, 8)}


def test_a_search_by_similarity_finds_nothing_where_groups_cannot_share_all_devices():
    work = Workload(rows=64, prompt=64, response=64)
    costs = Costs(ClusterSpec.of("a100:1x4"), grpo_of(SMALL), work)
    for constraint in (Apart("actor", "reference"), Cap("actor", 2), Pin("reference", (0, 1))):
        assert similarity_map(costs.keeping(constraint)) is None
    assert similarity_map(Costs(costs.cluster, replace(costs.graph, trained=frozenset()), work)) is None
    with pytest.raises(ConfigError, match="Did you mean 'heuristic'"):
        plan(grpo_of(SMALL), "a100:1x4", work, search="heuristc")  # type: ignore[arg-type]


def test_one_search_can_be_asked_for():
    work = Workload(rows=64, prompt=64, response=64)
    every, one = (plan(grpo_of(SMALL), "a100:1x1", work, search=name, budget_s=2) for name in ("auto", "mcmc"))
    assert one.seconds == pytest.approx(every.seconds, rel=1e-6)


def test_updates_that_run_together_are_worth_layouts_of_their_own():
    """Devices without fast links train in pipelines: two updates in one layout fill each other's bubbles."""
    graph = ppo_of(LLAMA_7B, replace(LLAMA_7B, head="value"))
    work = Workload(rows=64, prompt=512, response=512, minibatches=4)
    spec, names = ClusterSpec.of("a100:8x1"), ("critic.update_critic", "actor.update_actor")
    apart, costs = Costs(spec, graph, work), Costs(spec, graph, replace(work, time_sharing=True))
    alone, shared = similarity_map(apart), similarity_map(costs)
    assert alone is not None
    assert shared is not None
    assert shared[names[0]] == shared[names[1]]
    assert shared[names[0]].parallel.p > 1
    shared_seconds, took = costs.timeline(shared).per_iteration, costs.seconds(shared)
    assert shared_seconds < apart.timeline(alone).per_iteration
    assert took[names[1]] < 0.5 * took[names[0]]  # of the second, what the first's bubbles have no room for
    auto = plan(graph, "a100:8x1", replace(work, time_sharing=True), per_call=False)
    assert auto.seconds <= shared_seconds  # the fastest without shared stages takes 18.2 s, this 17.9 s
    assert auto.calls["critic.update_critic"].sizes == auto.calls["actor.update_actor"].sizes


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
