"""GRPO of a model that reads images: advantages relative to other responses, no critic (docs/images.md).

    python recipes/vision.py                                            shapes counted by a generated small model
    python recipes/vision.py model=DIR prompts=FILE.jsonl reward=math devices=[8] steps=200

All settings: python recipes/vision.py --help
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import settings, shapes, task
from recipes.scorers import scorer

DEFAULTS = settings.defaults("""
name: vision          # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 200            # iterations
batch_size: 32        # prompts
n: 8                  # responses per prompt
minibatches: 4        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
shuffled: false       # of the small task: each row has the picture of another one, from which nothing can be learned
kl_coef: 0.02         # of the KL divergence from the reference
actor: {train: {tp: 1}, generate: {tp: 1, sampling: {max_tokens: null, seed: "${seed}"}},
        optim: {lr: 1.0e-6, warmup_steps: 10}}
reference: {train: {tp: 1}}
""")
SMALL = """
{steps: 40, minibatches: 2, batch_size: 16,
 actor: {generate: {sampling: {max_tokens: 3}}, optim: {lr: 5.0e-5, warmup_steps: 20}}}
"""


def job_of(cfg: Any) -> task.Task:
    """The task in `cfg`, whose model processes the images, or the small one."""
    if cfg.model is not None or cfg.prompts is not None:
        found = task.of(cfg)
    else:
        home = shapes.make(".cache", cfg.shuffled)
        train, held_out, reward = home / "train.jsonl", home / "held_out.jsonl", scorer(cfg, "reward")
        found = task.Task(model=home / "model", train=train, held_out=held_out, reward=reward)
    own = {"processor": found.model}
    return replace(found, columns=found.columns | own, held_out_columns=found.held_out_columns | own)


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments, SMALL)
    job = job_of(cfg)
    loader = hf.PromptLoader(job.train, batch_size=cfg.batch_size, steps=cfg.steps, seed=cfg.seed, **job.columns)
    pool = hf.ResourcePool(cfg.devices)
    actor = hf.ActorWorker.on(
        pool,
        model=job.model,
        train=hf.FSDP(**cfg.actor.train),
        optim=hf.Adam(**cfg.actor.optim),
        generate=hf.VLLM(**cfg.actor.generate),
    )
    reference = hf.ReferenceWorker.on(pool, model=job.model, train=hf.FSDP(**cfg.reference.train))
    reward = hf.RewardWorker.on(pool, **job.reward)

    run = settings.run(cfg, job, actor, reward)
    for prompts in run.loop(loader):
        batch = actor.generate_sequences(prompts, n=cfg.n)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        metrics = actor.update_actor(batch, kl_coef=cfg.kl_coef, minibatches=cfg.minibatches)
        run.step(batch, metrics)
    actor.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
