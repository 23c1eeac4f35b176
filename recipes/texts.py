"""Texts: the model and the loaders of a recipe that learns from texts, and those of the small arithmetic task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hybridflow as hf
from hybridflow.errors import ConfigError

TEXTS = """
texts: null           # JSONL, Parquet, a dataset's directory or hub name; null: those of the small task
held_out: null        # as texts, for the held-out loss before and after the run
text_tokens: 1024     # the most tokens of a prompt with its completion
evaluate_every: 10    # iterations between further measurements, whose best checkpoint is kept; 0: none
"""


def loaders(cfg: Any, *completion: str, scored: bool = False) -> tuple[str | Path, hf.TextLoader, hf.TextLoader | None]:
    """The model, the texts of the loop and the held-out ones; `completion` are names of settings in `cfg.data`.

    Errors: ConfigError for a model or texts alone.
    """
    model, files = cfg.model, (cfg.texts, cfg.held_out)
    if model is None and cfg.texts is None:
        from recipes import arithmetic  # late: it takes torch

        task = arithmetic.make(".cache")
        model, files = task.model, tuple(_pairs(path) for path in (task.train, task.held_out))
    if model is None or files[0] is None:
        raise ConfigError(f"model={cfg.model} and texts={cfg.texts}: give both, a model and texts for it.")
    data, names = cfg.data, tuple(cfg.data[name] for name in completion)
    common: dict[str, Any] = {"tokenizer": model, "max_tokens": cfg.text_tokens, "prompt": data.prompt}
    common |= {"completion": names if scored or len(names) > 1 else "".join(names), "scored": scored, "name": data.name}
    loader = hf.TextLoader(
        files[0], batch_size=cfg.batch_size, steps=cfg.steps, seed=cfg.seed, split=data.split, **common
    )
    if files[1] is None:
        return model, loader, None
    return model, loader, hf.TextLoader(files[1], batch_size=1, split=data.held_out_split, **common)


def _pairs(path: Path) -> list[dict[str, str]]:
    """Sums with their answers, and with those that the small model prefers, which are one too large."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {"prompt": one["prompt"], "chosen": one["answer"], "rejected": str(int(one["answer"]) + 1)} for one in records
    ]
