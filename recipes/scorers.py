"""Scorers of a recipe's answers: a verifier by name, a function in a file, or a model."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hybridflow as hf
from hybridflow.errors import ConfigError, nearest

Scorer = Callable[..., Any]


def too_large(completions: list[str], answer: list[str]) -> list[float]:
    """The cost of the arithmetic task: 1.0 for a number above the answer, else 0.0."""
    return [float(text.isdigit() and int(text) > int(right)) for text, right in zip(completions, answer, strict=True)]


NAMED: dict[str, Callable[[Any], Scorer]] = {
    "exact": lambda data: hf.rewards.Exact(data.answer),
    "math": lambda data: hf.rewards.Math(data.answer),
    "numeric": lambda data: hf.rewards.Numeric(data.answer),
    "regex": lambda data: hf.rewards.Regex(data.pattern, answer=data.answer),
    "code": lambda data: hf.rewards.Code(data.answer),
    "too_large": lambda data: too_large,
}
"""Constructors of scorers that read the column `data.answer`."""


def scorer(cfg: Any, which: str) -> dict[str, Any]:
    """Options of the worker for `reward=...` or `cost=...`. Errors: ConfigError for an unknown name."""
    name, scoring = str(cfg[which]), {str(key): value for key, value in cfg.scoring.items()}
    train = scoring.pop("train")
    if name in NAMED:
        function = NAMED[name](cfg.data)
    elif ":" in name:
        function = load(name)
    elif Path(name).is_dir():
        return {"model": name, "train": hf.Megatron(**train), "tokenizer": cfg.model}
    else:
        raise ConfigError(
            f"{which}={name} is not one of {', '.join(NAMED)}, not FILE.py:FUNCTION or MODULE:FUNCTION and not the "
            f"directory of a model.{nearest(name, NAMED)}"
        )
    return {"function": function, **scoring}


def together(scoring: dict[str, Any], **others: Scorer) -> dict[str, Any]:
    """`scoring` with further functions, whose scores are added; columns are `rewards/task` and `rewards/<name>`.

    Errors: ConfigError if the rewards come from a model.
    """
    if "function" not in scoring:
        raise ConfigError(f"{', '.join(others)} can only be added to rewards of functions, not to {scoring['model']}.")
    return scoring | {"function": {"task": scoring["function"], **others}}


def load(name: str) -> Scorer:
    """The function of `FILE.py:FUNCTION`, pickled by value for other processes, or of `MODULE:FUNCTION`, which they
    import. Errors: ConfigError."""
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        try:
            return getattr(importlib.import_module(path), function)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{name}: {error}. Give MODULE:FUNCTION of an installed package.") from None
    if not Path(path).is_file():
        raise ConfigError(f"{name}: there is no file {path}.")
    module = types.ModuleType(f"recipe_file_{Path(path).stem}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look it up here
    try:
        exec(compile(Path(path).read_text(), path, "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]  # functions of an unknown module are pickled by value
    found = vars(module).get(function)
    if not callable(found):
        raise ConfigError(f"{name}: {path} has no function {function!r}.{nearest(function, vars(module))}")
    return found
