"""What recipes share that is not the algorithm: settings from the command line, and greedy accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import hybridflow as hf
from hybridflow.data.prompts import read_prompts
from hybridflow.errors import ConfigError, nearest


@dataclass(frozen=True)
class Files:
    """A model and its prompts; `held_out` ones are for greedy accuracy."""

    model: str | Path
    train: str | Path
    held_out: str | Path | None


def read(defaults: str, arguments: Sequence[str]) -> Any:
    """`defaults` (YAML) changed by `key=value` arguments.

    What stands in a section of a role (`actor.train.pp=2`) is checked by the strategy that it becomes.
    Errors: ConfigError for an unknown key, with the nearest known one.
    """
    settings = OmegaConf.create(defaults)
    for argument in arguments:
        key, given, _ = argument.partition("=")
        if not given or not key:
            raise ConfigError(f"{argument!r} is no setting: write key=value, like steps=100.")
        try:
            change = OmegaConf.from_dotlist([argument])
            _check(settings, change, key)
            settings = OmegaConf.merge(settings, change)
        except (OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(f"{argument}: {str(error).splitlines()[0]}.") from None
    return settings


def _check(settings: Any, change: Any, key: str, depth: int = 0) -> None:
    for name in change:
        if name not in settings:
            raise ConfigError(f"there is no setting {key!r}.{nearest(str(name), map(str, settings))}")
        if isinstance(settings[name], DictConfig):
            if not isinstance(change[name], DictConfig):
                raise ConfigError(f"{key}={change[name]} replaces the settings {', '.join(settings[name])}: name one.")
            if depth == 0:
                _check(settings[name], change[name], key, depth + 1)


def files(cfg: Any) -> Files | None:
    """The model and the prompts that were asked for; None when neither was. Errors: ConfigError for one alone."""
    if cfg.model is None and cfg.prompts is None:
        return None
    if cfg.model is None or cfg.prompts is None:
        raise ConfigError(f"model={cfg.model} and prompts={cfg.prompts}: give both, a model and prompts for it.")
    return Files(cfg.model, cfg.prompts, cfg.held_out)


class Accuracy:
    """Mean reward of greedy answers to held-out prompts; samples of them go to the tracker."""

    def __init__(self, actor: hf.WorkerGroup, reward: hf.WorkerGroup, path: str | Path | None, tracker: hf.Tracker):
        self.actor, self.reward, self.tracker = actor, reward, tracker
        self.prompts = None if path is None else hf.Batch.from_dicts(read_prompts(path))

    def measure(self, when: str) -> float | None:
        if self.prompts is None:
            return None
        batch = self.actor.generate_sequences(self.prompts, greedy=True, n=1)
        batch |= self.reward.compute_reward(batch)
        found = batch.get(["prompt", "response", "answer", "rewards"])
        accuracy = float(found["rewards"].mean())
        title = f"greedy answers {when}: {accuracy:.3f} of {len(found)} held-out prompts right"
        self.tracker.samples(found[:8].to_dicts(), title=title)
        self.tracker.note(**{f"accuracy_{when}": accuracy})
        return accuracy
