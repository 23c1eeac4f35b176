"""GKD (Agarwal et al. 2024): a student learns the whole distribution of a teacher on its own samples, without rewards.

    python recipes/distill.py                                           arithmetic with generated small models
    python recipes/distill.py model=DIR teacher=DIR prompts=FILE.jsonl devices=[8] actor.train.tp=4 top_k=64

All settings: python recipes/distill.py --help
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import settings, task

DEFAULTS = settings.defaults("""
name: distill         # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 200            # iterations
batch_size: 256       # prompts
minibatches: 4        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
teacher: null         # a Hugging Face directory or hub name; null: a small model that answers right
beta: 1.0             # 0: KL(teacher || student); 1: KL(student || teacher); between them GKD's divergence
top_k: 0              # of the teacher's distribution; 0: the whole vocabulary
supervised: false     # also learn the teacher's distribution on texts, in an update of their own
texts: null           # these texts; null: prompts with their answers
text_tokens: 512      # maximum length
actor: {train: {tp: null}, generate: {tp: 1, sampling: {max_tokens: null, seed: "${seed}"}},
        optim: {lr: 1.0e-5, warmup_steps: 10}}
reference: {train: {tp: null}}
""")
SMALL = """
{steps: 40, minibatches: 2, batch_size: 64, text_tokens: 64,
 actor: {generate: {sampling: {max_tokens: 5}}, optim: {lr: 5.0e-4, warmup_steps: 5}}}
"""


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments, SMALL)
    job, teacher = task.of(cfg), task.teacher(cfg)
    loader = hf.PromptLoader(job.train, batch_size=cfg.batch_size, steps=cfg.steps, seed=cfg.seed, **job.columns)
    pool = hf.ResourcePool(cfg.devices)
    actor = hf.ActorWorker.on(
        pool,
        model=job.model,
        train=hf.Megatron(**cfg.actor.train),
        optim=hf.Adam(**cfg.actor.optim),
        generate=hf.VLLM(**cfg.actor.generate),
        teacher=None if cfg.top_k else teacher,
    )
    reference = hf.ReferenceWorker.on(pool, model=teacher, train=hf.Megatron(**cfg.reference.train))
    reward = hf.RewardWorker.on(pool, **job.reward)
    text = task.texts(cfg, job) if cfg.supervised else itertools.repeat(None)

    teach, over = reference.compute_ref_hidden_states, "vocabulary"
    if cfg.top_k:
        teach, over = partial(reference.compute_ref_top_k, k=cfg.top_k), "top_k"
    loss = hf.algorithms.GKD(beta=cfg.beta, over=over)

    run = settings.run(cfg, job, actor, reward)
    for prompts, examples in zip(run.loop(loader), text, strict=False):
        if examples is not None:
            actor.update_actor(examples | teach(examples), loss=loss)
        batch = actor.generate_sequences(prompts)
        batch |= teach(batch)
        metrics = actor.update_actor(batch, loss=loss, minibatches=cfg.minibatches)
        batch |= reward.compute_reward(batch)  # only to look at
        run.step(batch, metrics)
    actor.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
