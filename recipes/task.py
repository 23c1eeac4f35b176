"""Task: the model, prompts and reward of a recipe."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hybridflow as hf
from hybridflow.errors import ConfigError
from recipes.scorers import scorer
from recipes.small_model import SmallModel

_WORKSHEETS = 4096


@dataclass(frozen=True, kw_only=True)
class Task:
    """`columns` are the PromptLoader options for `train`, `held_out_columns` those for `held_out` (accuracy).

    `reward` has the options of a RewardWorker.
    """

    model: str | Path
    train: str | Path
    held_out: str | Path | None
    columns: dict[str, Any] = field(default_factory=dict)
    held_out_columns: dict[str, Any] = field(default_factory=dict)
    reward: dict[str, Any]


def of(cfg: Any) -> Task:
    """The task in `cfg`, or the small arithmetic task. Errors: ConfigError for a model or prompts alone."""
    reward = scorer(cfg, "reward")
    if cfg.model is None and cfg.prompts is None:
        from recipes import arithmetic  # late: it takes torch

        small = SmallModel(experts=cfg.get("experts", 0))
        files = arithmetic.make(".cache", arithmetic.Arithmetic(model=small))
        return Task(model=files.model, train=files.train, held_out=files.held_out, reward=reward)
    if cfg.get("experts"):
        raise ConfigError(f"experts={cfg.experts} are those of the small model, and model={cfg.model} is another one.")
    if cfg.model is None or cfg.prompts is None:
        raise ConfigError(f"model={cfg.model} and prompts={cfg.prompts}: give both, a model and prompts for it.")
    data = cfg.data
    columns: dict[str, Any] = {"prompt": data.prompt, "name": data.name}
    limit = {"max_prompt_tokens": data.max_prompt_tokens, "tokenizer": cfg.model} if data.max_prompt_tokens else {}
    return Task(
        model=cfg.model,
        train=cfg.prompts,
        held_out=cfg.held_out,
        columns=columns | {"split": data.split} | limit,
        held_out_columns=columns | {"split": data.held_out_split},
        reward=reward,
    )


def teacher(cfg: Any) -> str | Path:
    """The teacher in `cfg`, or for the arithmetic task a small model whose answers are right.

    Errors: ConfigError for a model without a teacher.
    """
    if cfg.teacher is None and cfg.model is not None:
        raise ConfigError(f"model={cfg.model} learns from a teacher: give teacher=, a model with the same tokenizer.")
    from recipes import arithmetic  # late: it takes torch

    return cfg.teacher or arithmetic.make(".cache", arithmetic.Arithmetic(right=1.0, slip=0.0)).model


def texts(cfg: Any, job: Task) -> hf.TextLoader:
    """Texts for the language-model loss: `texts=...` with a column `text`, otherwise prompts with their answers.

    For the arithmetic task these are worksheets like those in the model's training, most of them wrong.
    """
    sizes = {"batch_size": cfg.batch_size, "max_tokens": cfg.text_tokens, "tokenizer": job.model, "seed": cfg.seed}
    if cfg.texts is not None:
        return hf.TextLoader(cfg.texts, **sizes)
    columns = {"prompt": cfg.data.prompt, "completion": cfg.data.answer}
    if cfg.model is not None:
        return hf.TextLoader(job.train, **columns, split=cfg.data.split, name=cfg.data.name, **sizes)
    from recipes import arithmetic

    rng, (pairs, _) = random.Random(cfg.seed), arithmetic.Arithmetic().problems()
    sheets = (arithmetic.Arithmetic().worksheet(pairs, rng) for _ in range(_WORKSHEETS))
    return hf.TextLoader(
        [{"prompt": asked, "answer": told} for asked, told in sheets], prompt="prompt", completion="answer", **sizes
    )
