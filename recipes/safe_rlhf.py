"""Safe-RLHF (Dai et al. 2023; paper, figure 6): maximises rewards with costs below a limit; with PPO-ptx.

    python recipes/safe_rlhf.py                             arithmetic with a generated small model
    python recipes/safe_rlhf.py model=DIR prompts=FILE.jsonl reward=REWARD_MODEL cost=COST_MODEL devices=[8]

All settings: python recipes/safe_rlhf.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import scorers, settings, task

DEFAULTS = settings.defaults("""
name: safe_rlhf       # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 200            # iterations
batch_size: 256       # prompts per iteration
minibatches: 4        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
kl_coef: 0.02         # of the KL divergence from the reference
clip: 0.2             # of the ratio of probabilities, in both directions
cost: too_large       # a scorer as in reward=; this one is for arithmetic
limit: 0.25           # for the mean cost of a response
lagrange_lr: 0.1      # of the multiplier of the costs
texts: null           # texts for the language-model loss (PPO-ptx); null: prompts with their answers
text_tokens: 512      # maximum length
pretrain_coef: 0.05   # weight of the loss on texts
actor: {train: {tp: null}, generate: {tp: 1, sampling: {max_tokens: null, seed: "${seed}"}},
        optim: {lr: 1.0e-6, warmup_steps: 10}}
critic: {model: null, train: {tp: null}, optim: {lr: 1.0e-5}}
cost_critic: {model: null, train: {tp: null}, optim: {lr: 1.0e-5}}
reference: {model: null, train: {tp: null}}
""")
SMALL = """
{steps: 40, minibatches: 2, batch_size: 128, text_tokens: 64,
 actor: {generate: {sampling: {max_tokens: 5}}, optim: {lr: 5.0e-5, warmup_steps: 20}},
 critic: {optim: {lr: 5.0e-4}}, cost_critic: {optim: {lr: 5.0e-4}}}
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
    costs = cfg.cost_critic
    cost_critic = hf.CriticWorker.on(
        pool, model=costs.model or job.model, of="costs", train=hf.Megatron(**costs.train), optim=hf.Adam(**costs.optim)
    )
    reference = hf.ReferenceWorker.on(
        pool, model=cfg.reference.model or job.model, train=hf.Megatron(**cfg.reference.train)
    )
    reward = hf.RewardWorker.on(pool, **job.reward)
    cost = hf.CostWorker.on(pool, **scorers.scorer(cfg, "cost"))
    text = task.texts(cfg, job)
    lagrange = hf.algorithms.Lagrange(cfg.limit, lr=cfg.lagrange_lr)

    run = settings.run(cfg, job, actor, reward)
    for prompts, examples in zip(run.loop(loader), text, strict=False):
        batch = actor.generate_sequences(prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= cost_critic.compute_values(batch)
        batch |= reward.compute_reward(batch)
        batch |= cost.compute_cost(batch)
        batch |= hf.compute_advantage(batch, "safe_rlhf", lagrange=lagrange, kl_coef=cfg.kl_coef)
        critic_metrics = critic.update_critic(batch, minibatches=cfg.minibatches)
        cost_metrics = cost_critic.update_critic(batch, minibatches=cfg.minibatches)
        actor_metrics = actor.update_actor(batch, clip=cfg.clip, minibatches=cfg.minibatches)
        text_metrics = actor.update_actor(examples, loss="pretrain", coef=cfg.pretrain_coef)
        run.step(batch, critic_metrics, cost_metrics, text_metrics, actor_metrics)
    actor.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
