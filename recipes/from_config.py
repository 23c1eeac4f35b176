"""The whole run is read: model, prompts, reward, groups and the calls of an iteration are settings of one YAML file.

    python recipes/from_config.py config=recipes/from_config.yaml

All settings: python recipes/from_config.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import calls, settings, task

DEFAULTS = settings.defaults("""
name: from_config     # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 200            # iterations
batch_size: 32        # prompts
minibatches: 4        # optimizer steps per iteration, for ${minibatches} in the loop
devices: null         # devices per node; null: two, or the one GPU that is there
loop: []              # calls of an iteration in order, each with its options, see from_config.yaml
actor: {train: {tp: null}, generate: {tp: 1, sampling: {max_tokens: null, seed: "${seed}"}}, optim: {lr: 1.0e-6}}
critic: {train: {tp: null}, optim: {lr: 5.0e-6}}
reference: {train: {tp: null}}
""")


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments)
    loop, job = calls.read(cfg.loop), task.of(cfg)
    loader = hf.PromptLoader(job.train, batch_size=cfg.batch_size, steps=cfg.steps, seed=cfg.seed, **job.columns)
    groups = calls.groups(cfg, loop, job)
    run = settings.run(cfg, job, groups["actor"], groups["reward"])
    for prompts in run.loop(loader):
        batch, *metrics = calls.made(loop, groups, prompts)
        run.step(batch, *metrics)
    groups["actor"].save(run.directory / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
