"""GRPO on a stream: two devices train while two generate (AReaL, Fu et al., 2025; docs/asynchronous.md).

    python recipes/async_grpo.py                                        arithmetic with a generated small model
    python recipes/async_grpo.py max_staleness=0                        the same, synchronous
    python recipes/async_grpo.py model=DIR prompts=FILE.jsonl reward=math train_devices=[8] rollout_devices=[8]

Responses have tokens of several policies. `update_actor` clips against the proximal policy, which `compute_log_prob`
computes, and weighs each token by proximal / sampling probability, at most 2 (decoupled PPO, AReaL section 5.2).

All settings: python recipes/async_grpo.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import settings, task

DEFAULTS = settings.defaults("""
name: async_grpo      # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 200            # iterations
rows: 256             # of a batch: rows / n prompts with n responses each
n: 8                  # responses per prompt
max_staleness: 2      # weight updates between the oldest token of a batch and its training
on_stale: wait        # drop: give up responses that take too long
correction: token     # of the difference between policies; null: none
minibatches: 4        # optimizer steps per iteration
train_devices: null   # devices per node; null: two, or the GPUs that are there
rollout_devices: null # also per node; []: those that train
clip: 0.2             # of the ratio of probabilities, in both directions
actor: {train: {tp: null}, optim: {lr: 1.0e-6, warmup_steps: 10}}
rollout: {generate: {tp: 1, sampling: {max_tokens: null, seed: "${seed}"}}}
""")
SMALL = """
{steps: 40, minibatches: 2, rows: 128,
 actor: {optim: {lr: 5.0e-5, warmup_steps: 20}},
 rollout: {generate: {sampling: {max_tokens: 5}}}}
"""


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments, SMALL)
    job = task.of(cfg)
    prompts = hf.PromptLoader(job.train, batch_size=cfg.rows // cfg.n, steps=cfg.steps, seed=cfg.seed, **job.columns)
    pool = hf.ResourcePool(cfg.train_devices)
    actor = hf.ActorWorker.on(
        pool, model=job.model, train=hf.Megatron(**cfg.actor.train), optim=hf.Adam(**cfg.actor.optim)
    )
    reward = hf.RewardWorker.on(pool, **job.reward)
    apart = hf.ResourcePool(cfg.rollout_devices) if cfg.rollout_devices else pool
    rollout = hf.RolloutWorker.on(apart, model=job.model, generate=hf.VLLM(**cfg.rollout.generate))
    stream = hf.stream(prompts, rollout, rows=cfg.rows, n=cfg.n, max_staleness=cfg.max_staleness, on_stale=cfg.on_stale)

    run = settings.run(cfg, job, rollout, reward)
    for batch in run.loop(stream):
        batch |= actor.compute_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        metrics = actor.update_actor(
            batch, clip=cfg.clip, minibatches=cfg.minibatches, rollout_correction=cfg.correction
        )
        hf.sync_weights(actor, rollout)
        run.step(batch, stream.metrics(), metrics)
    actor.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
