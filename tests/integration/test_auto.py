"""Placements at work: groups are where a placement says, with its sizes, whatever their driver says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import hybridflow as hf
from hybridflow.cluster.session import Session
from hybridflow.placement import GroupPlacement, Placement
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.mesh import Parallel
from tests.tiny_models import make_rows

NODES = (2,)


@pytest.fixture(scope="module", autouse=True)
def hosts_of_placements(cluster) -> Iterator[hf.ResourcePool]:
    """The pool that placements over these nodes open, or find."""
    with hf.ResourcePool.over(NODES) as pool:
        yield pool


@pytest.fixture
def closing(cluster) -> Iterator[None]:
    """Closes the groups that the test placed."""
    earlier = set(cluster.groups)
    yield
    for name in set(cluster.groups) - earlier:
        cluster.groups[name].close()


def where(*devices: int, generate: tuple[int, int] | None = None, **sizes: int) -> GroupPlacement:
    return GroupPlacement(devices, NODES, hf.Megatron(**sizes), generate)


def sizes(group: Any) -> tuple[tuple[int, ...], int, int, int]:
    return group.members, group.grid.p, group.grid.t, group.grid.d


def test_groups_are_where_the_placement_says(cluster, closing, policy):
    placement = Placement(
        NODES,
        {
            "actor": where(0, 1, tp=2, dp=1),
            "critic": replace(where(1, pp=1, dp=1), offload=True),
            "reward": GroupPlacement((1,), NODES),
        },
    )
    actor = hf.ActorWorker.on(placement.groups["actor"], model=policy, optim=hf.SGD(lr=0.1))
    made: dict[str, Any] = {}

    def driver(rows: int) -> dict[str, float]:
        pool = hf.ResourcePool([8])
        assert pool.size == 2, "one pool over the whole cluster"
        optim = hf.SGD(lr=0.1)
        made["critic"] = hf.CriticWorker.on(
            pool[0:4], model=policy, train=hf.Megatron(tp=4, micro_tokens=64), optim=optim
        )
        made["reward"] = hf.RewardWorker.on(hf.ResourcePool(1), function=lambda completions: [1.0] * len(completions))
        made["other"] = hf.ReferenceWorker.on(pool, model=policy, train=hf.Megatron(tp=2), name="other")
        batch = hf.BatchRef.from_batch(make_rows(rows))
        batch |= made["critic"].compute_values(batch)
        return made["critic"].update_critic(batch).get()

    figures = hf.auto(placement=placement)(driver)(6)
    assert figures["critic/loss"] > 0
    assert {name: sizes(group) for name, group in made.items()} == {
        "critic": ((1,), 1, 1, 1),
        "reward": ((1,), 1, 1, 1),
        "other": ((0, 1), 1, 2, 1),
    }
    assert made["critic"].settings["train"] == hf.Megatron(dp=1, micro_tokens=64)
    assert made["critic"].settings["offload"] is True
    assert made["other"].settings["offload"] is False
    assert sizes(actor) == ((0, 1), 1, 2, 1)
    assert actor.pool_name == made["critic"].pool_name, "all groups of placements over these nodes share a pool"
    batch = hf.BatchRef.from_batch(make_rows(6))
    assert (batch | actor.compute_log_prob(batch)).get("old_log_probs").rows == 6
    assert cluster.assignment is None


def test_a_group_of_a_placement_that_is_not_placed_is_said(cluster, closing, caplog):
    """Here nothing else says so: the driver is not checked before it runs, whose results are there."""
    placement = Placement(NODES, {"rewrad": GroupPlacement((0,), NODES)})

    def driver() -> None:
        hf.RewardWorker.on(hf.ResourcePool(1), function=lambda completions: [1.0] * len(completions), name="reward")

    hf.auto(placement=placement)(driver)()
    assert "for a group 'rewrad', which the driver does not place. Did you mean 'reward'" in caplog.text
    cluster.groups["reward"].close()


def test_a_placement_from_outside_holds_for_a_driver_that_plans(cluster):
    inner = hf.auto(placement=Placement(NODES, {}))(lambda: Session.assignment)
    given = Placement(NODES, {}, found_by="mine")
    assert hf.auto(placement=given)(inner)() is given


def test_an_assignment_ends_with_its_driver(cluster):
    def driver() -> None:
        assert Session.current().assignment is not None
        raise KeyError("of the driver")

    with pytest.raises(KeyError, match="of the driver"):
        hf.auto(placement=Placement(NODES, {}))(driver)()
    assert cluster.assignment is None


ELSEWHERE = """
import ray
import hybridflow as hf
from hybridflow.placement import GroupPlacement, Placement

placement = Placement((64,) * 4, {"reward": GroupPlacement((0,), (64,) * 4)}, cluster="a100:4x64")
try:
    hf.auto(placement=placement)(lambda: hf.ResourcePool(1))()
except hf.errors.PlacementError as error:
    assert "planned for a100:4x64, which is not here" in str(error), error
    assert not ray.is_initialized()
    print("refused")
"""


@pytest.mark.slow
def test_a_placement_for_another_cluster_leaves_nothing_behind():
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, timeout=100)
    assert done.stdout == "refused\n", done.stderr


def early_letters(completions: list[str]) -> list[float]:
    return [sum(letter in "abcdefgh" for letter in text) / 6 for text in completions]


@pytest.mark.parametrize(
    "constraints",
    [(), (hf.planner.Pin("actor", parallel=Parallel(1, 1, 1), generate=Parallel(1, 1, 2)),)],
    ids=["free", "apart"],
)
def test_a_driver_is_planned_and_runs_as_found(cluster, closing, settle, policy, constraints):
    """GRPO on two devices of this machine: found, placed, and trained."""
    settle()
    groups: dict[str, Any] = {}
    prompts = [{"prompt": "abc"}, {"prompt": "hello you"}] * 8

    def driver(steps: int) -> list[dict[str, float]]:
        pool = hf.ResourcePool([64])
        optim, generate = hf.SGD(lr=0.1), hf.VLLM(tp=8, sampling=hf.Sampling(max_tokens=6, seed=1))
        groups["actor"] = actor = hf.ActorWorker.on(pool, model=policy, optim=optim, generate=generate)
        groups["reference"] = reference = hf.ReferenceWorker.on(pool[8:16], model=policy)
        groups["reward"] = reward = hf.RewardWorker.on(pool, function=early_letters)
        figures = []
        for batch in hf.PromptLoader(prompts, batch_size=4, steps=steps):
            batch = actor.generate_sequences(batch, n=2)
            batch |= reward.compute_reward(batch)
            batch |= actor.compute_log_prob(batch)
            batch |= reference.compute_ref_log_prob(batch)
            batch |= hf.compute_advantage(batch, "grpo")
            figures.append(actor.update_actor(batch, kl_coef=0.1))
        return [one.get() for one in figures]

    planned = hf.auto(driver, cluster=ClusterSpec.this_machine(2, memory=16e9), constraints=constraints, budget_s=0.5)
    placement = planned.plan(2)
    assert "actor" not in cluster.groups, "planning places nothing"
    away = {name: [one.method for one in group.elsewhere] for name, group in placement.groups.items()}
    assert "generate_sequences" in away["actor"] or not constraints
    figures = planned(2)
    assert len(figures) == 2
    assert all(one["actor/grad_norm"] > 0 for one in figures)
    for name, group in groups.items():
        found = placement[name]
        assert group.members == found.devices
        if found.train is not None:
            assert (group.grid.p, group.grid.t) == (found.train.pp, found.train.tp)
        assert [group.has_replica_for(method) for method in away[name]] == [True] * len(away[name])
        if found.generate is not None and "generate_sequences" not in away[name]:
            generation = group.grid.generation()
            assert (generation.p, generation.t) == found.generate


@pytest.mark.parametrize(
    "rule", [hf.planner.Apart("actor", "rollout"), hf.planner.Together("actor", "rollout")], ids=["apart", "together"]
)
def test_a_stream_is_planned_and_runs_as_found(cluster, closing, settle, policy, rule):
    """Rollouts generate ahead on devices of their own, or take turns with the actor on common ones."""
    settle()
    groups: dict[str, Any] = {}
    prompts = [{"prompt": "abc"}, {"prompt": "hello you"}] * 8

    def driver(steps: int) -> list[tuple[dict[str, float], int]]:
        pool = hf.ResourcePool([64])
        sampling = hf.Sampling(max_tokens=6, seed=1)
        groups["actor"] = actor = hf.ActorWorker.on(pool, model=policy, optim=hf.SGD(lr=0.1))
        groups["rollout"] = rollout = hf.RolloutWorker.on(pool, model=policy, generate=hf.VLLM(sampling=sampling))
        groups["reward"] = reward = hf.RewardWorker.on(pool, function=early_letters)
        hf.sync_weights(actor, rollout)
        figures = []
        loader = hf.PromptLoader(prompts, batch_size=4, steps=steps)
        for batch in hf.stream(loader, rollout, rows=8, n=2, max_staleness=1):
            batch |= actor.compute_log_prob(batch)
            batch |= reward.compute_reward(batch)
            batch |= hf.compute_advantage(batch, "grpo")
            figures.append((actor.update_actor(batch), batch))
            hf.sync_weights(actor, rollout)
        return [(one.get(), batch.get().rows) for one, batch in figures]

    planned = hf.auto(driver, cluster=ClusterSpec.this_machine(2, memory=16e9), constraints=(rule,), budget_s=0.5)
    placement = planned.plan(3)
    figures = planned(3)
    assert [rows for _, rows in figures] == [8] * 3
    assert all(one["actor/grad_norm"] > 0 for one, _ in figures)
    for name, group in groups.items():
        assert group.members == placement[name].devices
