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
reward: exact         # exact, math, numeric, regex, code, FILE.py:FUNCTION, or the directory of a reward model
data:                 # columns of prompts and references (unit tests for code), and options of datasets
 {prompt: prompt, answer: answer, pattern: null, max_prompt_tokens: null, name: null, split: null, held_out_split: null}
scoring: {workers: 0, timeout: null, on_failure: raise, train: {}}    # reward functions; train: reward models
"""
BEST = "held_out/reward"


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


def directory(cfg: Any) -> Path:
    """The run's directory: `name` if it is a path, such as ./first, otherwise runs/<name>."""
    return run_directory(str(cfg.name))


def tracker(cfg: Any) -> hf.Tracker:
    """The record of the run, in its directory, with the settings as config.yaml."""
    given = OmegaConf.create(cfg)
    for optim, steps in _schedules(given):
        if optim.total_steps == steps:  # as `read` found it: with other settings it is another number
            del optim.total_steps
    config: Any = OmegaConf.to_container(given)
    return hf.Tracker(directory(cfg), to=tuple(cfg.track), total=cfg.steps, config=config)


def checkpoints(cfg: Any) -> hf.Checkpoints:
    """Checkpoints of the run, in its directory."""
    how = {"every": cfg.checkpoint_every or None, "best": BEST if cfg.get("evaluate_every") else None}
    return hf.Checkpoints(directory(cfg) / "checkpoints", resume=str(cfg.resume), batches=cfg.record_batches, **how)


def finish(tracker: hf.Tracker, checkpoints: hf.Checkpoints) -> None:
    """End the session; the best checkpoint becomes a note of the run."""
    if (best := checkpoints.best_checkpoint) is not None:
        tracker.note(best_checkpoint=f"{best[0].name}, {checkpoints.best} {best[1]:.3f}")
    tracker.finish()
    print("closing groups", flush=True)  # takes seconds
    hf.shutdown()


def is_traced() -> bool:
    """Whether the recipe runs without processes now."""
    from hybridflow.cluster.session import Session  # late: it takes ray

    return (session := Session.existing()) is not None and session.traces
