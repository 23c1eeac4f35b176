"""GSPO (Zheng et al., "Group sequence policy optimization", 2025): ratio and clip per response, not per token.

    python recipes/gspo.py                                              arithmetic with a generated small model
    python recipes/gspo.py model=DIR prompts=FILE.jsonl reward=math devices=[8] actor.train.tp=4 steps=200

All settings: python recipes/gspo.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import settings, task

DEFAULTS = settings.defaults("""
name: gspo            # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 200            # iterations
batch_size: 32        # prompts
n: 8                  # responses per prompt
minibatches: 4        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
clip: 3.0e-4          # of the ratio of probabilities, downwards
clip_high: 4.0e-4     # upwards
actor: {train: {tp: null}, generate: {tp: 1, sampling: {max_tokens: null, seed: "${seed}"}},
        optim: {lr: 1.0e-6, warmup_steps: 10}}
""")
SMALL = """
{steps: 40, minibatches: 2, batch_size: 16,
 actor: {generate: {sampling: {max_tokens: 5}}, optim: {lr: 5.0e-5, warmup_steps: 20}}}
"""


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments, SMALL)
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
    reward = hf.RewardWorker.on(pool, **job.reward)

    run = settings.run(cfg, job, actor, reward)
    for prompts in run.loop(loader):
        batch = actor.generate_sequences(prompts, n=cfg.n)
        batch |= actor.compute_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        metrics = actor.update_actor(
            batch, loss="gspo", clip=cfg.clip, clip_high=cfg.clip_high, minibatches=cfg.minibatches
        )
        run.step(batch, metrics)
    actor.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
