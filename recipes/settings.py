"""Settings of a recipe: common settings, the recipe's defaults, and `key=value` arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import TagToken, YAMLError, scan

import hybridflow as hf
from hybridflow.errors import ConfigError, nearest

COMMON = """
seed: 1
model: null           # a Hugging Face directory or hub name; null: the small arithmetic model
prompts: null         # JSONL, Parquet, a dataset's directory or hub name (openai/gsm8k data.name=main data.split=train)
held_out: null        # as prompts, for greedy accuracy before and after the run (data.held_out_split=test)
reward: exact         # exact, math, numeric, regex, code, FILE.py:FUNCTION, or the directory of a reward model
data:                 # columns of prompts and references (unit tests for code), and options of datasets
  {prompt: prompt, answer: answer, pattern: null, max_prompt_tokens: null,
   name: null, split: null, held_out_split: null}
checkpoint_every: 20  # iterations; 0: none
resume: auto          # auto: continue the run of this name if it has not ended; never: start anew; or a checkpoint
track: []             # tensorboard, wandb, mlflow
scoring: {workers: 0, timeout: null, on_failure: raise, train: {}}    # reward functions; train: reward models
"""


def read(defaults: str, arguments: Sequence[str]) -> Any:
    """`COMMON` and a recipe's `defaults` (YAML), changed by `key=value` arguments.

    The options in a role's section (`actor.train.pp=2`) are checked later, by the strategy class.
    Errors: ConfigError for an unknown key, with the nearest known one, and for a YAML tag, which could name an object.
    """
    settings = OmegaConf.merge(OmegaConf.create(COMMON), OmegaConf.create(defaults))
    for argument in arguments:
        key, given, value = argument.partition("=")
        if not given or not key:
            raise ConfigError(f"{argument!r} is no setting: write key=value, like steps=100.")
        try:
            if any(isinstance(token, TagToken) for token in scan(value)):
                raise ConfigError(f"{argument}: a YAML tag ('!') names a type. Leave it out, or quote the value.")
            change = OmegaConf.from_dotlist([argument])
            _check(settings, change, key)
            settings = OmegaConf.merge(settings, change)
        except (OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(f"{argument}: {str(error).splitlines()[0]}.") from None
    return settings


def tracker(cfg: Any) -> hf.Tracker:
    """The record of the run, in runs/<name>."""
    return hf.Tracker(f"runs/{cfg.name}", to=tuple(cfg.track), total=cfg.steps)


def checkpoints(cfg: Any) -> hf.Checkpoints:
    """Checkpoints of the run, in runs/<name>/checkpoints."""
    return hf.Checkpoints(f"runs/{cfg.name}/checkpoints", every=cfg.checkpoint_every or None, resume=str(cfg.resume))


def _check(settings: Any, change: Any, key: str, depth: int = 0) -> None:
    for name in change:
        if name not in settings:
            raise ConfigError(f"there is no setting {key!r}.{nearest(str(name), map(str, settings))}")
        if isinstance(settings[name], DictConfig):
            if not isinstance(change[name], DictConfig):
                raise ConfigError(f"{key}={change[name]} replaces the settings {', '.join(settings[name])}: name one.")
            if depth == 0:
                _check(settings[name], change[name], key, depth + 1)
