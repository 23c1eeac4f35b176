"""GRPO (Shao et al., "DeepSeekMath", 2024): advantages relative to other responses, KL in the loss, no critic.

    python recipes/grpo.py                                              arithmetic with a generated small model
    python recipes/grpo.py model=DIR prompts=FILE.jsonl reward=math devices=[8] actor.train.tp=4 steps=200

All settings: DEFAULTS below, and the settings of all recipes in recipes/settings.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import settings, task
from recipes.accuracy import Accuracy

DEFAULTS = """
name: grpo            # metrics, checkpoints and the trained model go to runs/<name>
steps: 40
batch_size: 16        # prompts
n: 8                  # responses per prompt
minibatches: 2
devices: [2]          # devices per node
kl_coef: 0.02
clip: 0.2
actor: {train: {tp: 2}, generate: {tp: 1, sampling: {max_tokens: 5, seed: "${seed}"}},
        optim: {lr: 5.0e-5, warmup_steps: 20}}
reference: {train: {tp: 2}}
"""


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments)
    job = task.of(cfg)
    loader = hf.PromptLoader(job.train, batch_size=cfg.batch_size, steps=cfg.steps, seed=cfg.seed, **job.columns)
    pool = hf.ResourcePool(cfg.devices)
    actor = hf.ActorWorker.on(
        pool,
        model=job.model,
        train=hf.Megatron(**cfg.actor.train),
        optim=hf.Adam(**cfg.actor.optim),
        generate=hf.VLLM(**cfg.actor.generate),
    )
    reference = hf.ReferenceWorker.on(pool, model=job.model, train=hf.Megatron(**cfg.reference.train))
    reward = hf.RewardWorker.on(pool, **job.reward)
    tracker, checkpoints = settings.tracker(cfg), settings.checkpoints(cfg)
    accuracy = Accuracy(actor, reward, job, tracker)

    batches = checkpoints.resume(loader)
    if not checkpoints.done:
        accuracy.measure("before")
    for prompts in batches:
        batch = actor.generate_sequences(prompts, n=cfg.n)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        metrics = actor.update_actor(
            batch, clip=cfg.clip, kl_coef=cfg.kl_coef, aggregation="seq-mean-token-mean", minibatches=cfg.minibatches
        )
        tracker.log(batch.metrics(), metrics)
        checkpoints.step()
    accuracy.measure("after")
    actor.save(f"runs/{cfg.name}/model")
    tracker.finish()
    hf.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
