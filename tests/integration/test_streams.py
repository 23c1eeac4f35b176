"""Streams on real hosts: the synchronous loop, staleness, weights in the middle of responses, continuing, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hybridflow as hf
from hybridflow.errors import ConfigError
from tests import tiny_models

PROMPTS = [{"prompt": text} for text in ("abc", "hello you", "xyz", "the end", "k", "a b c", "zz", "four")]
SAMPLING = hf.Sampling(max_tokens=6, seed=5)


def early_letters(completions: list[str]) -> list[float]:
    return [sum(letter in "abcdefgh" for letter in text) / 6 for text in completions]


@pytest.fixture(scope="module")
def actor(keep, pool, policy) -> hf.WorkerGroup:
    return keep(hf.ActorWorker, pool[0:2], model=policy, train=hf.Megatron(tp=2), optim=hf.SGD(lr=0.5))


@pytest.fixture(scope="module")
def rollout(keep, pool, policy) -> hf.WorkerGroup:
    """Two replicas."""
    return keep(hf.RolloutWorker, pool[2:4], model=policy, generate=hf.VLLM(sampling=SAMPLING))


@pytest.fixture(scope="module")
def judge(keep, pool) -> hf.WorkerGroup:
    return keep(hf.RewardWorker, pool[0:2], function=early_letters)


def loader(steps: int, batch_size: int = 4) -> hf.PromptLoader:
    return hf.PromptLoader(PROMPTS, batch_size=batch_size, steps=steps, seed=3)


def train(batch: hf.BatchRef, actor: hf.WorkerGroup, judge: hf.WorkerGroup) -> tuple[dict[str, float], hf.Batch]:
    batch |= actor.compute_log_prob(batch)
    batch |= judge.compute_reward(batch)
    batch |= hf.compute_advantage(batch, "grpo")
    figures = actor.update_actor(batch, minibatches=2)
    return figures.get(), batch.get()


def test_without_staleness_it_is_the_synchronous_loop(pool, policy, rollout, judge):
    found = []
    for stale in (False, True):
        actor = hf.ActorWorker.on(pool[0:2], model=policy, train=hf.Megatron(tp=2), optim=hf.SGD(lr=0.5))
        hf.sync_weights(actor, rollout)
        batches = hf.stream(loader(5), rollout, rows=8, n=2, max_staleness=0) if stale else loader(5)
        for batch in batches:
            batch = batch if stale else rollout.generate_sequences(batch, n=2)
            figures, rows = train(batch, actor, judge)
            hf.sync_weights(actor, rollout)
            found.append((figures, rows.without("policy_version")))
        actor.close()
    assert_equal(found[5:], found[:5])


def assert_equal(found: list[tuple[dict[str, float], hf.Batch]], wanted: list[tuple[dict[str, float], hf.Batch]]):
    for (figures, rows), (others, same) in zip(found, wanted, strict=True):
        assert figures == others  # norms of the gradients, so parameters that differ show in the next iteration
        assert rows.equal(same)


def test_ppo_with_one_replica_is_the_synchronous_loop(pool, hosts, policy, judge, tmp_path):
    scores = tiny_models.make_classifier(tmp_path / "critic")
    rollout = hf.RolloutWorker.on(hosts[4:5], name="one", model=policy, generate=hf.VLLM(sampling=SAMPLING))
    found, saved = [], []
    for stale in (False, True):
        actor = hf.ActorWorker.on(pool[0:2], model=policy, train=hf.FSDP(), optim=hf.Adam(lr=0.01))
        critic = hf.CriticWorker.on(pool[0:2], model=scores, train=hf.FSDP(), optim=hf.Adam(lr=0.01))
        hf.sync_weights(actor, rollout)
        for batch in hf.stream(loader(5), rollout, rows=4, max_staleness=0) if stale else loader(5):
            batch = batch if stale else rollout.generate_sequences(batch)
            batch |= actor.compute_log_prob(batch)
            batch |= critic.compute_values(batch)
            batch |= judge.compute_reward(batch)
            batch |= hf.compute_advantage(batch, "gae")
            figures = critic.update_critic(batch, minibatches=2).get() | actor.update_actor(batch, minibatches=2).get()
            hf.sync_weights(actor, rollout)
            found.append((figures, batch.get().without("policy_version")))
        actor.save(tmp_path / f"{stale}")
        saved.append(load_file(tmp_path / f"{stale}" / "model.safetensors"))
        for group in (actor, critic):
            group.close()
    rollout.close()
    assert_equal(found[5:], found[:5])
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_calls_stay_queued_while_the_loop_waits(actor, rollout, judge):
    longer = hf.stream(loader(4), rollout, rows=8, n=2, max_staleness=1, call_seconds=0.001, max_tokens=40)
    issued = []
    for batch in longer:
        before = rollout.calls_issued["advance_rows"]
        train(batch, actor, judge)  # waits for its results
        issued.append(rollout.calls_issued["advance_rows"] - before)
        hf.sync_weights(actor, rollout)
        assert longer.metrics()["stream/rollout_wait"] >= 0
    assert max(issued) > 2  # those that were queued when the batch was given


@pytest.mark.parametrize("lost", [False, True])
def test_rows_continue_from_copies_after_their_hosts_are_lost(actor, rollout, judge, lost):
    settings: dict[str, Any] = {"rows": 8, "n": 2, "max_staleness": 2, "call_seconds": 0.001, "copy_seconds": 1e-4}
    stream = hf.stream(loader(6), rollout, **settings, max_tokens=30)
    stream.state()  # from now on there are copies
    batches = iter(stream)
    for _ in range(2):
        train(next(batches), actor, judge)
        hf.sync_weights(actor, rollout)
    state = stream.state()
    before = next(batches).get()
    under_way = {row["row_id"] for rows in rollout.withdraw_rows(keep=True).get() for row in rows}
    batches.close()
    if lost:
        rollout.withdraw_rows().get()  # new hosts would have none
        for calls in stream._chains.values():
            for known in [*calls.calls]:
                known.get()
    stream.load_state(state)
    groups, versions = before["group_id"].tolist(), []
    for batch in stream:
        versions.append([row[0] for row in batch.get("policy_version")["policy_version"].tolist()])
        groups += batch.get("group_id")["group_id"].tolist()
        train(batch, actor, judge)
        hf.sync_weights(actor, rollout)
    assert len(versions) == 4  # the third again, and those after it
    assert min(min(row) for row in versions[:2]) < 2 or not under_way  # begun before the state that was loaded


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_loop_that_was_left_is_entered_again(actor, rollout, judge, monkeypatch, staleness):
    """Also while the driver looks at finished calls all the time."""
    monkeypatch.setattr("hybridflow.cluster.iterations._LOOK_BACK", 1)
    settings: dict[str, Any] = {"rows": 8, "n": 2, "max_staleness": staleness}
    stream = hf.stream(loader(5), rollout, **settings, call_seconds=0.001, max_tokens=20)
    groups: list[int] = []
    for leave in (1, 2, 9):
        for number, batch in enumerate(stream, 1):
            groups += batch.get("group_id")["group_id"].tolist()[::2]
            train(batch, actor, judge)
            if leave == 1:
                hf.sync_weights(actor, rollout)
            actor.compute_log_prob(batch).get()
            if number == leave:
                break
            hf.sync_weights(actor, rollout)
        if leave == 2:
            hf.sync_weights(actor, rollout)
    assert sorted(groups) == list(range(20))
    assert not any(finished.copy for given in stream._given for one in given.values() for finished in one.values())


def test_groups_that_would_be_too_old_are_given_up(actor, rollout, judge):
    stream = hf.stream(
        loader(8), rollout, rows=8, n=2, max_staleness=1, on_stale="drop", call_seconds=0.001, ignore_eos=False
    )
    seen: list[int] = []
    for number, batch in enumerate(stream):
        train(batch, actor, judge)
        rows = batch.get(["group_id", "policy_version"])
        seen += rows["group_id"].tolist()[::2]
        assert all(number - 1 <= min(row) <= max(row) <= number for row in rows["policy_version"].tolist())
        hf.sync_weights(actor, rollout)
    assert len(set(seen)) == len(seen)
    assert len(seen) % 4 == 0
    assert len(seen) + stream.metrics()["stream/dropped"] <= 32


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_token_is_too_old_and_no_prompt_is_lost(actor, rollout, judge, staleness):
    stream = hf.stream(loader(6), rollout, rows=8, n=2, max_staleness=staleness, call_seconds=0.01)
    prompts: list[str] = []
    for number, batch in enumerate(stream):
        figures, rows = train(batch, actor, judge)
        hf.sync_weights(actor, rollout)
        groups = rows["group_id"].tolist()
        assert groups == sorted(groups)
        assert rows["row_id"].tolist() == [2 * group + k for group in groups[::2] for k in (0, 1)]
        for ids, versions in zip(rows["response_ids"].tolist(), rows["policy_version"].tolist(), strict=True):
            assert len(ids) == len(versions)
            assert number - staleness <= min(versions) <= max(versions) <= number
        prompts += rows["prompt"][::2]
        assert stream.metrics()["stream/staleness_max"] <= staleness
        assert figures["actor/grad_norm"] >= 0
    assert sorted(prompts) == sorted(text for batch in loader(6).drawn() for text in batch["prompt"])


def test_log_probs_are_those_of_the_version_that_sampled_each_token(actor, rollout, judge):
    """Checked by scoring each batch before the update of its version, when all of its tokens are of that version."""
    stream = hf.stream(loader(4), rollout, rows=8, n=2, max_staleness=2, call_seconds=0.01)
    checked = 0
    for number, batch in enumerate(stream):
        scored = actor.compute_log_prob(batch)
        rows = (batch | scored).get(["log_probs", "old_log_probs", "policy_version"])
        for ours, theirs, versions in zip(*(rows[name].tolist() for name in rows.columns), strict=True):
            same = [version == number for version in versions]
            pairs = [(a, b) for a, b, now in zip(ours, theirs, same, strict=True) if now]
            checked += len(pairs)
            if all(same):  # tokens before it are of its version, too
                assert torch.tensor(pairs).diff(dim=1).abs().max() < 1e-4
        train(batch, actor, judge)
        hf.sync_weights(actor, rollout)
        actor.compute_log_prob(batch).get()  # meanwhile calls with the new weights are queued
    assert checked


def test_a_state_continues_with_the_prompts_under_way(actor, rollout, judge):
    first, states, seen = hf.stream(loader(5), rollout, rows=8, n=2, max_staleness=1, call_seconds=0.01), [], []
    for batch in first:
        rows = batch.get(["prompt", "group_id"])
        seen.append(rows["group_id"].tolist()[::2])
        train(batch, actor, judge)
        hf.sync_weights(actor, rollout)
        states.append(first.state())
        if len(seen) == 2:
            break
    assert json.loads(json.dumps(states[-1])) == states[-1]
    second = hf.stream(loader(5), rollout, rows=8, n=2, max_staleness=1, call_seconds=0.01)
    second.load_state(states[-1])
    for batch in second:
        seen.append(batch.get("group_id")["group_id"].tolist()[::2])
        hf.sync_weights(actor, rollout)
    assert len(seen) == 5
    assert sorted(group for groups in seen for group in groups) == list(range(20))


def test_a_new_stream_takes_over_from_one_that_is_still_referred_to(actor, rollout):
    """A traceback or a notebook's `_` may hold the old one, and its loop may be suspended between two batches."""
    settings: dict[str, Any] = {"rows": 8, "n": 2, "max_staleness": 1, "call_seconds": 0.01}
    old = hf.stream(loader(3), rollout, **settings)
    loop = iter(old)
    next(loop)
    new, seen = hf.stream(loader(3), rollout, **settings), []
    for batch in new:
        seen += batch.get("group_id")["group_id"].tolist()[::2]
        hf.sync_weights(actor, rollout)
    assert len(seen) == len({*seen}) == 12
    for again in (loop, iter(old)):
        with pytest.raises(ConfigError, match="a newer one has taken over"):
            next(again)
    assert rollout.response_stream is new
    new.close()
    new.close()
    assert rollout.response_stream is None
    assert not any(rollout.withdraw_rows().get())


def test_an_actor_continues_unfinished_responses_after_its_update(place, pool, policy, judge):
    generate = hf.VLLM(sampling=SAMPLING)
    actor = place(
        hf.ActorWorker, pool[0:2], model=policy, train=hf.Megatron(tp=2), optim=hf.SGD(lr=0.5), generate=generate
    )
    stream = hf.stream(loader(3), actor, rows=8, n=2, max_staleness=2, call_seconds=0.001)
    for number, batch in enumerate(stream):
        _, rows = train(batch, actor, judge)
        assert all(number - 2 <= min(row) <= max(row) <= number for row in rows["policy_version"].tolist())


def test_a_function_generates_a_batch_ahead(actor, rollout):
    def generate(prompts: hf.BatchRef) -> hf.BatchRef:
        return rollout.generate_sequences(prompts, n=2)

    stream = hf.stream(loader(3), generate, rows=8, n=2, max_staleness=1)
    batches = [next(iter(stream)).get()]  # the loop is left, with a call under way, and entered again
    batches += [batch.get() for batch in stream]
    assert [batch["group_id"].tolist()[::2] for batch in batches] == [list(range(4 * k, 4 * k + 4)) for k in range(3)]


def test_weights_from_before_the_update_are_of_the_version_before(actor, rollout, judge):
    hf.sync_weights(actor, rollout)
    for number, batch in enumerate(hf.stream(loader(4), rollout, rows=8, n=2, max_staleness=1)):
        hf.sync_weights(actor, rollout)
        _, rows = train(batch, actor, judge)
        versions = [version for row in rows["policy_version"].tolist() for version in row]
        assert number - 1 <= min(versions) <= max(versions) <= max(number - 1, 0)
    batches = iter(hf.stream(loader(4), rollout, rows=8, n=2, max_staleness=0))
    hf.sync_weights(actor, rollout)
    train(next(batches), actor, judge)
    with pytest.raises(ConfigError, match="cannot be filled"):
        next(batches)


def test_what_cannot_work_is_refused(actor, rollout):
    settings: dict[str, Any] = {"rows": 8, "n": 2}
    for wrong, text in (
        ({"max_staleness": -1}, "max_staleness"),
        ({"rows": 9}, "whole groups of n=2"),
        ({"on_stale": "keep"}, "on_stale"),
        ({"call_seconds": 0}, "seconds"),
    ):
        with pytest.raises(ConfigError, match=text):
            hf.stream(loader(1), rollout, **settings | wrong)
    with pytest.raises(ConfigError, match="cannot generate"):
        hf.stream(loader(1), actor, **settings)
    with pytest.raises(ConfigError, match="PromptLoader"):
        hf.stream(PROMPTS, rollout, **settings)  # type: ignore[arg-type]
    stream = hf.stream(loader(4), rollout, **settings)
    with pytest.raises(ConfigError, match=r"Call hf\.sync_weights"):
        list(stream)
