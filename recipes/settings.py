"""What recipes share that is not the algorithm: settings from the command line, and greedy accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import hybridflow as hf
from hybridflow.data.prompts import read_prompts


@dataclass(frozen=True)
class Files:
    """A model and its prompts."""

    model: str | Path
    train: str | Path | None
    held_out: str | Path | None


def read(defaults: str, arguments: Sequence[str]) -> Any:
    """`defaults` (YAML) changed by `key=value` arguments. Errors: ConfigError for an unknown key."""
    settings = OmegaConf.create(defaults)
    OmegaConf.set_struct(settings, True)
    try:
        changes = OmegaConf.from_dotlist(list(arguments))
        return OmegaConf.merge(settings, changes)
    except OmegaConfBaseException as error:
        raise hf.errors.ConfigError(f"{' '.join(arguments)}: {error}") from None


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
