"""Backends side by side: Megatron, FSDP and ZeRO in one loop, and models that change theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hybridflow as hf
from tests.tiny_models import make_prompts, make_rows

ADAM = hf.Adam(lr=0.02, eps=1e-3)
SAMPLING = hf.Sampling(max_tokens=8, seed=5)
SETUPS: dict[str, tuple[Any, Any, Any, Any]] = {  # of actor, critic, reference, reward
    "mixed": (hf.Megatron(tp=2), hf.FSDP(), hf.ZeRO(stage=3), hf.FSDP(tp=2)),
    "exchanged": (hf.FSDP(), hf.ZeRO(stage=2), hf.Megatron(tp=2), hf.ZeRO(stage=1)),
}


def ppo(pool: hf.ResourcePool, name: str, policy: Path, classifier: Path) -> list[dict[str, float]]:
    """Two steps of PPO with four models, each on its own backend, on the devices of one pool."""
    train = dict(zip(("actor", "critic", "reference", "reward"), SETUPS[name], strict=True))
    groups = [
        hf.ActorWorker.on(
            pool,
            name=f"{name}-actor",
            model=policy,
            train=train["actor"],
            optim=ADAM,
            generate=hf.VLLM(tp=1, sampling=SAMPLING),
        ),
        hf.CriticWorker.on(pool, name=f"{name}-critic", model=classifier, train=train["critic"], optim=ADAM),
        hf.ReferenceWorker.on(pool, name=f"{name}-reference", model=policy, train=train["reference"]),
        hf.RewardWorker.on(pool, name=f"{name}-reward", model=classifier, train=train["reward"]),
    ]
    actor, critic, reference, reward = groups
    figures = []
    try:
        for seed in range(2):
            batch = actor.generate_sequences(hf.BatchRef.from_batch(make_prompts(seed=seed)))
            batch |= actor.compute_log_prob(batch)
            batch |= reference.compute_ref_log_prob(batch)
            batch |= critic.compute_values(batch)
            batch |= reward.compute_reward(batch)
            batch |= hf.compute_advantage(batch, "gae", gamma=1.0, lam=0.95, kl_coef=0.05)
            learned = [
                update(batch, minibatches=2, uneven=True) for update in (critic.update_critic, actor.update_actor)
            ]
            figures.append({name: value for metrics in learned for name, value in metrics.get().items()})
    finally:
        for group in groups:
            group.close()
    return figures


def test_a_loop_does_not_notice_its_backends(pool, policy, classifier):
    mixed, exchanged = (ppo(pool, name, policy, classifier) for name in SETUPS)
    for found, expected in zip(mixed, exchanged, strict=True):
        assert {"actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm"} <= set(found)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert mixed[0] != mixed[1]


def test_an_actor_changes_its_backend_while_it_trains(pool, policy):
    """Weights, moments and step counts come along; updates are those of an actor that stayed."""
    place: dict[str, Any] = {"model": policy, "optim": ADAM}
    stays = hf.ActorWorker.on(pool, name="stays", train=hf.Megatron(tp=2), **place)
    moves = hf.ActorWorker.on(pool, name="moves", train=hf.Megatron(tp=2), **place)
    journey = [hf.FSDP(), hf.ZeRO(stage=2), hf.Megatron(pp=2, tp=2)]
    try:
        for seed, to in enumerate([*journey, None]):
            batch = hf.BatchRef.from_batch(make_rows(8, seed=seed))
            expected, got = (group.update_actor(batch, minibatches=2).get() for group in (stays, moves))
            assert got == pytest.approx(expected, rel=1e-3, abs=1e-6), f"update {seed}"
            if to is not None:
                assert hf.reallocate(moves, strategy=to) is moves
    finally:
        stays.close()
        moves.close()


def test_a_checkpoint_of_one_backend_loads_in_another(pool, policy, tmp_path):
    """Each backend computes what the one before it wrote, trains it, and writes for the next one."""
    rows, path, expected = make_rows(8), policy, None
    backends = [hf.FSDP(), hf.Megatron(pp=2, tp=2), hf.ZeRO(stage=1), hf.FSDP(tp=2), hf.ZeRO(stage=3)]
    for number, train in enumerate(backends):
        actor = hf.ActorWorker.on(pool, name=f"writes-{number}", model=path, train=train, optim=ADAM)
        try:
            stored = hf.BatchRef.from_batch(rows)
            if expected is not None:
                found = actor.compute_log_prob(stored).get()["old_log_probs"]
                torch.testing.assert_close(found.values, expected.values, rtol=0, atol=1e-5)
            _ = actor.update_actor(stored).get()
            path = Path(actor.save(tmp_path / str(number)))
            expected = actor.compute_log_prob(stored).get()["old_log_probs"]
        finally:
            actor.close()
        weights = [AutoModelForCausalLM.from_pretrained(saved).state_dict() for saved in (policy, path)]
        assert max(float((weights[0][key] - weights[1][key]).abs().max()) for key in weights[0]) > 1e-3
