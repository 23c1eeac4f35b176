"""GRPO (Shao et al., "DeepSeekMath", 2024): advantages relative to other responses, KL in the loss, no critic.

    python recipes/grpo.py                                              arithmetic with a generated small model
    python recipes/grpo.py model=DIR prompts=FILE.jsonl reward=math devices=[8] actor.train.tp=4 steps=200

All settings: python recipes/grpo.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import settings, task

DEFAULTS = settings.defaults("""
name: grpo            # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 200            # iterations
batch_size: 32        # prompts
n: 8                  # responses per prompt
minibatches: 4        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
kl_coef: 0.02         # of the KL divergence from the reference
clip: 0.2             # of the ratio of probabilities, in both directions
actor: {train: {tp: null}, generate: {tp: 1, sampling: {max_tokens: null, seed: "${seed}"}},
        optim: {lr: 1.0e-6, warmup_steps: 10}, replay_routing: false}
reference: {model: null, train: {tp: null}}
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
        replay_routing=cfg.actor.replay_routing,
    )
    reference = hf.ReferenceWorker.on(
        pool, model=cfg.reference.model or job.model, train=hf.Megatron(**cfg.reference.train)
    )
    reward = hf.RewardWorker.on(pool, **job.reward)

    run = settings.run(cfg, job, actor, reward)
    for prompts in run.loop(loader):
        batch = actor.generate_sequences(prompts, n=cfg.n)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        metrics = actor.update_actor(
            batch, clip=cfg.clip, kl_coef=cfg.kl_coef, aggregation="seq-mean-token-mean", minibatches=cfg.minibatches
        )
        run.step(batch, metrics)
    actor.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
