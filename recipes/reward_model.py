"""A reward model (Bradley and Terry; Ouyang et al. 2022): a value head learns which of two completions is preferred.

    python recipes/reward_model.py                                      sums: right answers are preferred
    python recipes/reward_model.py model=DIR texts=PAIRS.jsonl held_out=OTHER.jsonl devices=[8]
    python recipes/grpo.py reward=runs/reward_model/model ...           its use

All settings: python recipes/reward_model.py --help
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
name: reward_model    # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 500            # iterations
batch_size: 64        # pairs
minibatches: 1        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
center: 0.0           # of the square of a pair's scores, added up: keeps scores near 0
data:                 # columns: texts, or chat messages and one of the assistant; options of datasets
 {prompt: prompt, chosen: chosen, rejected: rejected, name: null, split: null, held_out_split: null}
critic: {train: {tp: null}, optim: {lr: 1.0e-5, warmup_steps: 10}}
""",
)
SMALL = """
{steps: 60, text_tokens: 64, critic: {optim: {lr: 1.0e-3, warmup_steps: 5}}}
"""


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments, SMALL)
    model, loader, held_out = texts.loaders(cfg, "chosen", "rejected", scored=True)
    pool = hf.ResourcePool(cfg.devices)
    critic = hf.CriticWorker.on(
        pool, model=model, train=hf.Megatron(**cfg.critic.train), optim=hf.Adam(**cfg.critic.optim)
    )
    loss, every = hf.algorithms.BradleyTerry(center=cfg.center), cfg.evaluate_every
    measured = None if held_out is None else hf.HeldOutLoss(critic.compute_values, held_out, loss, every=every)

    run = settings.run(cfg, held_out=measured, model=model)
    for batch in run.loop(loader):
        run.step(batch, critic.update_critic(batch, loss=loss, minibatches=cfg.minibatches))
    critic.save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
