"""Placements by timeline: what runs at once on devices that are apart, and HybridFlow's findings that rest on it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.planner_findings import KINDS, WORKLOAD, best_size, finding, problem_of
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.mesh import Mesh, sizes
from hybridflow.planner.search.auto_mapping import auto_map, overlap_map
from hybridflow.planner.search.stages import undominated
from tests.example_plans import LARGE, LLAMA_7B, LLAMA_13B, SMALL, PlainCosts, cluster, fits, grpo_of, obeys, ppo_of


@pytest.mark.parametrize(
    ("graph", "nodes", "count", "memory"),
    [
        (grpo_of(SMALL, LARGE), 1, 8, 1e12),
        (ppo_of(SMALL, LARGE), 1, 4, 1e12),
        (ppo_of(LLAMA_7B, LLAMA_13B), 2, 4, 3.2e11),
    ],
)
def test_a_placement_by_timeline_is_no_slower_than_the_stages_let_one_think(graph, nodes, count, memory):
    spec = cluster(nodes, count, memory)
    problem = PlainCosts(graph, spec)
    mapped, found = auto_map(problem), overlap_map(problem)
    assert mapped is not None
    assert found is not None
    assert fits(problem, found.plan)
    assert found.seconds == problem.timeline(found.plan).per_iteration
    assert found.seconds <= problem.timeline(mapped.plan).per_iteration * (1 + 1e-9)
    taken = [device for mesh in found.sets.values() for device in mesh.devices]
    assert len(taken) == len(set(taken))


def test_nothing_is_found_where_nothing_fits():
    graph, spec = ppo_of(LLAMA_7B, LLAMA_13B), cluster(1, 2, 1e9)
    assert overlap_map(PlainCosts(graph, spec)) is None


def test_constraints_are_kept():
    for kind, constraints in KINDS.items():
        found = overlap_map(problem_of(("7B", "7B", 16), constraints))
        assert found is not None
        assert obeys(problem_of(("7B", "7B", 16), constraints), found.plan), kind


@pytest.mark.parametrize("size", ["13B", "34B"])
def test_models_of_equal_size_are_best_together_on_64_devices(size):
    """HybridFlow, figure 12."""
    found = finding([(size, size, 64)], "colocate", ("colocate", "split"))
    assert found["holds"], found


def test_a_large_critic_gets_devices_of_its_own_on_128():
    """HybridFlow, figure 13: 13B actor and reference, 70B critic and reward model."""
    found = finding([("13B", "70B", 128)], "critic apart", ("colocate", "critic apart"))
    assert found["holds"], found
    own = found["seconds"]["13B+70B on 128"]["critic apart"]["devices"]
    assert 48 <= own["critic"] <= 80
    assert sum(own.values()) == 128


@pytest.mark.parametrize(("size", "t"), [("7B", 2), ("13B", 4)])
def test_the_best_generation_size(size, t):
    """HybridFlow, figure 15, on 16 devices with training at 1-8-2."""
    found = best_size(size, t)
    assert found["holds"], found


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_devices_are_counted_by_node(nodes, count, data):
    spec = cluster(nodes, count)
    some = st.lists(st.integers(0, spec.size - 1), min_size=1, unique=True).map(sorted)
    near = st.tuples(st.integers(0, spec.size - 1), st.integers(0, spec.size - 1)).map(
        lambda ends: list(range(min(ends), max(ends) + 1))
    )
    devices = data.draw(some | near)
    assert spec.counts(devices) == Counter(map(spec.node_of, devices))
    assert Mesh(tuple(devices)).bits == sum(1 << device for device in devices)


def test_rows_of_a_function_are_spread_over_hosts():
    graph, spec = grpo_of(LLAMA_7B), ClusterSpec.of("a100:2x8")
    found = overlap_map(Costs(spec, graph, WORKLOAD))
    assert found is not None
    assert found.plan["reward.compute_reward"].mesh.size == spec.size


@settings(max_examples=40, deadline=None)
@given(arrays(float, st.tuples(st.integers(0, 60), st.integers(1, 4)), elements=st.integers(0, 6).map(float)))
def test_what_nothing_else_beats_is_kept_once(values):
    kept = values[undominated(values)]
    assert len(np.unique(kept, axis=0)) == len(kept)
    for row in values:
        assert (kept <= row).all(axis=1).any()
    for i, row in enumerate(kept):
        assert not any((other <= row).all() for j, other in enumerate(kept) if j != i)


def test_sets_of_many_nodes_grow_by_an_eighth_at_most():
    found = [size // 8 for size in sizes(ClusterSpec.of("a100:128x8")) if size % 8 == 0]
    assert found[:16] == list(range(1, 17))
    assert {127, 126, 124, 128} <= set(found)
    assert all(b - a <= max(1, a / 8) for a, b in pairwise(found))
