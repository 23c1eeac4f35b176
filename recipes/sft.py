"""Supervised fine-tuning: the loss of completions after their prompts, and that of held-out ones.

    python recipes/sft.py                                               sums and their answers, a generated small model
    python recipes/sft.py model=DIR texts=FILE.jsonl held_out=OTHER.jsonl devices=[8] steps=1000

All settings: python recipes/sft.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import settings, texts

DEFAULTS = (
    settings.RUN,
    texts.TEXTS,
    """
name: sft             # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 1000           # iterations
batch_size: 64        # texts
minibatches: 1        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
data:                 # columns: texts, or chat messages and one of the assistant; options of datasets
 {prompt: prompt, completion: completion, name: null, split: null, held_out_split: null}
actor: {train: {tp: null}, optim: {lr: 1.0e-5, warmup_steps: 10, schedule: cosine}}
""",
)
SMALL = """
{steps: 40, text_tokens: 64, data: {completion: chosen}, actor: {optim: {lr: 1.0e-3, warmup_steps: 5}}}
"""


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments, SMALL)
    model, loader, held_out = texts.loaders(cfg, "completion")
    pool = hf.ResourcePool(cfg.devices)
    actor = hf.ActorWorker.on(pool, model=model, train=hf.Megatron(**cfg.actor.train), optim=hf.Adam(**cfg.actor.optim))
    every = cfg.evaluate_every
    measured = None if held_out is None else hf.HeldOutLoss(actor.compute_log_prob, held_out, "sft", every=every)

    run = settings.run(cfg, held_out=measured, model=model)
    for batch in run.loop(loader):
        run.step(batch, actor.update_actor(batch, loss="sft", minibatches=cfg.minibatches))
    actor.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
