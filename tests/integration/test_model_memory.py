"""Memory of real models on pools: several in the same processes, on slices and on pools of their own, in one PPO loop;
torch's out-of-memory exception with figures and settings; returns of offloaded models behind the calls before them.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hybridflow as hf
from hybridflow.errors import DeviceMemoryError, WorkerError
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL
from hybridflow.tracking.report.record import read_events
from tests import tiny_models
from tests.integration import throttled
from tests.tiny_models import make_rows

STEPS, BATCH = 2, 6


class Located:
    """Says in which process a rank lives."""

    @register(ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()


class LocatedActor(Located, hf.ActorWorker):
    pass


class LocatedCritic(Located, hf.CriticWorker):
    pass


def test_actor_and_critic_train_in_the_same_processes(place, pool, policy, tmp_path):
    """(1, 2, 2) and (2, 1, 2) in four hosts, taking turns."""
    classifier = tiny_models.make_classifier(tmp_path)
    optim = hf.SGD(lr=0.5)
    actor = place(LocatedActor, pool, name="here", model=policy, train=hf.Megatron(tp=2), optim=optim)
    critic = place(LocatedCritic, pool, name="there", model=classifier, train=hf.Megatron(pp=2), optim=optim)
    assert [(g.grid.p, g.grid.t, g.grid.d) for g in (actor, critic)] == [(1, 2, 2), (2, 1, 2)]
    processes = actor.process().get()
    assert processes == critic.process().get()
    assert len({os.getpid(), *processes}) == 5

    batch = hf.BatchRef.from_batch(make_rows())
    for _ in range(2):
        batch |= actor.compute_log_prob(batch)
        batch |= critic.compute_values(batch)
        before = batch.get()
        metrics = [update(batch, minibatches=2, uneven=True) for update in (actor.update_actor, critic.update_critic)]
        after = (actor.compute_log_prob(batch) | critic.compute_values(batch)).get()
        figures = {name: value for future in metrics for name, value in future.get().items()}
        assert figures["actor/skipped"] == figures["critic/skipped"] == 0
        for column in ("old_log_probs", "values"):
            assert (before[column].values - after[column].values).abs().max() > 0.01


def shortness(prompts, completions, hold: list[str] | None = None):
    """Shorter is better; waits for the file that the column `hold` names."""
    for _ in range(6000 if hold else 0):
        if Path(hold[0]).exists():
            break
        time.sleep(0.01)
    return [-float(len(text)) for text in completions]


@dataclass(frozen=True)
class Split:
    """Actor on one half of eight hosts, reference beside it, critic across both, rewards on a pool of their own."""

    start: float  # of `time.time`
    hosts: hf.ResourcePool
    alone: hf.ResourcePool
    actor: hf.WorkerGroup
    critic: hf.WorkerGroup
    reference: hf.WorkerGroup
    reward: hf.WorkerGroup


@pytest.fixture(scope="module")
def split(hosts, policy) -> Iterator[Split]:
    start, alone = time.time(), hf.ResourcePool([1])
    optim, tensor, generate = (
        hf.Adam(lr=1e-2),
        hf.Megatron(tp=2),
        hf.VLLM(sampling=hf.Sampling(max_tokens=6, n=2, seed=1)),
    )
    groups = (
        hf.ActorWorker.on(hosts[0:4], model=policy, train=tensor, optim=optim, generate=generate),
        hf.CriticWorker.on(hosts[2:6], model=policy, train=hf.Megatron(pp=2), optim=optim),
        hf.ReferenceWorker.on(hosts[4:6], model=policy, train=tensor),
        hf.RewardWorker.on(alone, function=shortness),
    )
    yield Split(start, hosts, alone, *groups)
    for group in groups:
        group.close()
    alone.close()


def run(groups: Split) -> list[tuple[hf.BatchRef, dict[str, float]]]:
    """Two iterations of PPO; the driver looks at nothing until they are over."""
    actor, critic, seen = groups.actor, groups.critic, []
    texts = [{"prompt": prompt} for prompt in ("ab", "cde", "f", "ghij", "kl", "mno", "p")]
    for prompts in hf.PromptLoader(texts, batch_size=BATCH, steps=STEPS):
        batch = actor.generate_sequences(prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= groups.reference.compute_ref_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= groups.reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "gae", kl_coef=0.05)
        figures = [critic.update_critic(batch, minibatches=2), actor.update_actor(batch, minibatches=2)]
        seen.append((batch, [batch.metrics(), *figures]))
    return [(batch, {k: v for future in futures for k, v in future.get().items()}) for batch, futures in seen]


@pytest.fixture(scope="module")
def outcome(split, settle) -> list[tuple[hf.BatchRef, dict[str, float]]]:
    settle()
    return run(split)


def test_one_loop_over_slices_and_pools(outcome, policy):
    assert len(outcome) == STEPS
    for step, (reference, figures) in enumerate(outcome):
        batch = reference.get()
        assert batch.rows == 2 * BATCH
        assert batch["group_id"].tolist() == [step * BATCH + row // 2 for row in range(2 * BATCH)]
        assert batch["rewards"].tolist() == [-float(len(text)) for text in batch["response"]]
        expected = tiny_models.response_log_probs(policy, batch)
        torch.testing.assert_close(batch["ref_log_probs"].values, expected.values, atol=1e-4, rtol=0)
        assert figures["actor/rollout_log_prob_diff_max"] < 1e-3
        assert figures["reward/mean"] == pytest.approx(float(batch["rewards"].mean()))
        assert figures["critic/skipped"] == figures["actor/skipped"] == 0
    first, second = (figures for _, figures in outcome)
    assert abs(first["kl/ref"]) < 1e-4 < 1e-2 < abs(second["kl/ref"])


def test_every_host_did_one_thing_at_a_time_in_call_order(split, outcome):
    for host in range(split.hosts.size):
        calls = [event for event in split.hosts[host].events() if "/" not in event.method and event.start > split.start]
        assert [event.seq for event in calls] == sorted(event.seq for event in calls)
        for earlier, later in itertools.pairwise(calls):
            assert earlier.start <= earlier.ready <= earlier.end <= later.start
        roles = {event.role for event in calls}
        expected = {"actor": range(4), "critic": range(2, 6), "reference": range(4, 6)}
        assert roles == {role for role, hosts in expected.items() if host in hosts}


def test_groups_on_disjoint_pools_work_at_the_same_time(split, outcome, tmp_path):
    """Rewards are held back until the actor, issued later, is done."""
    batch = outcome[0][0]
    gate = tmp_path / "open"
    rewards = split.reward.compute_reward(batch | hf.Batch({"hold": [str(gate)] * batch.rows}))
    assert split.actor.compute_log_prob(batch).get().rows == batch.rows
    gate.touch()
    assert torch.equal(rewards.get()["rewards"], batch["rewards"].get())
    held, free = (
        [event for event in pool.events() if event.method == method][-1]
        for pool, method in ((split.alone, "compute_reward"), (split.hosts, "compute_log_prob"))
    )
    assert free.end < held.end  # which of them begins first is up to their hosts


class Greedy:
    """Raises what CUDA would; `large` is what it says to have in memory."""

    role = "greedy"

    @register(ONE_TO_ALL, blocking=True)
    def update_all(self):
        with self.context.stage("transition"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    @register(ONE_TO_ALL, blocking=True)
    def compute(self):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def resident_bytes(self):
        return {"parameters": 3 << 30}


class Broken:
    """Its memory cannot be read."""

    role = "broken"

    @register(ONE_TO_ALL, blocking=True)
    def compute(self):
        return 1

    def resident_bytes(self):
        raise RuntimeError("half built")


class NeverBuilt:
    role = "large"

    def __init__(self):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    @register(ONE_TO_ALL, blocking=True)
    def compute(self):
        return 1


def test_the_driver_learns_phase_contents_and_settings(cluster, pool, place):
    greedy, _ = place(Greedy, pool[:2]), place(Broken, pool[:2])
    with pytest.raises(DeviceMemoryError) as caught:
        greedy.update_all()
    error = caught.value
    assert isinstance(error, WorkerError)
    assert (error.role, error.method) == ("greedy", "update_all")
    for part in ("greedy.update_all (transition) ran out of device memory", "9.00 GiB", "greedy parameters 3.00 GiB"):
        assert part in str(error)
    assert "in update_all" in error.remote_traceback
    with pytest.raises(DeviceMemoryError, match=r"greedy\.compute ran out"):  # not in the stage of the call before
        greedy.compute()


def test_a_group_that_does_not_fit_is_named(cluster, pool):
    with pytest.raises(DeviceMemoryError, match=r"large\.__init__ ran out of device memory.*Change one of"):
        hf.place(NeverBuilt, pool[:1])


RETURNS, HIDDEN = 4, 0.7
STRATEGIES: dict[str, Any] = {
    "megatron": hf.Megatron(tp=2),
    "fsdp": hf.FSDP(),
    "zero": hf.ZeRO(stage=2),
}


@pytest.fixture
def ppo(place, hosts, policy, tmp_path, settle, no_parts) -> Callable[..., Any]:
    """PPO on given responses: what it computed in each iteration, its last weights, events, and seconds of the link."""

    def run(strategy: Any, name: str, offload: bool) -> tuple[list[Any], dict[str, Any], list[dict], list[Any]]:
        pool = hosts[0:2]
        model: dict[str, Any] = {"model": policy, "train": strategy}
        adam = hf.Adam(lr=0.01)
        gate = place(throttled.Gate, pool, name=f"{name}-gate")
        actor = place(throttled.Actor, pool, name=f"{name}-actor", **model, optim=adam)
        reference = place(throttled.Reference, pool, name=f"{name}-reference", **model, offload=offload)
        critic = place(throttled.Critic, pool, name=f"{name}-critic", **model, optim=adam, offload=offload)
        found, directory = [], tmp_path / name
        with hf.Tracker(directory, console=False) as tracker:
            for step in range(RETURNS):
                opened = tmp_path / f"{name}-{step}"
                gate.wait(str(opened))
                rows = make_rows(8, seed=step).without("old_log_probs", "advantages", "values", "returns")
                batch = actor.compute_log_prob(rows) | hf.BatchRef.from_batch(rows)
                batch |= reference.compute_ref_log_prob(batch)
                batch |= critic.compute_values(batch)
                batch |= hf.BatchRef.from_batch(rows.select("row_id").with_columns(rewards=rows["num_tokens"].float()))
                batch |= hf.compute_advantage(batch, "gae", kl_coef=0.05)
                learned = [critic.update_critic(batch, minibatches=2), actor.update_actor(batch, minibatches=2)]
                opened.write_text("")
                tracker.log(*learned)
                columns = batch.get(["old_log_probs", "ref_log_probs", "values", "advantages"])
                found.append([{n: columns[n].tolist() for n in columns.columns}, *(one.get() for one in learned)])
        weights = load_file(Path(actor.save(tmp_path / f"{name}-model")) / "model.safetensors")
        weights |= {
            f"critic.{k}": v
            for k, v in load_file(Path(critic.save(tmp_path / f"{name}-critic")) / "model.safetensors").items()
        }
        settle()
        return found, weights, read_events(directory), reference.link_seconds() if offload else []

    return run


@pytest.mark.parametrize("name", STRATEGIES)
def test_returns_hide_behind_the_calls_before_them(ppo, name):
    plain, weights, _, _ = ppo(STRATEGIES[name], f"{name}-plain", offload=False)
    found, others, events, seconds = ppo(STRATEGIES[name], name, offload=True)
    assert found == plain
    assert all(others[key].equal(tensor) for key, tensor in weights.items())
    for copied, stalled in seconds:
        assert copied == pytest.approx(RETURNS * throttled.SECONDS)
        assert stalled <= (1 - HIDDEN) * copied

    def sizes(what: str) -> list[tuple[int, int]]:
        mine = [one for one in events if one.get("method") == what and one["rank"] == 0]
        return [(one["bytes_in"], one["bytes_out"]) for one in mine]

    (whole, _), *rest = sizes("compute_ref_log_prob/prefetch")
    assert rest == [(whole, 0)] * (RETURNS - 1)  # 1.0 times in, nothing out
    assert sizes("compute_ref_log_prob/reload") == sizes("compute_ref_log_prob/offload") == [(0, 0)] * RETURNS
    (whole, _), *rest = sizes("compute_values/prefetch")
    assert rest == [(whole, 0)] * (RETURNS - 1)
    assert sizes("compute_values/offload") == [(0, 0)] * RETURNS
    (state, _), *rest = sizes("update_critic/reload")  # behind a call of the same model
    assert state > whole
    assert rest == [(state, 0)] * (RETURNS - 1)
    assert sizes("update_critic/offload") == [(0, state)] * RETURNS
