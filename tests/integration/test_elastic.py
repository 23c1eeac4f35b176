"""Elastic devices on real hosts: rows that move, actors that grow and shrink, and what a run makes of bad policies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

import hybridflow as hf
from hybridflow.config import Until
from hybridflow.errors import ConfigError, WorkerError
from hybridflow.planner.elastic.policies import gain, grow_actor, lend_actor, released_rollouts, return_actor
from hybridflow.planner.elastic.state import Action, Allocate, Finalize, Migrate, Policy, Release, State, applied
from hybridflow.streams.elastic_devices import POLICIES, GroupSizes
from hybridflow.streams.replica_calls import ReplicaCalls

pytestmark = pytest.mark.slow

PROMPTS = [{"prompt": text} for text in ("abc", "hello you", "xyz", "the end", "k", "a b c", "zz", "four")]
SAMPLING = hf.Sampling(max_tokens=48, seed=5)
ITERATIONS, MINIBATCHES, N = 2, 4, 2


@pytest.fixture(scope="module")
def rollout(keep, pool, policy) -> hf.WorkerGroup:
    """Four replicas."""
    return keep(hf.RolloutWorker, pool, model=policy, generate=hf.VLLM(sampling=SAMPLING))


@contextmanager
def placed(pool, model: Path, rollout: hf.WorkerGroup, policy: str | Policy, **settings: Any) -> Iterator[hf.Elastic]:
    """Weights stay as they are: no step is large enough for float32."""
    actor = hf.ActorWorker.on(pool[0:1], model=model, train=hf.FSDP(), optim=hf.SGD(lr=1e-30))
    reference = hf.ReferenceWorker.on(pool[0:1], model=model, train=hf.FSDP())
    try:
        yield hf.Elastic(pool, actor=actor, rollout=rollout, inference=[reference], policy=policy, **settings)
    finally:
        for group in (actor, reference):
            group.close()


@pytest.fixture(scope="module")
def judge(keep, hosts) -> hf.WorkerGroup:
    return keep(
        hf.RewardWorker, hosts[4:5], function=lambda completions, **columns: [float(len(text)) for text in completions]
    )


def moving(seed: int) -> Policy:
    """Any legal moves, at every event."""
    random = Random(seed)

    def policy(state: State) -> list[Action]:
        if state.event == "start":
            return lend_actor(state) if random.random() < 0.7 else []
        if not state.actor.instances:
            return return_actor(state) if random.random() < 0.5 or not state.running_rows else []
        actions: list[Action] = []
        if state.rollout.instances > 1:
            actions += released_rollouts(state, random.randint(1, state.rollout.instances - 1))
            return actions + grow_actor(applied(state, actions)) if random.random() < 0.7 else actions
        smaller = [size for size in state.actor.sizes if size < state.actor.instances]
        if smaller and state.running_rows:
            actions.append(Release("actor", state.actor.instances - smaller[0]))
            room = applied(state, actions).rollout_room
            actions += [Allocate("rollout", room)] if room else []
        return actions

    return policy


def early(state: State) -> list[Action]:
    """Lent devices return as soon as a row has finished, while almost all others run."""
    if state.event == "start":
        return lend_actor(state)
    return [] if state.actor.instances else return_actor(state)


def run(
    elastic: hf.Elastic, judge: hf.WorkerGroup, tracker: hf.Tracker | None = None, steps: int = ITERATIONS
) -> list[hf.Batch]:
    """Its mini-batches; rewards let no weight change."""
    prompts = hf.PromptLoader(PROMPTS, batch_size=8, steps=steps, seed=3)
    found, stream = [], elastic.stream(prompts, n=N, minibatches=MINIBATCHES, call_seconds=0.002)
    for batch in stream:
        for group in elastic.inference:
            batch |= group.compute_ref_log_prob(batch)
        batch |= elastic.actor.compute_log_prob(batch)
        batch |= judge.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        metrics = elastic.actor.update_actor(batch)
        if tracker is not None:
            tracker.log(stream.metrics(), metrics)
        found.append(batch.get())
    return found


def by_row(batches: list[hf.Batch]) -> dict[int, dict[str, Any]]:
    columns = ("response_ids", "log_probs", "policy_version", "ref_log_probs")
    rows: dict[int, dict[str, Any]] = {}
    for batch in batches:
        for at, row_id in enumerate(batch["row_id"].tolist()):
            assert row_id not in rows, "a row came twice"
            rows[row_id] = {name: batch[name].tolist()[at] for name in columns if name in batch}
    return rows


@pytest.fixture(scope="module")
def still(pool, policy, rollout, judge) -> dict[int, dict[str, Any]]:
    """What the static placement generates."""
    with placed(pool, policy, rollout, "static") as elastic:
        rows = by_row(run(elastic, judge))
        assert not elastic.events
    return rows


def equal(found: dict[int, dict[str, Any]], wanted: dict[int, dict[str, Any]]) -> None:
    assert found.keys() == wanted.keys()
    for row_id, row in found.items():
        assert row["response_ids"] == wanted[row_id]["response_ids"]
        for name in ("log_probs", "ref_log_probs"):
            assert row[name] == pytest.approx(wanted[row_id][name], abs=1e-4)


def rest_after_first_step(monkeypatch) -> None:
    """A lent replica decodes one step and then gets no call until its rows move, however slow the others are."""
    waits: Any = ReplicaCalls.waits.fget

    def has_rows_to_submit(chain: ReplicaCalls) -> bool:
        if chain.replica:
            return waits(chain)
        chain.until = Until(steps=1)
        return bool(chain.new or chain.rows)

    monkeypatch.setattr(ReplicaCalls, "waits", property(has_rows_to_submit))


@pytest.mark.parametrize("name", ["rlinf", "lend", "gain", "forecast", "early", "moving"])
def test_rows_are_those_of_the_static_placement(
    pool, policy, rollout, judge, still, tmp_path, monkeypatch, caplog, cluster, name
):
    """None is lost, none comes twice, wherever they were continued."""
    monkeypatch.setattr(cluster, "run_directory", None)
    others = {"forecast": gain(history=False), "early": early, "moving": moving(1)}
    chosen = (POLICIES | others)[name]
    if name == "early":
        rest_after_first_step(monkeypatch)
    with placed(pool, policy, rollout, chosen) as elastic:
        tracker = hf.Tracker(tmp_path / "run", console=False)
        equal(by_row(run(elastic, judge, tracker)), still)
        tracker.finish()
        assert elastic.actor.grid.d == 1  # the placement of the start
        assert "is refused" not in caplog.text
        if name not in ("lend", "gain", "forecast"):  # which may find that nothing pays
            written = [json.loads(line) for line in (tmp_path / "run" / "switches.jsonl").read_text().splitlines()]
            assert len(written) == len(elastic.events) > 0
            assert {switch.target["actor"] for switch in elastic.events} > {1}
        if name == "early":
            returned = [switch.rows for switch in elastic.events if switch.target["rollout"] < switch.origin["rollout"]]
            assert len(returned) == ITERATIONS
            assert min(returned) > 0
        assert elastic.events == [] or elastic.events[-1].target == {"rollout": 3, "inference": 0, "actor": 1}


def shuffling(state: State) -> list[Action]:
    """Groups move, and no device does."""
    if state.event == "start" or not (groups := state.running.get(state.rollout.ids.start)):
        return []
    return [Migrate({group.group: state.rollout.ids[-1] for group in groups})]


@pytest.mark.parametrize("chosen", [shuffling, early, POLICIES["rlinf"]])
def test_a_loop_that_was_left_is_entered_again(pool, policy, rollout, judge, still, chosen):
    """In the middle of the first iteration, and of the second."""
    with placed(pool, policy, rollout, chosen) as elastic:
        prompts = hf.PromptLoader(PROMPTS, batch_size=8, steps=ITERATIONS, seed=3)
        stream = elastic.stream(prompts, n=N, minibatches=MINIBATCHES, call_seconds=0.002)
        found: list[hf.Batch] = []
        for leave in (1, 4, 99):
            for number, batch in enumerate(stream, 1):
                batch |= elastic.inference[0].compute_ref_log_prob(batch)
                batch |= elastic.actor.compute_log_prob(batch)
                batch |= judge.compute_reward(batch)
                batch |= hf.compute_advantage(batch, "grpo")
                elastic.actor.update_actor(batch)
                found.append(batch.get())
                if number == leave:
                    break
        equal(by_row(found), still)
        assert not stream._refused
        if chosen is shuffling:
            assert stream._admission.moved > 0


def test_an_actor_that_cannot_be_resized_keeps_its_size(pool, policy, rollout, judge, still, caplog, monkeypatch):
    with placed(pool, policy, rollout, moving(1)) as elastic:

        def refuse(self: GroupSizes, size: int) -> None:
            raise WorkerError("no room")

        monkeypatch.setattr(GroupSizes, "resize", refuse)
        equal(by_row(run(elastic, judge)), still)
        assert elastic.actor.grid.d == 1
    assert "stay where they are" in caplog.text


def test_a_loop_that_syncs_weights_is_refused(pool, policy, rollout, judge):
    with placed(pool, policy, rollout, "static") as elastic:
        batches = iter(elastic.stream(hf.PromptLoader(PROMPTS, batch_size=8, steps=1), n=N, minibatches=MINIBATCHES))
        next(batches)
        hf.sync_weights(elastic.actor, rollout)
        with pytest.raises(ConfigError, match="and so did the loop"):
            next(batches)
        rollout.withdraw_rows().get()


def raising(state: State) -> list[Action]:
    raise RuntimeError("no idea")


@pytest.mark.parametrize("wrong", [raising, lambda state: [Release("rollout", 9)], lambda state: [Finalize()]])
def test_a_bad_policy_is_refused(pool, policy, rollout, judge, still, caplog, wrong):
    with placed(pool, policy, rollout, wrong) as elastic:
        found = by_row(run(elastic, judge, steps=1))
        assert len(found) == len(PROMPTS) * N
        equal(found, {row_id: still[row_id] for row_id in found})
        assert not elastic.events
    assert "is refused" in caplog.text


def test_a_refused_policy_is_asked_again_in_the_next_iteration(pool, policy, rollout, judge, caplog):
    asked = []

    def fails(state: State) -> list[Action]:
        asked.append(state.event)
        assert state.max_tokens == SAMPLING.max_tokens
        raise RuntimeError("no idea")

    with placed(pool, policy, rollout, fails) as elastic:
        run(elastic, judge, steps=3)
    assert asked == ["start"] * 3
    assert caplog.text.count("is refused: RuntimeError: no idea") == 1


def test_groups_that_lie_elsewhere_are_refused(place, pool, hosts, policy, rollout):
    """Before anything is built."""
    actor = place(hf.ActorWorker, pool[1:2], model=policy, train=hf.FSDP(), optim=hf.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="from its first device on"):
        hf.Elastic(pool, actor=actor, rollout=rollout, policy="rlinf")
    with pytest.raises(ConfigError, match="of the pool: place both"):
        hf.Elastic(hosts, actor=actor, rollout=rollout, policy="rlinf")
    with pytest.raises(ConfigError, match="known are"):
        hf.Elastic(pool, actor=actor, rollout=rollout, policy="greedy")
