"""Pairs on real groups: a trained critic is the reward model that it is saved as, and held-out losses are exact."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import hybridflow as hf

RECORDS = [
    {"prompt": f"{word} is", "chosen": word, "rejected": "not " + word} for word in ("red", "green", "blue", "grey")
]


def pairs(policy: Path, **options) -> hf.TextLoader:
    return hf.TextLoader(
        RECORDS,
        tokenizer=policy,
        batch_size=4,
        max_tokens=24,
        prompt="prompt",
        completion=("chosen", "rejected"),
        **options,
    )


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_critic_learns_pairs_and_is_saved_as_a_reward_model(pool, place, policy, tmp_path, minibatches):
    critic = place(hf.CriticWorker, pool[:2], model=policy, train=hf.Megatron(micro_tokens=48), optim=hf.Adam(lr=3e-3))
    loader = pairs(policy, scored=True)
    held_out = hf.HeldOutLoss(critic.compute_values, loader, "bradley_terry", every=1)
    before = held_out.after(1).get()
    assert before["held_out/loss"] == pytest.approx(math.log(2))  # the head begins with zeros
    for batch, _ in zip(loader, range(8), strict=False):
        critic.update_critic(batch, loss="bradley_terry", minibatches=minibatches)
    found = held_out.after(2).get()
    assert found["held_out/loss"] < 0.5
    assert found["held_out/accuracy"] == 1.0
    critic.save(tmp_path / "model")
    batch = loader.whole()
    values = critic.compute_values(hf.BatchRef.from_batch(batch)).get("values")["values"]
    reward = place(hf.RewardWorker, pool[:1], model=tmp_path / "model", train=hf.Megatron())
    plain = pairs(policy).whole().without("trajectory_id", "preference")
    scores = reward.compute_reward(hf.BatchRef.from_batch(plain)).get("rewards")["rewards"]
    assert torch.allclose(scores, torch.stack([row[-1] for row in values.rows()]), atol=1e-5)
    assert bool((scores[::2] > scores[1::2]).all())


def test_dpo_prefers_and_its_held_out_loss_is_that_of_the_update(pool, place, policy):
    options = {"model": policy, "train": hf.Megatron()}
    actor = place(hf.ActorWorker, pool[:2], **options, optim=hf.Adam(lr=1e-3))
    reference = place(hf.ReferenceWorker, pool[:2], **options)
    batch = hf.BatchRef.from_batch(pairs(policy).whole())
    batch |= reference.compute_ref_log_prob(batch)
    held_out = hf.HeldOutLoss(actor.compute_log_prob, batch, "dpo", beta=0.5, every=1)
    assert held_out.best == "-held_out/loss"
    for step in range(4):
        measured = held_out.after(step).get()
        trained = actor.update_actor(batch, loss="dpo", beta=0.5).get()
        assert measured["held_out/loss"] == pytest.approx(trained["actor/loss"], abs=1e-5)
        assert measured["held_out/margin"] == pytest.approx(trained["actor/margin"], abs=1e-5)
    assert trained["actor/loss"] < 0.6
    assert trained["actor/accuracy"] == 1.0


def test_texts_with_steps_are_the_loader_of_a_run(cluster, pool, place, policy, tmp_path):
    cluster.parts.clear()
    actor = place(hf.ActorWorker, pool[:1], model=policy, train=hf.Megatron(), optim=hf.Adam(lr=1e-2))

    def loader(steps: int | None) -> hf.TextLoader:
        return hf.TextLoader(
            RECORDS, tokenizer=policy, batch_size=4, max_tokens=24, prompt="prompt", completion="chosen", steps=steps
        )

    texts = loader(None).whole()
    held_out = hf.HeldOutLoss(actor.compute_log_prob, texts, "sft", every=2)
    run = hf.Run(tmp_path / "run", every=2, console=False, held_out=held_out)
    done = 0
    for batch in run.loop(loader(4)):
        run.step(batch, actor.update_actor(batch, loss="sft"))
        done += 1
    run.finish()
    cluster.parts.clear()
    cluster.iterations.done_before = 0
    assert done == 4
    exact = actor.compute_loss(hf.BatchRef.from_batch(texts)).get()["actor/pretrain_loss"]
    assert held_out.after(2).get() == {"held_out/loss": pytest.approx(exact, abs=1e-5)}
    assert run.checkpoints.best_checkpoint is not None
    assert run.checkpoints.best_checkpoint[1] == pytest.approx(exact, abs=1e-5)
