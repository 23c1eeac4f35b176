"""Placements as values, the one entry that finds them, and what it refuses."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from hybridflow.config import FSDP, Megatron
from hybridflow.errors import ConfigError, PlacementError
from hybridflow.placement import GIB, Bar, CallLayout, CallPlacement, GroupPlacement, Placement, ranges
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import DEFAULT
from hybridflow.planner.cost.timeline import simulate
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Apart, Cap, Pin, Rules, Together
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search.auto_mapping import auto_map
from hybridflow.planner.search.call_search import Evaluator, mcmc
from hybridflow.planner.search.deadline import Deadline
from hybridflow.planner.search.planning import Search, plan
from hybridflow.topology import divisors
from tests.example_plans import LLAMA_7B, LLAMA_70B, SMALL, cluster, fits, grpo_of, ppo_of

WORK = Workload(rows=512, prompt=512, response=512)
GROUPS = ("actor", "critic", "reference", "reward")


@pytest.fixture(scope="module")
def found() -> Placement:
    return plan(ppo_of(LLAMA_7B, LLAMA_7B), "a100:2x8", WORK, per_call=False)


def test_a_placement_has_every_group_and_call(found: Placement):
    assert set(found.groups) == set(GROUPS)
    assert "actor" in found
    assert found.nodes == (8, 8)
    for name, call in found.calls.items():
        p, t, d = call.sizes
        assert p * t * d == len(call.devices), name
        assert (call.kind == "function") == (call.capacity == call.memory == 0)
        assert call.memory <= call.capacity
        assert call.limit
        group = found[call.group]
        if not call.differs:
            assert group.devices == call.devices
            assert isinstance(group.train, Megatron)
            assert (group.train.pp, group.train.tp, group.train.dp) == call.sizes
    p_g, t_g, _ = found.calls["actor.generate_sequences"].sizes
    assert found["actor"].generate == (p_g, t_g)
    assert found["critic"].generate is None
    generation, share = found.calls["actor.generate_sequences"], found["actor"].memory_fraction
    assert share is not None
    assert 0.1 < share < generation.capacity / 80e9, "what stays there has its place beside"
    assert generation.memory <= generation.capacity
    with pytest.raises(PlacementError, match="Did you mean 'critic'"):
        found["crtic"]


def test_a_placement_survives_yaml_and_pickle(found: Placement, tmp_path: Path):
    found.save(tmp_path / "plan.yaml")
    assert Placement.load(tmp_path / "plan.yaml") == found
    assert pickle.loads(pickle.dumps(found)) == found
    other = Placement((4,), {"actor": GroupPlacement((0, 1, 3), (4,), FSDP(dp=3, reduce_often=True))})
    other.save(tmp_path / "other.yaml")
    assert Placement.load(tmp_path / "other.yaml") == other
    with pytest.raises(PlacementError, match="there is no placement file"):
        Placement.load(tmp_path / "missing.yaml")
    (tmp_path / "bad.yaml").write_text("nodes: [8]")
    with pytest.raises(PlacementError, match="is not a placement"):
        Placement.load(tmp_path / "bad.yaml")


def test_a_placement_is_shown(found: Placement, tmp_path: Path):
    table, explained = str(found), found.explain()
    found.save(tmp_path / "plan.yaml")
    assert Placement.load(tmp_path / "plan.yaml").explain() == explained
    for name, call in found.calls.items():
        assert f"{name} " in table
        assert f"{name}: {'on the CPU' if call.kind == 'function' else call.layout + ' (p-t-d)'}" in explained
        assert f"devices {ranges(call.devices)}" in explained
        assert call.held in explained
    assert found._repr_html_().count("<tr>") == 1 + len(found.calls)
    found.chart(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    figure = found.chart()
    assert figure.axes[0].get_ylabel() == "device"
    assert {text.get_text() for text in figure.legends[0].get_texts()} >= set(GROUPS)


def plainly(graph, spec: ClusterSpec, tp: int, work: Workload = WORK) -> tuple[Costs, ExecutionPlan]:
    """All calls on all devices with `tp`, by hand."""
    costs, mesh = Costs(spec, graph, work), Mesh.of(0, spec.size)
    sizes = {None: Parallel(d=spec.size)}
    return costs, {
        call.name: CallPlan(mesh, sizes.get(graph.models[call.group], Parallel(1, tp, spec.size // tp)))
        for call in costs.calls
    }


def test_a_placement_is_compared_with_the_plain_one(found: Placement, tmp_path: Path):
    """Its seconds are those of the public simulation of a plan that is written here."""
    graph, spec = ppo_of(LLAMA_7B, LLAMA_7B), ClusterSpec.of("a100:2x8")
    plain = found.colocated
    assert plain is not None
    costs, by_hand = plainly(graph, spec, plain.tp)
    seconds = simulate(graph, by_hand, costs.seconds(by_hand), reallocation=costs.moved).per_iteration
    assert plain.seconds == seconds
    assert fits(costs, by_hand)
    for tp in divisors(8):
        if tp < plain.tp:
            assert not fits(*plainly(graph, spec, tp))
    assert plain.tp > 1, "smaller ones do not fit here"
    less = seconds - found.seconds
    assert less > 0
    said = (
        f"Plain placement (all groups on all 16 devices, tp={plain.tp}): {seconds:.4g} s per iteration; "
        f"this one takes {less:.3g} s ({less / seconds:.0%}) less."
    )
    assert repr(found).splitlines()[1] == said
    assert said in found._repr_html_()
    assert found.plain()["colocated"]["seconds"] == seconds
    found.save(tmp_path / "plan.yaml")
    assert Placement.load(tmp_path / "plan.yaml").colocated == plain


def test_a_plain_placement_that_does_not_fit_is_said_with_its_bytes():
    """It fits with two pipeline stages, which the plain one has not; tp ends with the node."""
    graph, spec = grpo_of(LLAMA_7B), cluster(2, 2, 6e10)
    placement = plan(graph, spec, WORK, per_call=False)
    plain = placement.colocated
    assert plain is not None
    costs, by_hand = plainly(graph, spec, 2)
    homes = [by_hand[costs.homes[call.group]] for call in costs.calls]
    active = max(costs.added(c.name, by_hand[c.name], at).active for c, at in zip(costs.calls, homes, strict=True))
    used, most = max(costs.kept(by_hand)) + active, costs.capacity
    assert used > most
    assert (plain.tp, plain.seconds, plain.memory, plain.capacity) == (2, 0.0, used, most)
    assert f"tp=2): does not fit, {used / GIB:.1f} of {most / GIB:.1f} GiB a device ({used - most:,.0f} bytes" in repr(
        placement
    )


def test_groups_that_must_be_apart_have_no_plain_placement():
    found = plan(ppo_of(SMALL, SMALL), "a100:1x4", WORK, [Apart("actor", "critic")], per_call=False)
    assert "Plain placement (all groups on all 4 devices): not possible, against Apart(actor, critic)." in repr(found)
    graph = grpo_of(SMALL)
    replicated = replace(graph, strategies={"actor": FSDP(replicate=2)})
    said = repr(plan(replicated, "a100:1x3", WORK, per_call=False))
    assert "all 3 devices): not possible, a group has no layout on all of them." in said


def test_a_plan_that_is_the_plain_one_takes_as_long():
    found = plan(grpo_of(SMALL), "a100:1x1", WORK)
    assert f"all 1 devices, tp=1): as long, {found.seconds:.4g} s per iteration." in repr(found)


def test_functions_claim_no_device():
    """Rewards by rules run on the CPU of the devices' hosts."""
    found = plan(grpo_of(LLAMA_7B), "a100:1x8", WORK, per_call=False)
    call = found.calls["reward.compute_reward"]
    assert (call.kind, call.capacity, call.memory) == ("function", 0, 0)
    assert "none: on the CPU" in str(found)
    assert "reward.compute_reward: on the CPU" in found.explain()
    assert "on the CPU" in {text.get_text() for text in found.chart().legends[0].get_texts()}


def test_a_further_layout_must_win_by_the_error_of_predictions():
    graph = ppo_of(LLAMA_7B, LLAMA_7B)
    for margin in (0.03, 5.0):
        problem = Costs(ClusterSpec.of("a100:1x8"), graph, WORK, margin=margin)
        one = auto_map(problem)
        assert one is not None
        found = mcmc(problem, starts=[one.plan], evaluations=300)
        assert found is not None
        at_most = problem.timeline(one.plan).per_iteration * (1 + 1e-5)
        assert problem.weighted(found.seconds, found.plan) <= at_most
        assert margin < 1 or not problem.further(found.plan)


@pytest.fixture
def work_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A clock that counts what searches do: calls and moves that are priced, plans that are timed or bounded."""
    done = [0.0]

    def counted(function: Any) -> Any:
        @functools.wraps(function)
        def counting(*args, **kwargs):
            done[0] += 1
            return function(*args, **kwargs)

        return counting

    work = {Costs: ("cost", "reallocation", "timeline"), Evaluator: ("score", "loads")}
    for owner, name in [(owner, name) for owner, names in work.items() for name in names]:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return lambda: done[0]


@pytest.mark.parametrize("search", get_args(Search))
@pytest.mark.parametrize("cluster", ["a100:1x8", "a100:16x8"])
def test_searches_do_next_to_nothing_after_their_deadline(search, cluster: str, work_clock: Callable[[], float]):
    """Between two looks at the clock lie the layouts of one group on one mesh, and after the last the plan's prices."""
    graph, budget = ppo_of(LLAMA_7B, LLAMA_7B), 1500
    deadline = Deadline(at=budget, clock=work_clock)
    assert plan(graph, cluster, WORK, budget_s=deadline, search=search).seconds > 0
    assert deadline.over or search == "heuristic", "it ends by itself on few devices"
    assert work_clock() < budget + 400


def test_a_search_without_time_takes_the_first_placement(work_clock: Callable[[], float]):
    over = Deadline(at=0.5, clock=work_clock)
    found = plan(ppo_of(LLAMA_7B, LLAMA_70B), "a100:8x8", WORK, budget_s=over)
    assert over.over
    first = work_clock()
    best = plan(ppo_of(LLAMA_7B, LLAMA_70B), "a100:8x8", WORK, budget_s=Deadline(1e5, work_clock), per_call=False)
    assert first < (work_clock() - first) / 2
    assert found.seconds > best.seconds


def test_one_layout_for_all_calls_of_a_group():
    found = plan(grpo_of(LLAMA_7B), "a100:1x8", WORK, per_call=False)
    assert found.found_by.startswith("one layout for each group")
    assert all(not call.differs for call in found.calls.values() if call.kind != "generation")
    assert found.calls["actor.generate_sequences"].devices == found["actor"].devices


def test_a_search_over_calls_is_never_worse():
    graph = grpo_of(LLAMA_7B)
    one, many = plan(graph, "a100:1x4", WORK, per_call=False), plan(graph, "a100:1x4", WORK, budget_s=2)
    assert many.seconds <= one.seconds * (1 + 1e-5)


def test_a_cluster_that_is_too_small_is_refused_with_one_that_fits():
    graph = ppo_of(LLAMA_70B, LLAMA_70B)
    with pytest.raises(
        PlacementError, match=r"actor \(70.6 billion parameters\) needs at least .* GiB.*missing"
    ) as error:
        plan(graph, "a100:1x8", WORK, budget_s=1)
    text = str(error.value)
    nodes = int(text.split("fits is a100:")[1].split("x8")[0])
    assert plan(graph, f"a100:{nodes}x8", WORK, per_call=False).seconds > 0
    with pytest.raises(PlacementError, match=f"a100:{nodes}x8"):
        plan(graph, f"a100:{nodes - 1}x8", WORK, budget_s=1)


def test_bad_input_is_refused():
    graph = grpo_of(SMALL)
    with pytest.raises(ConfigError, match="budget_s"):
        plan(graph, "a100:1x1", WORK, budget_s=0)
    with pytest.raises(ConfigError, match="unknown"):
        plan(graph, "a1000:1x1", WORK)


@pytest.mark.parametrize(
    ("constraints", "named"),
    [
        ([Pin("actor", devices=(0, 1)), Pin("actor", devices=(2, 3))], ("0-1", "2-3")),
        ([Pin("actor", devices=(0, 1, 2)), Cap("actor", 2)], ("Pin(actor", "Cap(actor, 2)")),
        ([Apart("actor", "critic"), Together("actor", "critic")], ("Apart(actor, critic)", "Together(actor, critic)")),
        (
            [Together("actor", "critic"), Together("critic", "reward"), Apart("reward", "actor")],
            ("Apart(reward, actor)", "Together("),
        ),
        (
            [Pin("actor", devices=(0,)), Pin("critic", devices=(1,)), Together("actor", "critic")],
            ("Pin(actor, devices=0)", "Pin(critic, devices=1)"),
        ),
        (
            [Pin("actor", devices=(0, 1)), Pin("critic", devices=(1, 2)), Apart("actor", "critic")],
            ("Apart(actor, critic)", "Pin(actor", "Pin(critic"),
        ),
        ([Pin("actor", parallel=Parallel(2, 8, 1))], ("16 devices", "the cluster has 8")),
        ([Cap("acto", 2)], ("Did you mean 'actor'",)),
        ([Pin("actor", devices=(8,))], ("device 8 is not in the cluster",)),
    ],
)
def test_contradictory_constraints_are_refused_with_both_named(constraints, named):
    with pytest.raises(PlacementError) as error:
        Rules(constraints, GROUPS, 8)
    for name in named:
        assert name in str(error.value)


def test_a_problem_knows_its_own_memory():
    graph, spec = grpo_of(LLAMA_7B), cluster(1, 4, 1e11)
    problem = Costs(spec, graph, WORK, replace(DEFAULT, usable_memory=0.5))
    assert problem.capacity == 5e10
    assert ClusterSpec.of(spec) is spec


def test_files_that_were_edited_by_hand(tmp_path: Path):
    """Whatever was written instead, it is refused or can be used: never met later."""
    path = tmp_path / "plan.yaml"
    where = GroupPlacement((0, 1), (2,), Megatron(tp=2, dp=1), (1, 2), (CallPlacement("compute", (1,), (1, 1, 1)),))
    call = CallLayout("actor", "generation", (0, 1), (1, 2, 1), 3.0, limit="decode", capacity=1.0)
    known = Placement((2,), {"actor": where}, {"actor.run": call}, 3.0, bars=(Bar("actor.run", "actor", (0,), 0, 3.0),))
    known.save(path)
    assert Placement.load(path) == known
    plain = yaml.safe_load(path.read_text())

    def places(node: Any, at: tuple = ()) -> Iterator[tuple]:
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield (*at, key)
            if isinstance(inner, dict | list):
                yield from places(inner, (*at, key))

    refused = 0
    for *front, last in places(plain):
        for instead in (None, "abc", -1, 3.5, [], {}, "9999", "3-1", "0,0", True, float("nan"), {"Foo": {}}, 10**9):
            changed = copy.deepcopy(plain)
            functools.reduce(lambda node, key: node[key], front, changed)[last] = instead
            path.write_text(yaml.safe_dump(changed, sort_keys=False))
            try:
                found = Placement.load(path)
            except PlacementError as error:
                refused += "is not a placement" in str(error)
            else:
                assert all(text for text in (str(found), found.explain(), found._repr_html_()))
    assert refused > 300
    path.write_text("groups: [")
    with pytest.raises(PlacementError, match="is not a placement"):
        Placement.load(path)
    with pytest.raises(PlacementError, match="cannot be read"):
        Placement.load(tmp_path)


def test_devices_that_the_nodes_have_not():
    for devices in ((0, 2), (1, 0), (0, 0), (-1,), ()):
        with pytest.raises(PlacementError, match="from 0 to 1 in ascending order"):
            GroupPlacement(devices, (2,))
    with pytest.raises(PlacementError, match="each node"):
        GroupPlacement((0,), ())
    with pytest.raises(PlacementError, match="p_g, t_g"):
        GroupPlacement((0,), (1,), generate=(0, 1))
