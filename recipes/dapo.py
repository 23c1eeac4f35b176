"""DAPO (Yu et al. 2025): clip-higher, dynamic sampling, token-level loss, a length penalty, no KL.

    python recipes/dapo.py                                              arithmetic with a generated small model
    python recipes/dapo.py model=DIR prompts=FILE.jsonl reward=math devices=[8] actor.train.tp=4 steps=200

All settings: python recipes/dapo.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import scorers, settings, task

DEFAULTS = settings.defaults("""
name: dapo            # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 200            # iterations
batch_size: 32        # prompts per sampling round
n: 8                  # responses per prompt
rows: 256             # responses in a batch, from groups whose rewards differ, in up to max_rounds rounds
max_rounds: 4         # of drawing prompts
overlong: null        # the length penalty begins this number of tokens before max_tokens; null: a fifth of them
minibatches: 4        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
clip: 0.2             # of the ratio of probabilities, downwards
clip_high: 0.28       # upwards
actor: {train: {tp: null}, generate: {tp: 1, sampling: {max_tokens: null, seed: "${seed}"}},
        optim: {lr: 1.0e-6, warmup_steps: 10}}
""")
SMALL = """
{steps: 40, minibatches: 2, batch_size: 16, rows: 128, overlong: 2,
 actor: {generate: {sampling: {max_tokens: 5}}, optim: {lr: 5.0e-5, warmup_steps: 20}}}
"""


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments, SMALL)
    job = task.of(cfg)
    loader = hf.PromptLoader(job.train, batch_size=cfg.batch_size, seed=cfg.seed, **job.columns)
    pool = hf.ResourcePool(cfg.devices)
    actor = hf.ActorWorker.on(
        pool,
        model=job.model,
        train=hf.Megatron(**cfg.actor.train),
        optim=hf.Adam(**cfg.actor.optim),
        generate=hf.VLLM(**cfg.actor.generate),
    )
    longest = cfg.actor.generate.sampling.max_tokens
    overlong = hf.rewards.Overlong(longest, cfg.overlong or max(1, longest // 5))
    reward = hf.RewardWorker.on(pool, **scorers.together(job.reward, overlong=overlong))

    def sample(prompts: hf.BatchRef) -> hf.BatchRef:
        batch = actor.generate_sequences(prompts, n=cfg.n)
        return batch | reward.compute_reward(batch)

    # groups are filtered by the task's reward alone, because length penalties differ in nearly every group
    sampler = hf.dynamic_sampling(
        loader, sample, rows=cfg.rows, steps=cfg.steps, max_rounds=cfg.max_rounds, by="rewards/task"
    )
    run = settings.run(cfg, job, actor, reward, column="rewards/task")
    for batch in run.loop(sampler):
        batch |= actor.compute_log_prob(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        metrics = actor.update_actor(
            batch, clip=cfg.clip, clip_high=cfg.clip_high, aggregation="token-mean", minibatches=cfg.minibatches
        )
        run.step(batch, metrics, sampler.metrics())
    actor.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
