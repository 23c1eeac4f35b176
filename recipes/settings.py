"""Settings of a recipe, and what they decide: the run's directory, its record and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import hybridflow as hf
from hybridflow.cli.command_line import check_sections, read_settings
from hybridflow.cli.launch import run_directory
from hybridflow.errors import ConfigError
from recipes.sizes import fit
from recipes.task import Task

RUN = """
seed: 1               # of prompts, sampling and initial values
model: null           # a Hugging Face directory or hub name; null: the recipe's small model, with its SMALL settings
track: []             # tensorboard, wandb, mlflow
checkpoint_every: 20  # iterations; 0: none
record_batches: false # keep generated batches as long as checkpoints, for hybridflow replay
resume: auto          # auto: continue the run of this name if it has not ended; never: start anew; or a checkpoint
"""
TASK = """
prompts: null         # JSONL, Parquet, a dataset's directory or hub name (openai/gsm8k data.name=main data.split=train)
held_out: null        # as prompts, for greedy accuracy before and after the run (data.held_out_split=test)
evaluate_every: 0     # iterations between further such evaluations, whose best checkpoint is kept; 0: none
experts: 0            # of the recipe's small model, which is then a mixture of experts
reward: exact         # exact, math, numeric, regex, code, FILE.py:FUNCTION, or the directory of a reward model
data:                 # columns of prompts and references (unit tests for code), and options of datasets
 {prompt: prompt, answer: answer, pattern: null, max_prompt_tokens: null, name: null, split: null, held_out_split: null}
scoring: {workers: 0, timeout: null, on_failure: raise, train: {}}    # reward functions; train: reward models
"""


def defaults(own: str) -> tuple[str, str, str]:
    """Default settings of a recipe: those that others have, too, and its `own` (YAML)."""
    return RUN, TASK, own


def read(defaults: Sequence[str], arguments: Sequence[str], small: str = "") -> Any:
    """A recipe's `defaults` changed by arguments: see `read_settings`, `sizes.fit`. `small` (YAML) has the sizes for
    its own small model; responses of another model may fill half of its context. Errors: ConfigError."""
    cfg = read_settings(*defaults, arguments=arguments)
    if small and cfg.model is None:
        cfg = read_settings(*defaults, small, arguments=arguments)
    fit(cfg)
    _ = [optim.setdefault("total_steps", steps) for optim, steps in _schedules(cfg)]  # they end with the run
    check_sections(cfg)
    every, saved = cfg.get("evaluate_every") or 0, cfg.get("checkpoint_every") or 0
    if every < 0 or saved < 0 or (every and saved % every):
        raise ConfigError(f"evaluate_every={every}: give checkpoint_every as a multiple of that, not {saved}.")
    return cfg


def _schedules(cfg: Any) -> Iterator[tuple[Any, int]]:
    """Options of optimizers with a schedule, and the steps that they make in the run."""
    for role, options in cfg.items():
        optim = options.get("optim") if isinstance(options, dict | type(cfg)) else None
        if optim is not None and optim.get("schedule", "constant") != "constant":
            texts = role == "actor" and bool("pretrain_coef" in cfg or cfg.get("supervised"))  # a step of their own
            yield optim, cfg.steps * (cfg.minibatches * cfg.get("epochs", 1) + texts)


def directory(cfg: Any) -> Path:  # `name` if it is a path, such as ./first, otherwise runs/<name>
    return run_directory(str(cfg.name))


def run(
    cfg: Any,
    job: Task | None = None,
    *groups: hf.WorkerGroup,
    column: str = "rewards",
    model: Any = None,
    held_out: hf.HeldOut | hf.HeldOutLoss | None = None,
) -> hf.Run:
    """The run in its directory, with the settings as config.yaml, and `held_out`, or where the job has held-out prompts
    the mean of `column` of greedy answers. `groups`: who answers, who judges. Errors: ConfigError."""
    given = OmegaConf.create(cfg)
    for optim, steps in _schedules(given):
        if optim.total_steps == steps:  # as `read` found it: with other settings it is another number
            del optim.total_steps
    every = cfg.get("evaluate_every") or 0
    if job is not None and job.held_out is not None:
        how = {"every": every, "column": column, "options": job.held_out_columns}
        held_out = hf.HeldOut(groups[0], groups[1], job.held_out, **how)
    elif every and held_out is None:
        raise ConfigError(f"evaluate_every={every} needs held-out prompts: give held_out=.")
    how = {"total": cfg.steps, "every": cfg.checkpoint_every or None, "resume": str(cfg.resume)}
    how |= {"batches": cfg.record_batches, "config": OmegaConf.to_container(given), "to": tuple(cfg.track)}
    where = cfg.name if "://" in str(cfg.name) else directory(cfg)
    return hf.Run(where, tokenizer=model if job is None else job.model, held_out=held_out, **how)


def finish(run: hf.Run) -> None:
    run.finish()
    print("closing groups", flush=True)  # takes seconds
    hf.shutdown()
