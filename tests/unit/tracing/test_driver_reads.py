"""Traces of loops whose driver reads results: later calls wait for the calls that write these."""

from __future__ import annotations

from typing import Any

import torch

import hybridflow as hf
from hybridflow.batch.batch import Batch
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.describe.graph import Graph, GraphBuilder, Source
from hybridflow.tracing.trace import PUBLISHED, trace_driver

SMALL: ModelSpec = PUBLISHED["llama3-7b"]
GENERATE, REWARD, REF = "actor.generate_sequences", "reward.compute_reward", "reference.compute_ref_log_prob"
UPDATE, SECOND = "actor.update_actor", f"{GENERATE}#2"


def groups() -> dict[str, Any]:
    sampling = hf.VLLM(sampling=hf.Sampling(max_tokens=8))
    return {
        "actor": hf.trace_spec(hf.ActorWorker, model=SMALL, optim=hf.Adam(lr=1e-6), generate=sampling),
        "rollout": hf.trace_spec(hf.RolloutWorker, model=SMALL, generate=sampling),
        "reference": hf.trace_spec(hf.ReferenceWorker, model=SMALL),
        "reward": hf.trace_spec(hf.RewardWorker, function=lambda completions: [0.0] * len(completions)),
    }


def waits(graph: Graph, target: str) -> set[tuple[str, int]]:
    """Calls that the target waits for only because the driver reads their results."""
    return {(edge.source, edge.distance) for edge in graph.into(target) if edge.kind == "data" and not edge.columns}


def test_best_of_n():
    """The update and the reference work on the best row of each group, which the rewards tell."""

    def step(prompts, actor, reference, reward):
        batch = actor.generate_sequences(prompts, n=4)
        batch |= reward.compute_reward(batch)
        scores = batch.get("rewards")["rewards"].reshape(-1, 4)
        best = batch.take((scores.argmax(dim=1) + 4 * torch.arange(len(scores))).tolist())
        best |= reference.compute_ref_log_prob(best)
        actor.update_actor(best, loss="sft")

    graph = hf.trace(step, groups())
    assert waits(graph, REF) == {(REWARD, 0)}
    assert waits(graph, UPDATE) == {(REWARD, 0)}
    assert waits(graph, REWARD) == set() == waits(graph, GENERATE)
    assert graph.call(REF).rows == graph.call(UPDATE).rows == 0.25


def test_rejection_sampling():
    """A second generation for the rows that were refused, and an update of those that were not, by a mask."""

    def step(prompts, actor, reward):
        first = actor.generate_sequences(prompts)
        first |= reward.compute_reward(first)
        good = first["rewards"].get() > 0.5
        second = actor.generate_sequences(prompts, temperature=0.5)
        second |= reward.compute_reward(second)
        kept = hf.BatchRef.concat([first[good], second[second["rewards"].get() > 0]])
        actor.update_actor(kept, loss="sft")

    graph = hf.trace(step, groups())
    assert waits(graph, SECOND) == {(REWARD, 0)}
    assert waits(graph, f"{REWARD}#2") == set(), "it follows from the rows that it reads"
    assert waits(graph, UPDATE) == {(f"{REWARD}#2", 0)}, "the first reward follows from the second"
    assert graph.call(UPDATE).rows == 2, "good rows are all rows"


def test_curriculum():
    """The next prompts depend on this iteration's rewards, also where no weights are stepped between."""
    level = [0]

    def step(prompts, rollout, reward):
        batch = rollout.generate_sequences(prompts[: max(1, len(prompts) - level[0] % 2)])
        batch |= reward.compute_reward(batch)
        level[0] += float(batch.metrics().get()["reward/mean"]) > 0.7

    assert waits(hf.trace(step, groups()), "rollout.generate_sequences") == {(REWARD, 1)}


def test_metrics_of_the_iteration_before_hold_nothing_back(tmp_path):
    """A tracker reads an iteration late."""

    def driver():
        pool, given = hf.ResourcePool(1), groups()
        actor, reward = (given[name].worker_class.on(pool, **given[name].settings) for name in ("actor", "reward"))
        tracker = hf.Tracker(tmp_path / "run")
        while True:
            batch = actor.generate_sequences(Batch({"prompt": ["a", "b"]}))
            batch |= reward.compute_reward(batch)
            tracker.log(batch.metrics(), actor.update_actor(batch, loss="sft"))

    graph = trace_driver(driver).graph
    assert len(graph.calls) == 3
    assert all(not waits(graph, call.name) for call in graph.calls)


def test_an_update_that_the_driver_reads():
    def step(prompts, actor, rollout, reward):
        batch = rollout.generate_sequences(prompts)
        batch |= reward.compute_reward(batch)
        loss = actor.update_actor(batch, loss="sft").get()
        assert loss["actor/loss"] == 0.0

    graph = hf.trace(step, groups())
    assert waits(graph, "rollout.generate_sequences") == {(UPDATE, 1)}
    assert waits(graph, UPDATE) == set(), "the same edge as that of its weights"


def test_waits_follow_the_last_read():
    """Only those that no other edge implies are kept."""
    program = GraphBuilder()
    for _ in range(3):
        program.begin()
        first = program.call("a", "first", "generation", {}, ["x"])
        second = program.call("b", "second", "inference", {"x": [first]}, ["y"])
        program.wait([first, second])
        program.call("c", "third", "inference")
        program.call("d", "fourth", "inference", {"y": [second]})
        program.wait([Source("nowhere", 0)])
    graph = program.graph()
    assert {(e.source, e.target, e.distance) for e in graph.edges} == {
        ("a.first", "b.second", 0),
        ("b.second", "c.third", 0),
        ("b.second", "d.fourth", 0),
        ("b.second", "a.first", 1),
    }  # fmt: skip
