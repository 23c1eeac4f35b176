"""Traces of loops whose driver reads results: later calls wait for the calls that write these."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.batch.batch import Batch
from hybridflow.errors import ConfigError
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.timeline import simulate
from hybridflow.planner.describe.graph import Graph, GraphBuilder, Source
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.tracing.trace import PUBLISHED, check_driver, trace_driver

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


def placed(*names: str, devices: int = 1) -> list[Any]:
    """Groups of a driver, on one pool."""
    pool, given = hf.ResourcePool(devices), groups()
    return [given[name].worker_class.on(pool, **given[name].settings) for name in names]


def waits(graph: Graph, target: str) -> set[tuple[str, int]]:
    """Calls that the target waits for only because the driver reads their results."""
    return {(edge.source, edge.distance) for edge in graph.into(target) if edge.kind == "driver"}


def assert_order(graph: Graph, *edges: tuple[str, str, int]) -> None:
    """Timelines keep the edges (source, target, distance), and moves of the weights of their targets too, for some
    durations; groups are on devices of their own, where generation has another layout than the other calls."""
    draw, own = random.Random(0), {group: Mesh.of(2 * i, 2) for i, group in enumerate(graph.groups)}
    assert set(edges) <= {(edge.source, edge.target, edge.distance) for edge in graph.edges}
    plan = {
        call.name: CallPlan(own[call.group], Parallel(t=2) if call.kind == "generation" else Parallel(d=2))
        for call in graph.calls
        if call.group in own
    }
    for _ in range(5):
        seconds = {call.name: draw.random() for call in graph.calls}
        found = simulate(graph, plan, seconds, reallocation=lambda *_: 0.5)
        stops = {(span.call, span.iteration): span.stop for span in found.spans if span.moves is None}
        driver = {(edge.source, edge.target, edge.distance) for edge in graph.edges if edge.kind == "driver"}
        for source, target, distance in edges:
            for span in found.spans:
                waits = span.moves is None or (source, target, distance) in driver
                if span.call == target and span.iteration >= distance and waits:
                    assert span.start >= stops[source, span.iteration - distance], (source, span)


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
    assert_order(graph, (GENERATE, REWARD, 0), (REWARD, REF, 0), (REWARD, UPDATE, 0), (UPDATE, GENERATE, 1))


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
    assert_order(graph, (REWARD, SECOND, 0), (f"{REWARD}#2", UPDATE, 0), (UPDATE, GENERATE, 1), (UPDATE, SECOND, 1))


def test_metrics_of_the_iteration_before_hold_nothing_back(tmp_path):
    """A tracker reads an iteration late."""

    def driver():
        (actor, reward), tracker = placed("actor", "reward"), hf.Tracker(tmp_path / "run")
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


# Loops of algorithms


def test_moves_of_weights_wait_for_what_the_driver_reads():
    """The actor's weights go into another layout for a second generation, which the driver asks for after a reward."""

    def step(prompts, actor, reward):
        batch = actor.generate_sequences(prompts)
        batch |= reward.compute_reward(batch)
        actor.compute_log_prob(batch)
        again = batch | {"hint": batch["rewards"].get()}
        actor.update_actor(actor.generate_sequences(again.select("prompt")), loss="sft")

    graph = hf.trace(step, groups())
    assert waits(graph, SECOND) == {(REWARD, 0)}
    assert_order(graph, (REWARD, SECOND, 0))


def test_reads_hold_moves_also_where_the_data_implies_them():
    """The second generation reads what another call made of the reward; its weights would be moved earlier."""

    def step(prompts, actor, reward):
        batch = actor.generate_sequences(prompts, n=2)
        batch |= actor.compute_log_prob(batch) | reward.compute_reward(batch)
        batch["rewards"].get()
        batch |= hf.compute_advantage(batch, "grpo")
        prompts = batch.rename(advantages="hint").select("prompt", "hint", "rewards")
        actor.update_actor(actor.generate_sequences(prompts), loss="sft")

    graph = hf.trace(step, groups())
    assert waits(graph, SECOND) == {(REWARD, 0)}
    assert waits(graph, "hybridflow.compute_advantage") == set(), "it has no weights, and reads the rewards"
    assert_order(graph, (REWARD, SECOND, 0))


def test_dynamic_sampling_with_refill():
    """Groups are drawn until a batch is full: each round waits for the rewards of the one before."""

    def driver():
        actor, reward = placed("actor", "reward")
        loader = hf.PromptLoader([{"prompt": "a"}] * 64, batch_size=4)

        def sample(prompts):
            batch = actor.generate_sequences(prompts, n=2)
            return batch | reward.compute_reward(batch)

        for batch in hf.dynamic_sampling(loader, sample, rows=16):
            batch |= actor.compute_log_prob(batch)
            actor.update_actor(batch | hf.compute_advantage(batch, "grpo"))

    graph = trace_driver(driver).graph
    assert waits(graph, SECOND) == {(REWARD, 0)}
    assert waits(graph, "actor.compute_log_prob") == {(f"{REWARD}#2", 0)}
    assert waits(graph, GENERATE) == set() == waits(graph, UPDATE)
    assert_order(graph, (REWARD, SECOND, 0), (f"{REWARD}#2", "actor.compute_log_prob", 0), (UPDATE, GENERATE, 1))


def test_curriculum_by_the_rewards_of_the_last_step(tmp_path):
    """The next prompts are chosen by the mean reward: an edge over the iteration's boundary."""

    def driver():
        rollout, reward = placed("rollout", "reward", devices=2)
        level, tracker = 0, hf.Tracker(tmp_path / "run")
        while level < 100:
            batch = rollout.generate_sequences(Batch({"prompt": ["x" * (level + 1)] * 4}))
            batch |= reward.compute_reward(batch)
            level += batch.get("rewards")["rewards"].mean().item() > 0.5
            tracker.log(batch.metrics())

    graph = trace_driver(driver).graph
    assert waits(graph, "rollout.generate_sequences") == {(REWARD, 1)}
    assert_order(graph, (REWARD, "rollout.generate_sequences", 1))


def test_early_stopping_of_epochs():
    """Whether there is a further epoch depends on the KL of the one before."""

    def step(prompts, actor, reward, reference):
        batch = actor.generate_sequences(prompts, n=2)
        batch |= reward.compute_reward(batch)
        batch |= actor.compute_log_prob(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        for _ in range(3):
            if actor.update_actor(batch).get()["actor/kl"] > 0.1:
                break
        reference.compute_ref_log_prob(batch)

    graph = hf.trace(step, groups())
    last = f"{UPDATE}#3"
    assert [call.name for call in graph.calls if call.kind == "training"] == [UPDATE, f"{UPDATE}#2", last]
    assert waits(graph, REF) == {(last, 0)}
    assert waits(graph, f"{UPDATE}#2") == set() == waits(graph, last), "the edges of the weights say it"
    assert waits(graph, GENERATE) == set(), "its weights are those of the last epoch"
    assert_order(graph, (UPDATE, f"{UPDATE}#2", 0), (f"{UPDATE}#2", last, 0), (last, REF, 0), (last, GENERATE, 1))


def test_replay_buffer():
    """An update of this batch and of the one before: nothing is read on the driver."""
    buffer = []

    def step(prompts, rollout, actor, reward):
        batch = rollout.generate_sequences(prompts)
        buffer.append(batch | reward.compute_reward(batch))
        rows = hf.BatchRef.concat(buffer[-2:])
        actor.update_actor(rows, loss="sft")

    graph = hf.trace(step, groups())
    assert all(not waits(graph, call.name) for call in graph.calls)
    draw = "rollout.generate_sequences"
    assert {(e.source, e.distance) for e in graph.into(UPDATE)} == {(draw, 0), (draw, 1), (UPDATE, 1)}
    assert_order(graph, (draw, UPDATE, 0), (draw, UPDATE, 1))


# Ways to read

DRAW, LATER = "rollout.generate_sequences", GENERATE
READS: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "get": (lambda batch: batch.get(), {REWARD, REF}),
    "get of a column": (lambda batch: batch.get("rewards"), {REWARD}),
    "get of columns": (lambda batch: batch.get(["response", "ref_log_probs"]), {REF}),
    "a column": (lambda batch: batch["rewards"].get(), {REWARD}),
    "an early column": (lambda batch: batch["response_ids"].get(), {DRAW}),
    "some rows": (lambda batch: batch[:2]["rewards"].get(), {REWARD}),
    "a mask": (lambda batch: batch[batch["finished"]], {DRAW}),
    "groups of rows": (lambda batch: batch.split(2, groups=True), set()),  # their numbers are the driver's
    "a renamed column": (lambda batch: batch.rename(rewards="old").select("old").get(), {REWARD}),
    "no data": (lambda batch: (len(batch), repr(batch), batch._repr_html_(), "rewards" in batch, batch.columns), set()),
    "rows by number": (lambda batch: batch[[0, 2]].take([1]).repeat(2), set()),
    "a split": (lambda batch: batch.balance(2, by="response_ids"), set()),
    "metrics to come": (lambda batch: repr(batch.metrics()), set()),
    "own columns": (lambda batch: (batch | {"mine": torch.zeros(len(batch))}).get("mine"), set()),
}


@pytest.mark.parametrize("way", READS)
def test_later_calls_wait_for_the_data_that_is_read(way: str):
    read, sources = READS[way]

    def step(prompts, rollout, reference, reward, actor):
        batch = rollout.generate_sequences(prompts, n=2)
        batch |= reward.compute_reward(batch) | reference.compute_ref_log_prob(batch)
        read(batch)
        actor.generate_sequences(prompts)

    graph = hf.trace(step, groups())
    assert waits(graph, LATER) == {(source, 0) for source in sources}
    assert waits(graph, REF) == set() == waits(graph, REWARD), "they are issued before"


def test_metrics_wait_for_all_that_they_are_computed_from():
    def step(prompts, rollout, reference, reward, actor):
        batch = rollout.generate_sequences(prompts)
        batch |= reward.compute_reward(batch) | reference.compute_ref_log_prob(batch)
        float(batch.without("ref_log_probs").metrics().get()["reward/mean"])
        actor.generate_sequences(prompts)

    assert waits(hf.trace(step, groups()), LATER) == {(REWARD, 0)}


def test_rows_of_another_call_are_not_waited_for():
    def step(prompts, rollout, actor, reference, reward):
        first, second = rollout.generate_sequences(prompts), rollout.generate_sequences(prompts)
        hf.BatchRef.concat([first, second])[: len(first)].get("response_ids")
        actor.generate_sequences(prompts)

    assert waits(hf.trace(step, groups()), LATER) == {(DRAW, 0)}


def test_results_without_rows():
    """A weight sync and a checkpoint end after the calls of their groups."""

    def step(prompts, rollout, actor, reference, reward):
        batch = rollout.generate_sequences(prompts)
        actor.update_actor(batch, loss="sft")
        hf.sync_weights(actor, rollout).get()
        batch |= reference.compute_ref_log_prob(batch)
        actor.compute_log_prob(batch)
        actor.save("somewhere")
        reward.compute_reward(batch)

    graph = hf.trace(step, groups())
    assert waits(graph, REF) == {(UPDATE, 0)}
    assert waits(graph, REWARD) == {("actor.compute_log_prob", 0)}


def test_a_call_that_is_asked_for_its_end():
    def step(prompts, rollout, actor, reference, reward):
        batch = rollout.generate_sequences(prompts)
        update = actor.update_actor(batch, loss="sft")
        if update.done():
            reference.compute_ref_log_prob(batch)

    assert waits(hf.trace(step, groups()), REF) == {(UPDATE, 0)}


def test_two_updates_together():
    def step(prompts, rollout, actor, reward):
        batch = rollout.generate_sequences(prompts)
        one, other = actor.update_actor(batch, loss="sft"), actor.update_actor(batch, loss="sft")
        for update in hf.together(one, other):
            update.get()
        reward.compute_reward(batch)

    graph = hf.trace(step, groups())
    assert waits(graph, REWARD) == {(f"{UPDATE}#2", 0)}


def test_reads_in_a_loop_over_a_stream():
    """They hold back what the loop does with the batch, not the generation of later ones."""

    def driver():
        (rollout,) = placed("rollout", devices=2)
        actor, reference, reward = placed("actor", "reference", "reward", devices=2)
        loader = hf.PromptLoader([{"prompt": "a"}] * 64, batch_size=4)
        for batch in hf.stream(loader, rollout, rows=16, n=4, max_staleness=2):
            batch |= reward.compute_reward(batch)
            scores = batch.get("rewards")["rewards"].reshape(-1, 4)
            best = batch.take((scores.argmax(dim=1) + 4 * torch.arange(len(scores))).tolist())
            best |= reference.compute_ref_log_prob(best)
            actor.update_actor(best, loss="sft").get()
            hf.sync_weights(actor, rollout).get()

    graph = trace_driver(driver).graph
    assert waits(graph, REF) == {(REWARD, 0)} == waits(graph, UPDATE)
    assert {(edge.source, edge.distance) for edge in graph.into(DRAW)} == {(UPDATE, 3)}
    assert graph.call(UPDATE).rows == 0.25


# Loops that do not end with made-up results


def until_good(prompts, actor, reward):
    kept = []
    while len(kept) < 64:
        batch = actor.generate_sequences(prompts)
        rewards = (batch | reward.compute_reward(batch))["rewards"].get().tolist()
        kept += [score for score in rewards if score > 2]


def until_metrics_are_good(prompts, actor, reward):
    metrics = actor.generate_sequences(prompts).metrics()
    while metrics.get()["reward/mean"] < 0.5:
        pass


def until_nothing_fails(prompts, actor, reward):
    while True:
        try:
            batch = actor.generate_sequences(prompts)
            assert batch.get("response")["response"][0]
            return
        except Exception:
            continue


@pytest.mark.parametrize("step", [until_good, until_metrics_are_good, until_nothing_fails])
def test_a_loop_until_results_are_good(step: Callable[..., Any]):
    with pytest.raises(ConfigError, match=r"one iteration .* has (issued|read) .* `for _ in range\(8\)`"):
        hf.trace(step, groups())

    def driver():
        actor, reward = placed("actor", "reward")
        for prompts in hf.PromptLoader([{"prompt": "a"}] * 4, batch_size=2):
            step(prompts, actor, reward)

    with pytest.raises(ConfigError, match="trace makes results up"):
        trace_driver(driver)
    check_driver(driver)  # says nothing of a loop whose results it does not know


def test_a_loop_before_the_loop_until_results_are_good():
    def driver():
        (actor,) = placed("actor")
        while not actor.generate_sequences(Batch({"prompt": ["a"]})).get("response")["response"][0]:
            pass

    with pytest.raises(ConfigError, match="has issued 4,096 calls"):
        trace_driver(driver)


def test_many_calls_before_the_loop():
    """A warm-up, whose figures the driver reads, is no loop without an end."""

    def driver():
        (actor,) = placed("actor")
        text = {"row_id": torch.arange(1)} | {key: [torch.tensor([1])] for key in ("prompt_ids", "response_ids")}
        text = Batch(text | {"response_mask": [torch.tensor([True])]})
        for _ in range(1100):
            actor.update_actor(text, loss="sft").get()
        for prompts in hf.PromptLoader([{"prompt": "a"}] * 4, batch_size=2):
            actor.update_actor(actor.generate_sequences(prompts), loss="sft")

    assert [call.name for call in trace_driver(driver).graph.calls] == [GENERATE, UPDATE]


def test_a_loop_that_never_trains_as_much_again():
    """Two groups with an optimizer were trained once, in the same step."""
    steps = itertools.count()

    def step(prompts, actor, rollout):
        batch = rollout.generate_sequences(prompts)
        if next(steps) == 0:
            actor.update_actor(batch, loss="sft")

    assert hf.trace(step, groups()).trained == frozenset()
    assert next(steps) < 200
