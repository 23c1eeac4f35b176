"""Streams of trajectories on real hosts: tools, environments and programs, while the loop trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.errors import ConfigError, RewardError, WorkerError
from tests import tiny_models
from tests.example_agents import Echo, Unsteady, forgets, twice

pytestmark = pytest.mark.slow

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz0123456789 .,:;")
SAMPLING = hf.Sampling(max_tokens=40, seed=5, stop=LETTERS)
PROMPTS = [{"prompt": text} for text in ("abc", "hello you", "xyz", "the end", "k", "a b c", "zz", "four")]


WAYS: dict[str, dict[str, Any]] = {
    "tools": {"tools": [twice], "max_turns": 3},
    "environment": {"environment": Echo, "max_turns": 4},
    "solve": {"solve": forgets},
}
LOG_PROBS = ("policy_version", "response_mask", "log_probs", "old_log_probs")


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Path:
    return tiny_models.make_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def actor(keep, pool, chat) -> hf.WorkerGroup:
    return keep(hf.ActorWorker, pool[0:1], model=chat, train=hf.FSDP(), optim=hf.SGD(lr=0.5))


@pytest.fixture(scope="module")
def rollout(keep, pool, chat) -> hf.WorkerGroup:
    """Two replicas."""
    return keep(hf.RolloutWorker, pool[2:4], name="agents", model=chat, generate=hf.VLLM(sampling=SAMPLING))


def loader(steps: int) -> hf.PromptLoader:
    return hf.PromptLoader(PROMPTS, batch_size=4, steps=steps, seed=3)


def train(batch: hf.BatchRef, actor: hf.WorkerGroup) -> hf.Batch:
    batch |= actor.compute_log_prob(batch)
    if "rewards" not in batch:
        batch |= hf.Batch({"rewards": torch.arange(float(batch.rows)) % 3})
    batch |= hf.compute_advantage(batch, "grpo")
    actor.update_actor(batch, minibatches=2, rollout_correction="token").get()
    return batch.get()


def whole(rows: hf.Batch, n: int = 2) -> list[int]:
    """The groups of a batch, each of `n` whole trajectories."""
    ids = list(dict.fromkeys(rows["trajectory_id"].tolist()))
    groups = [number // n for number in ids][::n]
    assert ids == [n * group + index for group in groups for index in range(n)]
    assert rows["group_id"].tolist() == [number // n for number in rows["trajectory_id"].tolist()]
    assert rows["row_id"].unique().numel() == rows.rows
    return groups


def differing(found: hf.Batch, wanted: hf.Batch) -> set[str]:
    """The columns that are not equal bit by bit."""
    return {name for name in wanted.columns if not found.select(name).equal(wanted.select(name))}


@pytest.mark.parametrize("way", WAYS)
def test_without_staleness_it_is_the_synchronous_call(actor, rollout, way):
    stream = hf.stream(loader(2), rollout, rows=8, n=2, max_staleness=0, **WAYS[way])
    for batch, prompts in zip(stream, loader(2), strict=True):
        found, wanted = batch.get(), rollout.generate_sequences(prompts, n=2, **WAYS[way]).get()
        assert set(found.columns) == set(wanted.columns)
        assert differing(found, wanted) <= {"prefill_tokens", "log_probs"}  # as warm as the KV cache is
        apart = found["log_probs"].values - wanted["log_probs"].values
        assert apart.abs().max() < 1e-5
        hf.sync_weights(actor, rollout)


@pytest.mark.parametrize("way", WAYS)
def test_no_token_is_too_old_and_no_trajectory_is_lost(actor, rollout, way):
    hf.sync_weights(actor, rollout)
    stream = hf.stream(loader(4), rollout, rows=8, n=2, max_staleness=1, call_seconds=0.01, **WAYS[way])
    seen: list[int] = []
    newest = 0
    for number, batch in enumerate(stream):
        rows = train(batch, actor)
        hf.sync_weights(actor, rollout)
        groups = whole(rows)
        assert groups == sorted(groups)
        seen += groups
        assert rows.rows == 24 if way == "solve" else rows.rows >= 8
        for name in ("policy_version", "turn_ids", "response_mask"):
            assert rows[name].lengths.tolist() == rows["response_ids"].lengths.tolist()
        assert number - 1 <= rows["policy_version"].values.min() <= rows["policy_version"].values.max() <= number
        prompts = dict(zip(rows["group_id"].tolist(), rows["prompt"], strict=True))
        assert [prompts[group] for group in groups] == [text_of(group) for group in groups]
        assert stream.metrics()["stream/staleness_max"] <= 1
        newest += log_probs_are_those_of(rows, number)
    assert newest
    assert sorted(seen) == list(range(16))
    assert rollout.withdraw_rows().get() == [[], []]


def log_probs_are_those_of(rows: hf.Batch, version: int) -> int:
    """Checks rows that the present weights sampled against training's; returns how many there were."""
    checked = 0
    for names in zip(*(rows[name].tolist() for name in LOG_PROBS), strict=True):
        versions, mask, ours, theirs = map(torch.tensor, names)
        if set(versions[mask].tolist()) == {version}:
            assert (ours - theirs)[mask].abs().max() < 1e-3
            checked += 1
    return checked


def test_an_actor_that_generates_goes_on_after_its_update(place, pool, chat):
    generate = hf.VLLM(sampling=SAMPLING)
    optim = hf.SGD(lr=0.5)
    own = place(hf.ActorWorker, pool[1:2], name="own", model=chat, train=hf.FSDP(), optim=optim, generate=generate)
    settings: dict[str, Any] = {"rows": 8, "n": 2, "max_staleness": 1, "call_seconds": 0.01, **WAYS["environment"]}
    seen, newest = [], 0
    for number, batch in enumerate(hf.stream(loader(3), own, **settings)):
        rows = train(batch, own)
        seen += whole(rows)
        newest += log_probs_are_those_of(rows, number)
    assert sorted(seen) == list(range(12))
    assert newest


def text_of(group: int) -> str:
    return [text for batch in loader(4).drawn() for text in batch["prompt"]][group]


def test_a_loop_that_was_left_and_a_state_continue(actor, rollout):
    settings: dict[str, Any] = {"rows": 8, "n": 2, "max_staleness": 1, "call_seconds": 0.01, **WAYS["solve"]}
    first, seen = hf.stream(loader(5), rollout, **settings), []
    for batch in first:
        seen += whole(batch.get())
        hf.sync_weights(actor, rollout)
        break
    for batch in first:
        seen += whole(batch.get())
        hf.sync_weights(actor, rollout)
        state = json.loads(json.dumps(first.state()))
        if len(seen) == 12:
            break
    second = hf.stream(loader(5), rollout, **settings)
    second.load_state(state)
    for batch in second:
        seen += whole(batch.get())
        hf.sync_weights(actor, rollout)
    assert sorted(seen) == list(range(20))


def test_a_synchronous_loop_continues_from_a_checkpoint(actor, rollout, tmp_path):
    """Tokens, rewards and updates are those of the loop that went on, bit by bit."""

    def run(**options: Any) -> list[tuple[float, hf.Batch]]:
        texts, seen = loader(3), []
        parts = {"actor": actor, "texts": texts}
        checkpoints = hf.Checkpoints(tmp_path / "saved", every=1, only=parts, **options)
        for prompts in checkpoints.resume(texts):
            hf.sync_weights(actor, rollout)
            batch = rollout.generate_sequences(prompts, n=2, **WAYS["environment"])
            batch |= actor.compute_log_prob(batch)
            batch |= hf.compute_advantage(batch, "grpo")
            norm = actor.update_actor(batch, minibatches=2).get()["actor/grad_norm"]
            seen.append((norm, batch.get()))
            checkpoints.step()
        return seen

    undisturbed = run()
    continued = run(resume=tmp_path / "saved" / "step-00000001")
    assert undisturbed[0][0] > 0
    for (norm, rows), (same, others) in zip(undisturbed[1:], continued, strict=True):
        assert norm == same
        assert differing(rows, others) <= {"prefill_tokens", "log_probs", "policy_version"}  # the engine's own counts


def test_failed_and_hanging_environments_are_masked_and_hold_up_no_other(actor, rollout):
    settings: dict[str, Any] = {"max_staleness": 1, "call_seconds": 0.01, "timeout": 3.0}
    failed: dict[str, set[str | None]] = {}
    for batch in hf.stream(loader(2), rollout, rows=8, n=2, environment=Unsteady, **settings):
        rows = batch.get()
        whole(rows)
        for prompt, why, mask in zip(
            rows["prompt"], rows["environment_failure"], rows["response_mask"].tolist(), strict=True
        ):
            failed.setdefault(prompt, set()).add(why)
            assert any(mask) == (why is None)
        hf.sync_weights(actor, rollout)
    assert {prompt for prompt, why in failed.items() if why != {None}} == {"xyz", "zz"}
    assert "took longer" in str(failed["zz"])
    stream = hf.stream(loader(2), rollout, rows=8, n=2, environment=Unsteady, on_failure="raise", **settings)
    with pytest.raises((RewardError, WorkerError), match="lost"):
        synced(stream, actor, rollout)
    rollout.withdraw_rows().get()


def synced(stream: Any, actor: hf.WorkerGroup, rollout: hf.WorkerGroup) -> None:
    for _ in stream:
        hf.sync_weights(actor, rollout)


def test_groups_that_would_be_too_old_are_given_up(actor, rollout):
    settings: dict[str, Any] = {"rows": 8, "n": 2, "max_staleness": 1, "on_stale": "drop", "call_seconds": 0.001}
    settings.update(WAYS["environment"])
    stream = hf.stream(loader(5), rollout, **settings)
    seen: list[int] = []
    for batch in stream:
        seen += whole(train(batch, actor))
        hf.sync_weights(actor, rollout)
    assert len(set(seen)) == len(seen)
    assert len(seen) + stream.metrics()["stream/dropped"] <= 20


def test_a_session_of_a_replica_of_two_ranks(place, hosts, chat):
    """Calls of a session that end before its trajectories, an evaluation between them, and what is refused."""
    group = place(hf.RolloutWorker, hosts[4:6], name="both", model=chat, generate=hf.VLLM(tp=2, sampling=SAMPLING))
    prompts = next(iter(loader(1).drawn()))
    wanted = group.generate_sequences(prompts, n=2, **WAYS["environment"]).get()
    found = [group.advance_rows(prompts, until=hf.Until(seconds=0.001), n=2, replica=0, **WAYS["environment"])]
    evaluated = group.generate_sequences(prompts, n=2, **WAYS["environment"]).get()
    assert evaluated["response_ids"].tolist() == wanted["response_ids"].tolist()
    with pytest.raises(WorkerError, match="trajectories under way"):
        group.advance_rows(prompts, until=hf.Until(rows=1), replica=0).get()
    with pytest.raises(WorkerError, match="trajectories under way"):
        group.advance_rows(until=hf.Until(rows=1), replica=0, environment=Unsteady).get()
    kept = group.withdraw_rows(replica=0, keep=True).get()
    assert kept
    assert set(kept[0]) == {"row_id", "index"}
    for _ in range(100):
        found.append(group.advance_rows(until=hf.Until(rows=1), n=2, replica=0, **WAYS["environment"]))
        if sum(one.get().rows for one in found) == 8:
            break
    rows: dict[int, list[int]] = {}
    for one in found:
        part = one.get().get(["row_id", "response_ids"])
        rows |= zip(part["row_id"].tolist(), part["response_ids"].tolist(), strict=True)
    assert rows == dict(zip(wanted["row_id"].tolist(), wanted["response_ids"].tolist(), strict=True))
    group.advance_rows(prompts, until=hf.Until(seconds=0.001), n=2, replica=0, **WAYS["environment"]).get()
    group.withdraw_rows(replica=0).get()
    assert group.withdraw_rows(replica=0).get() == []
    assert group.advance_rows(prompts, until=hf.Until(steps=500), replica=0).get().rows == 4


def test_what_cannot_work_is_refused(rollout):
    settings: dict[str, Any] = {"rows": 8, "n": 2, **WAYS["environment"]}
    with pytest.raises(ConfigError, match="max_turns"):
        hf.stream(loader(1), rollout, **settings | {"max_turns": 0})
    with pytest.raises(ConfigError, match="may wait for a tool"):
        rollout.advance_rows(until=hf.Until(steps=1), environment=Echo)
    with pytest.raises(ConfigError, match="begin anew"):
        rollout.advance_rows(until=hf.Until(rows=1), rows=[{}], replica=0, environment=Echo)
