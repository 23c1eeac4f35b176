"""Auto-mapping under constraints, against one that tries everything; what is said where none is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.planner_findings import KINDS, WORKLOAD, best_size, finding, problem_of
from hybridflow.errors import PlacementError
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Apart, Cap, Constraint, OneLayout, Pin, Together
from hybridflow.planner.describe.mesh import Mesh, Parallel, sizes
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search import planning
from hybridflow.planner.search.auto_mapping import auto_map, overlap_map
from hybridflow.planner.search.call_search import exact, mcmc
from hybridflow.planner.search.deadline import Deadline
from hybridflow.planner.search.planning import grown, infeasibility_report, plan
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

GRAPH = grpo_of(SMALL, LARGE)
WORK = Workload(rows=64, prompt=128, response=128)
AR = ("actor", "reference")


def ways(groups: Sequence[str]) -> Iterator[list[list[str]]]:
    if not groups:
        yield []
        return
    for sets in ways(groups[1:]):
        yield [[groups[0]], *sets]
        for i in range(len(sets)):
            yield [*sets[:i], [groups[0], *sets[i]], *sets[i + 1 :]]


def everywhere(spec: ClusterSpec, taken: frozenset[int]) -> Iterator[Mesh]:
    """Some free devices of a node, or whole neighbouring nodes."""
    for node in range(len(spec.nodes)):
        free = [device for device in spec.devices_of(node) if device not in taken]
        yield from (Mesh(tuple(free[:size])) for size in range(1, len(free) + 1))
        for last in range(node + 1, len(spec.nodes)):
            run = range(spec.devices_of(node)[0], spec.devices_of(last)[-1] + 1)
            if not taken & set(run):
                yield Mesh(tuple(run))


def by_force(problem: Costs) -> float:
    """The least stage-wise cost of all ways to colocate, of all meshes of the sets, and of all layouts there."""
    rules, best = problem.constraints, math.inf
    pins = {c.group: c.devices for c in rules if isinstance(c, Pin) and c.devices}

    def place(sets: list[list[str]], taken: frozenset[int], stages: np.ndarray) -> None:
        nonlocal best
        if not sets:
            best = min(best, stages.sum(axis=1).min())
            return
        asked = {pins[group] for group in sets[0] if group in pins}
        some = [Mesh(devices) for devices in asked] if asked else everywhere(problem.cluster, taken)
        for mesh in some if len(asked) < 2 else ():
            own = stage_choices(problem, sets[0], mesh)
            if len(own) and not taken & set(mesh.devices):
                both = np.unique(np.maximum(stages[:, None], own[None]).reshape(-1, 3), axis=0)
                place(sets[1:], taken | set(mesh.devices), both)

    for sets in ways(problem.graph.groups):
        at = {group: i for i, names in enumerate(sets) for group in names}
        pairs = [c for c in rules if isinstance(c, Apart | Together)]
        if all((at[c.first] == at[c.second]) == isinstance(c, Together) for c in pairs):
            # sets that are pinned first: the others go where those are not
            place(sorted(sets, key=lambda names: not any(x in pins for x in names)), frozenset(), np.zeros((1, 3)))
    return best


@st.composite
def problems(draw) -> Costs:
    memory = draw(st.sampled_from([3e8, 1e9, 3e9, 1e12]))
    spec = cluster(*draw(st.sampled_from([(1, 4), (2, 2), (2, 3), (3, 2)])), memory)
    names = st.sampled_from(GRAPH.groups)
    devices = st.lists(st.integers(0, spec.size - 1), min_size=1, unique=True).map(tuple)
    pairs = st.permutations(GRAPH.groups).map(lambda order: order[:2])
    rules = st.one_of(
        st.builds(Pin, names, devices),
        st.builds(Cap, names, st.integers(1, spec.size)),
        pairs.map(lambda pair: Apart(*pair)),
        pairs.map(lambda pair: Together(*pair)),
    )
    costs = PlainCosts(GRAPH, spec, draw(st.sampled_from([1e3, 1e6])))
    try:
        return costs.keeping(*draw(st.lists(rules, max_size=2)))
    except PlacementError:  # they contradict each other
        return costs


@settings(max_examples=20, deadline=None)
@given(problems())
def test_auto_mapping_equals_brute_force_under_any_constraints(problem: Costs):
    found, best = auto_map(problem), by_force(problem)
    assert (found.seconds if found else math.inf) == pytest.approx(best, rel=1e-9)
    assert planning.fits(problem) or found is None
    if found:
        assert fits(problem, found.plan)
        assert obeys(problem, found.plan)


def test_the_last_set_takes_fewer_devices_where_so_many_do_not_lie_together():
    spec = cluster(2, 8)
    problem = PlainCosts(GRAPH, spec).keeping(Pin("reference", tuple(range(4, 12))), Apart(*AR))
    found = auto_map(problem)
    assert found is not None
    assert {mesh.size for groups, mesh in found.sets.items() if "actor" in groups} == {4}


def test_peers_of_a_pinned_group_are_cut_for_its_devices():
    """No tensor parallel group lies across nodes because of a pin that does."""
    spec = cluster(2, 4, 1e9)
    problem = PlainCosts(GRAPH, spec).keeping(Pin("reference", (3, 4)), Together(*AR))
    found = auto_map(problem)
    assert found is not None
    assert all(call.parallel.t == 1 for name, call in found.plan.items() if not name.startswith("reward"))


@pytest.mark.parametrize(
    ("constraints", "named"),
    [
        ([Pin("actor", parallel=Parallel(1, 3, 1))], "8 heads, not divisible by t=3"),
        ([Pin("actor", parallel=Parallel(5, 1, 1))], "4 layers, fewer than p=5"),
        ([Pin("actor", parallel=Parallel(1, 4, 2)), Cap("reference", 4), Together(*AR)], "Cap.reference, 4."),
        ([Pin("actor", devices=(3, 4), parallel=Parallel(1, 2, 1))], "t=2 would lie across nodes, which have 4"),
        ([Pin("actor", parallel=Parallel(1, 1, 6))], "6 devices are neither"),
        ([Pin("reward", parallel=Parallel(1, 2, 1))], "functions, which are not cut"),
        ([Pin("actor", devices=tuple(range(8))), Apart(*AR)], "Apart.* and Pin.* contradict .* 9 devices at least"),
        ([Pin("actor", parallel=Parallel(1, 2, 1), generate=Parallel(1, 4, 1)), OneLayout("actor")], "OneLayout"),
        ([Pin("actor", parallel=Parallel(1, 1, 2), generate=Parallel(1, 2, 1)), OneLayout("actor")], "OneLayout"),
        ([Pin("actor", devices=(0, 1)), Pin("actor", parallel=Parallel(1, 4, 1))], "Pin.* and Pin.* contradict"),
        (
            [Pin("actor", devices=(0, 1)), Pin("reward", devices=(1,)), Together(*AR), Apart("reference", "reward")],
            "Apart.* Pin.actor.* Pin.reward",
        ),
    ],
)
def test_constraints_that_cannot_be_kept_are_refused_before_a_search(constraints: Sequence[Constraint], named: str):
    spec = cluster(2, 4)
    costs = PlainCosts(GRAPH, spec)
    with pytest.raises(PlacementError, match=named):
        costs.keeping(*constraints)
    assert not costs.asked


def test_pins_and_caps_that_agree_are_one():
    spec = cluster(1, 8)
    rules = (
        PlainCosts(GRAPH, spec)
        .keeping(Pin("actor", (0, 1)), Pin("actor", parallel=Parallel(1, 2, 1)), Cap("actor", 4), Cap("actor", 2))
        .rules
    )
    assert rules.pins["actor"] == Pin("actor", (0, 1), Parallel(1, 2, 1))
    assert rules.caps["actor"] == Cap("actor", 2)


@settings(max_examples=3, deadline=None)
@given(st.integers(1, 3), st.floats(0.02, 0.6), st.booleans())
def test_the_smallest_cluster_fits_and_no_smaller_one(count: int, gigabytes: float, capped: bool):
    rules = (Cap("reference", 2),) if capped else ()
    problem = Costs(cluster(1, count, gigabytes * 1e9), GRAPH, WORK, constraints=rules)
    if auto_map(problem) is not None:
        return
    text = str(infeasibility_report(problem))
    assert "GiB a device are missing" in text or "Cap(reference, 2)" in text
    named = text.partition("The smallest cluster of such nodes that fits is ")[2].partition(". Or")[0]
    if named:
        nodes = int(named.partition(":")[2].partition("x")[0])
        assert auto_map(grown(problem, nodes)) is not None
        assert nodes == 2 or auto_map(grown(problem, nodes - 1)) is None


def test_constraints_at_fault_are_named():
    with pytest.raises(PlacementError, match=r"keeps Cap\(actor, 1\): all groups fit there without it") as error:
        plan(grpo_of(LLAMA_7B), "a100:1x8", WORK, (Cap("actor", 1), Cap("reference", 4)), budget_s=0.2)
    assert "reference" not in str(error.value)


def test_small_spaces_are_left_when_all_of_them_is_known():
    graph, spec = ppo_of(SMALL, LARGE), cluster(1, 1)
    problem = PlainCosts(graph, spec)
    found, best = mcmc(problem, deadline=Deadline.of(600)), exact(problem)
    assert found is not None
    assert best is not None
    assert found.seconds == pytest.approx(best.seconds)


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
