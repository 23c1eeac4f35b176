"""Searches for placements: each against one that tries everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Apart, Cap, Constraint, Pin, Together
from hybridflow.planner.describe.mesh import (
    Mesh,
    Parallel,
    meshes,
    packings,
    sizes,
)
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search.all_devices import best_pair, similarity, similarity_map
from hybridflow.planner.search.auto_mapping import auto_map
from hybridflow.planner.search.call_search import Evaluator, exact, mcmc, options_of, space_size
from hybridflow.planner.search.planning import plan
from hybridflow.planner.search.stages import undominated
from tests.example_plans import (
    LARGE,
    LLAMA_7B,
    LLAMA_13B,
    SMALL,
    PlainCosts,
    cluster,
    fits,
    grpo_of,
    obeys,
    ppo_of,
    stage_choices,
)

TOKENS = 2e5


def problem_of(graph, spec, constraints: Sequence[Constraint] = (), tokens: float = TOKENS) -> Costs:
    return PlainCosts(graph, spec, tokens).keeping(*constraints)


def assignments(groups: Sequence[str]):
    """Every way to colocate, as the number of the set of each group: numbers appear in order."""
    for numbers in product(range(len(groups)), repeat=len(groups)):
        if all(number <= max(numbers[:i], default=-1) + 1 for i, number in enumerate(numbers)):
            yield numbers


def by_force(problem: Costs) -> float:
    """Stage-wise cost of the best placement: every colocation, every allocation, every layout of every group."""
    graph, spec, best = problem.graph, problem.cluster, np.inf
    groups = graph.groups
    for numbers in assignments(groups):
        count = max(numbers) + 1
        shares = combinations_with_replacement(sizes(spec), count)
        for share in {order for found in shares for order in permutations(found)}:
            if sum(share) > spec.size or (where := next(packings(spec, list(share)), None)) is None:
                continue
            sets = []
            for number in range(count):
                members = [group for group, own in zip(groups, numbers, strict=True) if own == number]
                found = stage_choices(problem, members, where[number])
                sets.append(list(found[undominated(found)]))  # beaten ones are left out for speed
            for chosen in product(*sets):
                best = min(best, sum(max(stage) for stage in zip(*chosen, strict=True)))
    return best


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


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([SMALL, LARGE, LLAMA_7B]),
    st.sampled_from([SMALL, LARGE, LLAMA_7B]),
    st.integers(1, 4),
    st.sampled_from([1e3, 1e5, 1e7]),
    st.floats(0.05, 3),
)
def test_auto_mapping_equals_brute_force_whatever_the_memory(actor, reference, count, tokens, tightness):
    graph = grpo_of(actor, reference)
    memory = tightness * 20 * max(actor.num_parameters, reference.num_parameters)
    problem = problem_of(graph, cluster(1, count, memory), tokens=tokens)
    found = auto_map(problem)
    assert (found.seconds if found else np.inf) == pytest.approx(by_force(problem), rel=1e-12)


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
