"""DPO (Rafailov et al. 2023): the policy learns which of two completions is preferred, relative to a reference.

    python recipes/dpo.py                                               sums: right answers are preferred
    python recipes/dpo.py model=DIR texts=PAIRS.jsonl held_out=OTHER.jsonl devices=[8] beta=0.1

All settings: python recipes/dpo.py --help
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
name: dpo             # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 500            # iterations
batch_size: 64        # pairs
minibatches: 1        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
beta: 0.1             # how much a difference to the reference counts
label_smoothing: 0.0  # the share of pairs whose preference is taken to be wrong
data:                 # columns: texts, or chat messages and one of the assistant; options of datasets
 {prompt: prompt, chosen: chosen, rejected: rejected, name: null, split: null, held_out_split: null}
actor: {train: {tp: null}, optim: {lr: 5.0e-7, warmup_steps: 10}}
reference: {train: {tp: null}}
""",
)
SMALL = """
{steps: 40, text_tokens: 64, actor: {optim: {lr: 2.0e-4, warmup_steps: 5}}}
"""


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments, SMALL)
    model, loader, held_out = texts.loaders(cfg, "chosen", "rejected")
    pool = hf.ResourcePool(cfg.devices)
    actor = hf.ActorWorker.on(pool, model=model, train=hf.Megatron(**cfg.actor.train), optim=hf.Adam(**cfg.actor.optim))
    reference = hf.ReferenceWorker.on(pool, model=model, train=hf.Megatron(**cfg.reference.train))
    loss, measured = hf.algorithms.DPO(beta=cfg.beta, label_smoothing=cfg.label_smoothing), None
    if held_out is not None:
        pairs = hf.BatchRef.from_batch(held_out.whole())
        pairs |= reference.compute_ref_log_prob(pairs)
        measured = hf.HeldOutLoss(actor.compute_log_prob, pairs, loss, every=cfg.evaluate_every)

    run = settings.run(cfg, held_out=measured, model=model)
    for batch in run.loop(loader):
        batch |= reference.compute_ref_log_prob(batch)
        run.step(batch, actor.update_actor(batch, loss=loss, minibatches=cfg.minibatches))
    actor.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
