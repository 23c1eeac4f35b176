"""Placements and workers: settings whose sizes a placement decides, and calls with layouts and ranks of their own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import hybridflow as hf
from hybridflow.errors import PlacementError
from hybridflow.placement import CallPlacement, GroupPlacement, Placement
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.graph import Graph, GraphBuilder
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.search.call_search import Evaluator, exact, mcmc, options_of
from hybridflow.planner.search.deadline import Deadline
from hybridflow.planner.search.planning import placement_of
from hybridflow.topology import RankGrid
from hybridflow.workers.placing import apply_placement, can_replicate, divided
from tests.example_plans import SMALL, PlainCosts, cluster, grpo_of, obeys

NODES = (8,)


def twice() -> Graph:
    """A policy that draws twice and is trained twice, and a reward function that is called twice."""
    program = GraphBuilder({"actor": SMALL, "reward": None})
    for _ in range(2):
        program.begin()
        first = program.call("actor", "generate_sequences", "generation", writes=("response_ids",))
        second = program.call("actor", "generate_sequences", "generation", writes=("greedy",))
        for source, column in ((first, "response_ids"), (second, "greedy")):
            program.call("reward", "compute_reward", "inference", {column: (source,)}, (f"{column}_rewards",))
        program.call("actor", "compute_log_prob", "inference", {"response_ids": (first,)}, ("old_log_probs",))
        program.call("actor", "update_actor", "training", {"response_ids": (first,)})
        program.call("actor", "update_actor", "training", {"greedy": (second,)})
    return program.graph()


def problem_of(graph: Graph, devices: int = 2, *constraints: Any) -> Costs:
    spec = cluster(1, devices)
    return PlainCosts(graph, spec, 1e5).keeping(*constraints)


def at(*devices: int, sizes: tuple[int, int, int]) -> CallPlan:
    return CallPlan(Mesh(devices), Parallel(*sizes))


def test_updates_share_a_layout_and_so_do_generations_and_functions():
    problem = problem_of(twice())
    assert {tuple(sorted(names)) for names in problem.alike} == {
        ("actor.update_actor", "actor.update_actor#2"),
        ("actor.generate_sequences", "actor.generate_sequences#2"),
        ("reward.compute_reward", "reward.compute_reward#2"),
    }
    whole = {call.name: at(0, 1, sizes=(1, 1, 2)) for call in problem.calls}
    evaluator = Evaluator(problem, options_of(problem, prune=False))
    for name, fine in (("actor.update_actor#2", False), ("actor.compute_log_prob", True)):
        plan = {**whole, name: at(0, sizes=(1, 1, 1))}
        assert obeys(problem, plan) == fine
        state = evaluator.state(plan)
        assert state is not None
        score = evaluator.score(state)
        assert score is not None
        assert score.good == fine


@pytest.mark.parametrize("search", [exact, mcmc])
def test_what_is_found_can_run(search):
    problem = problem_of(twice())
    found = search(problem, deadline=Deadline.of(2))
    assert found is not None
    assert obeys(problem, found.plan)


def test_a_group_with_one_layout():
    problem = problem_of(grpo_of(SMALL), 4, hf.planner.OneLayout("actor"))
    home, calls = at(0, 1, 2, 3, sizes=(2, 2, 1)), [call.name for call in problem.calls]
    plan = dict.fromkeys(calls, home)
    generates = "actor.generate_sequences"
    assert obeys(problem, plan)
    assert obeys(problem, {**plan, generates: at(0, 1, 2, 3, sizes=(1, 2, 2))})
    assert not obeys(problem, {**plan, generates: at(0, 1, 2, 3, sizes=(1, 4, 1))})
    assert not obeys(problem, {**plan, generates: at(0, 1, sizes=(1, 2, 1))})
    assert not obeys(problem, {**plan, "actor.compute_log_prob": at(0, 1, sizes=(1, 2, 1))})
    assert obeys(problem, {**plan, "reference.compute_ref_log_prob": at(0, 1, sizes=(1, 2, 1))})
    with pytest.raises(PlacementError, match="no group 'critic'"):
        problem_of(grpo_of(SMALL), 4, hf.planner.OneLayout("critic"))


def test_a_placement_says_which_calls_are_elsewhere(tmp_path: Path):
    problem = problem_of(grpo_of(SMALL), 4)
    home = at(0, 1, sizes=(2, 1, 1))
    plan = {call.name: home for call in problem.calls}
    plan["actor.generate_sequences"] = at(0, 1, sizes=(1, 1, 2))
    assert all(not group.elsewhere for group in placement_of(problem, plan, "hand").groups.values())
    plan["actor.generate_sequences"] = at(2, 3, sizes=(1, 2, 1))
    plan["actor.compute_log_prob"] = at(0, 1, sizes=(1, 1, 2))
    placement = placement_of(problem, plan, "hand")
    assert placement["actor"].elsewhere == (
        CallPlacement("generate_sequences", (2, 3), (1, 2, 1)),
        CallPlacement("compute_log_prob", (0, 1), (1, 1, 2)),
    )
    placement.save(tmp_path / "plan.yaml")
    assert Placement.load(tmp_path / "plan.yaml") == placement


# Ranks
ACTOR = {
    "model": "m",
    "train": hf.Megatron(tp=8, micro_tokens=512),
    "optim": hf.SGD(lr=1.0),
    "generate": hf.VLLM(sampling=hf.Sampling(max_tokens=7)),
    "bucket_mb": None,
    "offload": ("optimizer",),
    "overlap": False,
}


def where(*elsewhere: CallPlacement) -> GroupPlacement:
    train = hf.Megatron(pp=2, tp=2, dp=1, sequence_parallel=True, recompute=True)
    return GroupPlacement((0, 1, 2, 3), NODES, train, (1, 2), elsewhere, memory_fraction=0.8)


def test_replicas_have_what_their_calls_need():
    apart = where(
        CallPlacement("generate_sequences", (4, 5), (1, 2, 1)),
        CallPlacement("compute_log_prob", (6, 7), (1, 1, 2)),
        CallPlacement("compute_loss", (6, 7), (1, 1, 2)),
        CallPlacement("compute_ref_log_prob", (0, 1, 2, 3), (2, 2, 1)),
    )
    own, replicas, schedule = divided(hf.ActorWorker, apart, ACTOR, "actor")
    train = hf.Megatron(tp=1, pp=1, dp=2, micro_tokens=512, recompute=True, sequence_parallel=True)
    inference = {**ACTOR, "train": train, "optim": None, "generate": None, "offload": True}
    generate = hf.VLLM(tp=2, memory_fraction=0.8, sampling=hf.Sampling(max_tokens=7))
    rollout = {"model": "m", "generate": generate, "offload": True}
    assert replicas == [(hf.RolloutWorker, (4, 5), rollout), (hf.ActorWorker, (6, 7), inference)]
    scored = {"compute_log_prob": [1], "compute_loss": [1], "compute_ref_log_prob": [None]}
    assert schedule == {"generate_sequences": [0], "run": [0], **scored}
    assert own["generate"] is None, "who does not generate starts no engine"
    assert own["offload"] == ()
    assert own["optim"] == ACTOR["optim"]
    assert (own["train"].pp, own["train"].tp) == (2, 2)


def test_calls_of_one_method_in_their_order():
    here = CallPlacement("compute_log_prob", (0, 1, 2, 3), (2, 2, 1))
    there = CallPlacement("compute_log_prob", (4,), (1, 1, 1))
    own, _, schedule = divided(hf.ActorWorker, where(here, there, here), ACTOR, "actor")
    assert schedule == {"compute_log_prob": [None, 0, None]}
    assert own["generate"] == hf.VLLM(tp=2, memory_fraction=0.8, sampling=hf.Sampling(max_tokens=7))


def test_generation_within_the_groups_processes_is_the_primarys():
    inside = where(CallPlacement("generate_sequences", (0, 1, 2, 3), (1, 2, 2)))
    own, replicas, schedule = divided(hf.ActorWorker, inside, ACTOR, "actor")
    assert not replicas
    assert schedule == {"generate_sequences": [None]}
    assert own["generate"].tp == 2


@pytest.mark.parametrize(
    ("train", "generate", "followed"),
    [
        (hf.FSDP(tp=2, dp=4), (1, 8), False),
        (hf.ZeRO(stage=3, dp=8), (1, 4), False),
        (hf.ZeRO(stage=1, dp=8), (1, 8), True),
        (hf.Megatron(tp=2, dp=4), (1, 4), True),
        (hf.Megatron(tp=4, dp=2), (1, 2), False),
    ],
)
def test_sharded_weights_are_gathered_to_any_generation_sizes(train, generate, followed):
    """As `CallPlan.within` prices it."""
    p, t = generate
    away = CallPlacement("generate_sequences", tuple(range(8)), (p, t, 8 // t))
    where = GroupPlacement(away.devices, NODES, train, generate, (away,))
    settings = {"model": "m", "train": train, "generate": hf.VLLM(), "optim": None}
    own, replicas, _ = divided(hf.ActorWorker, where, settings, "actor")
    assert [of_class for of_class, *_ in replicas] == [hf.RolloutWorker] * followed
    assert (own["generate"] is None) == followed


def test_sharded_replicas_have_sizes_of_their_own():
    away = CallPlacement("compute_values", (4, 5), (1, 2, 1))
    where = GroupPlacement((0, 1, 2, 3), NODES, hf.FSDP(dp=4), None, (away,))
    _, ((_, _, own),), _ = divided(hf.CriticWorker, where, {"model": "m", "train": hf.FSDP(), "optim": None}, "critic")
    assert own["train"] == hf.FSDP(tp=2)


def test_who_can_have_replicas():
    class Own(hf.ActorWorker):
        @hf.register(hf.THREE_D_PROTO, repeat=lambda settings, call: 1, carries=True)
        def generate_sequences(self, batch: Any) -> Any: ...

    adapters = {**ACTOR, "train": hf.FSDP(lora=hf.LoRA())}
    assert can_replicate(hf.ActorWorker, ACTOR)
    assert not can_replicate(hf.ActorWorker, adapters)
    assert not can_replicate(Own, ACTOR)
    assert can_replicate(Own, {**ACTOR, "generate": None})
    assert can_replicate(hf.CriticWorker, {"model": "m", "train": hf.Megatron(), "optim": None})
    assert not can_replicate(hf.RewardWorker, {"model": None, "function": len})
    assert not can_replicate(hf.RolloutWorker, {"model": "m", "generate": hf.VLLM()})
    for worker_class, settings in ((hf.ActorWorker, adapters), (Own, ACTOR)):
        one = CallPlacement("generate_sequences", (4,), (1, 1, 1))
        with pytest.raises(PlacementError, match=r"on devices 4, and this group .*OneLayout\('actor'\)"):
            divided(worker_class, where(one), settings, "actor")


WHERE = GroupPlacement((0, 1, 2, 3), (8,), hf.Megatron(tp=2, pp=1, dp=2), (1, 4))


def test_sizes_are_the_placements_and_all_else_the_drivers():
    train = hf.Megatron(tp=8, pp=2, dp=1, recompute=True, micro_tokens=99, stage_layers=(3, 1))
    given = {"model": "m", "train": train, "generate": hf.VLLM(tp=8, sampling=hf.Sampling(max_tokens=3)), "optim": None}
    assert apply_placement(WHERE, given) == {
        "model": "m",
        "train": hf.Megatron(tp=2, dp=2, recompute=True, micro_tokens=99),
        "generate": hf.VLLM(tp=4, sampling=hf.Sampling(max_tokens=3)),
        "optim": None,
    }
    assert given["train"] is train


def test_ranks_that_share_rows_and_experts_are_the_placements():
    found = hf.Megatron(tp=2, dp=2, cp=2, ep=4)
    where = GroupPlacement(tuple(range(8)), (8,), found, offload=True)
    own = apply_placement(where, {"train": hf.Megatron(ep=2, etp=1), "offload": False})
    assert own == {"train": hf.Megatron(tp=2, dp=2, cp=2, ep=4, etp=1), "offload": True}
    assert own["train"].grid(8) == RankGrid(t=2, d=4, ep=4, etp=1)
    assert apply_placement(where, {"train": hf.FSDP()})["train"] == hf.FSDP(tp=2)
    assert apply_placement(where, {"offload": ("optimizer",)}) == {"offload": ("optimizer",)}


def test_what_a_price_rests_on_is_the_placements_unless_the_driver_chose():
    found = hf.Megatron(tp=2, dp=2, micro_tokens=4096, recompute=True, sequence_parallel=True)
    where = GroupPlacement((0, 1, 2, 3), (8,), found)
    assert apply_placement(where, {"train": hf.Megatron()})["train"] == found
    assert apply_placement(where, {"train": hf.Megatron(micro_tokens=512)})["train"].micro_tokens == 512


def test_generation_has_the_memory_that_it_was_priced_with():
    where = GroupPlacement((0,), (1,), hf.Megatron(), (1, 1), memory_fraction=0.73)
    assert apply_placement(where, {"generate": hf.VLLM()})["generate"].memory_fraction == 0.73
    assert apply_placement(where, {"generate": hf.VLLM(memory_fraction=0.3)})["generate"].memory_fraction == 0.3
    without = GroupPlacement((0,), (1,), hf.Megatron(), (1, 1))
    assert apply_placement(without, {"generate": hf.VLLM()})["generate"] == hf.VLLM()


@pytest.mark.parametrize(("given", "rows"), [({}, 1024), ({"max_sequences": 100}, 100)])
def test_stages_of_generation_have_as_many_rows_each_as_one_engine(given, rows):
    """vLLM's bound is for all micro-batches."""
    where = GroupPlacement((0, 1, 2, 3), (4,), hf.Megatron(), (4, 1))
    assert apply_placement(where, {"generate": hf.VLLM(**given)})["generate"].max_sequences == rows


def test_stages_that_are_as_many_stay():
    where = GroupPlacement((0, 1), (2,), hf.Megatron(pp=2, dp=1))
    assert apply_placement(where, {"train": hf.Megatron(pp=2, stage_layers=(3, 1))})["train"].stage_layers == (3, 1)


def test_sharded_strategies_get_their_sizes_and_prices(caplog: pytest.LogCaptureFixture):
    def at(found: hf.FSDP | hf.ZeRO) -> GroupPlacement:
        return GroupPlacement((0, 1, 2, 3), (8,), found)

    with caplog.at_level(logging.WARNING):
        found = apply_placement(at(hf.FSDP(tp=2, dp=2, micro_tokens=99)), {"train": hf.FSDP(dp=8, offload=True)})
        assert found == {"train": hf.FSDP(tp=2, offload=True, micro_tokens=99)}
        found = apply_placement(
            at(hf.ZeRO(stage=2, dp=4, recompute=True)), {"train": hf.ZeRO(stage=2, dp=8, micro_tokens=7)}
        )
        assert found == {"train": hf.ZeRO(stage=2, recompute=True, micro_tokens=7)}
        assert not caplog.records
        adapted = hf.FSDP(lora=hf.LoRA())
        assert apply_placement(WHERE, {"train": adapted}) == {"train": adapted}
        assert apply_placement(WHERE, {"train": hf.ZeRO(stage=1)}) == {"train": hf.ZeRO(stage=1)}
        assert apply_placement(at(hf.FSDP(tp=2, dp=2)), {"train": hf.Megatron()})["train"].tp == 2
    assert len(caplog.records) == 3, "their times were those of another strategy"


def test_functions_and_what_does_not_generate():
    settings = {"function": len, "train": hf.Megatron(), "generate": None}
    assert apply_placement(GroupPlacement((0,), (2,)), settings) == settings
