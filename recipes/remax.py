"""ReMax (Li et al. 2023; paper, figure 6): the reward of the greedy response is the baseline, no critic.

    python recipes/remax.py                                             arithmetic with a generated small model
    python recipes/remax.py model=DIR prompts=FILE.jsonl reward=math devices=[8] actor.train.tp=4 steps=200

All settings: python recipes/remax.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import settings, task

DEFAULTS = settings.defaults("""
name: remax           # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 200            # iterations
batch_size: 256        # prompts
minibatches: 4        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
kl_coef: 0.02         # of the KL divergence from the reference
clip: 0.2             # of the ratio of probabilities, in both directions
actor: {train: {tp: null}, generate: {tp: 1, sampling: {max_tokens: null, seed: "${seed}"}},
        optim: {lr: 1.0e-6, warmup_steps: 10}}
reference: {model: null, train: {tp: null}}
""")
SMALL = """
{steps: 40, minibatches: 2, batch_size: 128,
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
    reference = hf.ReferenceWorker.on(
        pool, model=cfg.reference.model or job.model, train=hf.Megatron(**cfg.reference.train)
    )
    reward = hf.RewardWorker.on(pool, **job.reward)

    run = settings.run(cfg, job, actor, reward)
    for prompts in run.loop(loader):
        greedy = actor.generate_sequences(prompts, greedy=True, n=1)
        baseline = reward.compute_reward(greedy).rename(rewards="baseline")
        batch = actor.generate_sequences(prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch) | baseline
        batch |= hf.compute_advantage(batch, "remax", kl_coef=cfg.kl_coef)
        metrics = actor.update_actor(batch, clip=cfg.clip, minibatches=cfg.minibatches)
        run.step(batch, metrics)
    actor.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
