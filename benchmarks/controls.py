"""Control experiments for the PPO recipe: what causes its rise in reward. Prints one JSON line.

    python -m benchmarks.controls [steps=12 ...]

The recipe's loop runs on large batches with three seeds: unchanged, with learning rates of 0, and with the rewards
shuffled between rows. Only the unchanged run may rise; a rise of the others would come from prompts, sampling or
bookkeeping. A single shuffled run drifts by about 0.03 in either direction, because Adam's steps have the same size in
a random direction as in the right one, so the mean over seeds has to stay constant.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch

import hybridflow as hf
from recipes import arithmetic, ppo, settings

CONTROLS = ("none", "lr=0", "shuffled")
SEEDS = (1, 2, 3)
WINDOW = 5


def settings_of(*arguments: str) -> Any:
    """The recipe's settings with a few large mini-batches, for little sampling noise and few steps of drift."""
    return settings.read(ppo.DEFAULTS, ["batch_size=1024", "minibatches=2", "steps=12", *arguments], ppo.SMALL)


def rewards(pool: hf.ResourcePool, files: arithmetic.ArithmeticFiles, cfg: Any, control: str) -> list[float]:
    """Mean reward of each iteration of the recipe's loop under one of `CONTROLS`."""
    rate = 0.0 if control == "lr=0" else 1.0
    actor = hf.ActorWorker.on(
        pool,
        model=files.model,
        train=hf.Megatron(**cfg.actor.train),
        optim=hf.Adam(**{**cfg.actor.optim, "lr": rate * cfg.actor.optim.lr}),
        generate=hf.VLLM(**cfg.actor.generate),
    )
    critic = hf.CriticWorker.on(
        pool,
        model=files.model,
        train=hf.Megatron(**cfg.critic.train),
        optim=hf.Adam(**{**cfg.critic.optim, "lr": rate * cfg.critic.optim.lr}),
    )
    reference = hf.ReferenceWorker.on(pool, model=files.model, train=hf.Megatron(**cfg.reference.train))
    reward = hf.RewardWorker.on(pool, function=arithmetic.exact_match)
    generator, figures = torch.Generator().manual_seed(cfg.seed), []
    for prompts in hf.PromptLoader(files.train, batch_size=cfg.batch_size, steps=cfg.steps, seed=cfg.seed):
        batch = actor.generate_sequences(prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= reward.compute_reward(batch)
        if control == "shuffled":
            given = batch["rewards"].get()
            batch |= hf.Batch({"rewards": given[torch.randperm(len(given), generator=generator)]})
        batch |= hf.compute_advantage(batch, "gae", gamma=1.0, lam=0.95, kl_coef=cfg.kl_coef)
        critic.update_critic(batch, minibatches=cfg.minibatches, epochs=cfg.epochs)
        actor.update_actor(batch, clip=cfg.clip, minibatches=cfg.minibatches, epochs=cfg.epochs)
        figures.append(batch.metrics())
    means = [future.get()["reward/mean"] for future in figures]
    for group in (actor, critic, reference, reward):
        group.close()
    return means


def rise(means: list[float]) -> float:
    """Mean of the last iterations minus mean of the first iterations."""
    return (sum(means[-WINDOW:]) - sum(means[:WINDOW])) / WINDOW


def main(arguments: list[str]) -> None:
    cfg = settings_of(*arguments)
    files, pool = arithmetic.make(".cache"), hf.ResourcePool(cfg.devices)
    line: dict[str, Any] = {"benchmark": "controls", "steps": cfg.steps, "batch_size": cfg.batch_size, "seeds": SEEDS}
    for control in CONTROLS:
        rises = [rise(rewards(pool, files, settings_of(*arguments, f"seed={seed}"), control)) for seed in SEEDS]
        line |= {f"rise/{control}": statistics.mean(rises), f"rises/{control}": rises}
    hf.shutdown()
    print(json.dumps(line))


if __name__ == "__main__":
    main(sys.argv[1:])
