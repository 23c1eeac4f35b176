"""Real models on pools: several in the same processes, on slices and on pools of their own, in one PPO loop."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import hybridflow as hf
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL
from tests import tiny_models
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


def test_actor_and_critic_train_in_the_same_processes(pool, policy, tmp_path):
    """(1, 2, 2) and (2, 1, 2) in four hosts, taking turns."""
    classifier = tiny_models.make_classifier(tmp_path)
    optim = hf.SGD(lr=0.5)
    actor = LocatedActor.on(pool, name="here", model=policy, train=hf.Megatron(tp=2), optim=optim)
    critic = LocatedCritic.on(pool, name="there", model=classifier, train=hf.Megatron(pp=2), optim=optim)
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
    actor.close()
    critic.close()


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
