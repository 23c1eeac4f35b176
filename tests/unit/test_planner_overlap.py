"""Placements by timeline: what runs at once on devices that are apart, and HybridFlow's findings that rest on it."""

from __future__ import annotations

import pytest
from example_plans import LARGE, LLAMA_7B, LLAMA_13B, SMALL, PlainCosts, cluster, grpo_of, ppo_of

from benchmarks.planner_findings import KINDS, best_size, finding, problem_of
from hybridflow.planner.auto_mapping import auto_map
from hybridflow.planner.overlap import overlap_map
from hybridflow.planner.space import Problem


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
    problem = Problem(graph, spec, PlainCosts(graph, spec))
    mapped, found = auto_map(problem), overlap_map(problem)
    assert mapped is not None
    assert found is not None
    assert problem.fits(found.plan)
    assert found.seconds == problem.timeline(found.plan).per_iteration
    assert found.seconds <= problem.timeline(mapped.plan).per_iteration * (1 + 1e-9)
    taken = [device for own in found.sets for device in own.mesh.devices]
    assert len(taken) == len(set(taken))


def test_nothing_is_found_where_nothing_fits():
    graph, spec = ppo_of(LLAMA_7B, LLAMA_13B), cluster(1, 2, 1e9)
    assert overlap_map(Problem(graph, spec, PlainCosts(graph, spec))) is None


def test_constraints_are_kept():
    for kind, constraints in KINDS.items():
        found = overlap_map(problem_of(("7B", "7B", 16), constraints))
        assert found is not None
        assert problem_of(("7B", "7B", 16), constraints).obeys(found.plan), kind


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
