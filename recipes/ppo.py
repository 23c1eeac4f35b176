"""PPO (Schulman et al. 2017; paper, figure 6) with actor, critic, reference and reward.

    python recipes/ppo.py                                   arithmetic with a generated small model
    python recipes/ppo.py model=DIR prompts=FILE.jsonl reward=math devices=[8] actor.train.tp=4 steps=200

All settings: python recipes/ppo.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import settings, task

DEFAULTS = settings.defaults("""
name: ppo             # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 200            # iterations
batch_size: 256       # prompts per iteration
minibatches: 4        # optimizer steps per iteration
epochs: 1             # over the batch in each iteration
devices: null         # devices per node; null: two, or the one GPU that is there
kl_coef: 0.02         # of the KL divergence from the reference
clip: 0.2             # of the ratio of probabilities, in both directions
actor: {train: {tp: null}, generate: {tp: 1, sampling: {max_tokens: null, seed: "${seed}"}},
        optim: {lr: 1.0e-6, warmup_steps: 10}}
critic: {model: null, train: {tp: null}, optim: {lr: 1.0e-5}}
reference: {model: null, train: {tp: null}}
""")
SMALL = """
{steps: 40, minibatches: 2, batch_size: 128,
 actor: {generate: {sampling: {max_tokens: 5}}, optim: {lr: 5.0e-5, warmup_steps: 20}},
 critic: {optim: {lr: 5.0e-4}}}
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
    critic = hf.CriticWorker.on(
        pool,
        model=cfg.critic.model or job.model,
        train=hf.Megatron(**cfg.critic.train),
        optim=hf.Adam(**cfg.critic.optim),
    )
    reference = hf.ReferenceWorker.on(
        pool, model=cfg.reference.model or job.model, train=hf.Megatron(**cfg.reference.train)
    )
    reward = hf.RewardWorker.on(pool, **job.reward)

    run = settings.run(cfg, job, actor, reward)
    for prompts in run.loop(loader):
        batch = actor.generate_sequences(prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "gae", gamma=1.0, lam=0.95, kl_coef=cfg.kl_coef)
        critic_metrics = critic.update_critic(batch, minibatches=cfg.minibatches, epochs=cfg.epochs)
        actor_metrics = actor.update_actor(batch, clip=cfg.clip, minibatches=cfg.minibatches, epochs=cfg.epochs)
        run.step(batch, critic_metrics, actor_metrics)
    actor.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
