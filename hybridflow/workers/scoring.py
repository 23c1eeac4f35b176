"""ScoreWorker: what RewardWorker and CostWorker share: rows scored by a model, or by Python functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from hybridflow.algorithms.masked import response_mask, row_column, token_column
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import Megatron, TrainStrategy
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.engines.agreement import agree
from hybridflow.errors import ConfigError, RewardError
from hybridflow.protocols import THREE_D_PROTO, register
from hybridflow.protocols.operation import Settings
from hybridflow.rewards.functions import Functions
from hybridflow.topology import RankGrid
from hybridflow.workers.model_worker import ModelWorker
from hybridflow.workers.reward_model import TEXT_READS, Retokenizer, Template, check_reward_model, retokenizes

_OF_FUNCTIONS: dict[str, Any] = {"weights": None, "workers": 0, "timeout": None, "on_failure": "raise"}
_OF_MODELS: dict[str, Any] = {"template": "auto"}


def scores(role: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares the operation that writes the scores of a worker with this role: "reward" or "cost"."""
    return register(THREE_D_PROTO, reads=partial(_reads, role), writes=partial(_writes, role), balance=None)


def _functions(role: str, settings: Settings) -> Functions:
    """Cheap, so it is made wherever the settings are: nothing runs before it is called."""
    own = {name: settings[name] for name in (*_OF_FUNCTIONS, "level")}
    return Functions(settings["function"], column=f"{role}s", **own)


def _reads(role: str, settings: Settings, call: Settings) -> tuple[str, ...] | None:
    if settings["function"] is None:
        return TEXT_READS if retokenizes(settings) else ("prompt_ids", "response_ids")
    extra = _functions(role, settings).reads
    if extra is None:
        return None
    tokens = ("response_ids",) if settings["level"] == "token" else ()
    mask = ("response_mask|response_ids",) if settings["on_failure"] == "mask" else ()
    return ("prompt|prompt_ids", "response|response_ids", "row_id?", *tokens, *mask, *extra)


def _writes(role: str, settings: Settings, call: Settings) -> tuple[str, ...]:
    if settings["function"] is None:
        return (f"{role}s",)
    failure = () if settings["on_failure"] == "raise" else (f"{role}_failure",)
    mask = ("response_mask",) if settings["on_failure"] == "mask" else ()
    return (f"{role}s", *_functions(role, settings).writes, *failure, *mask)


class ScoreWorker(ModelWorker):
    """One rank of a sequence-classification model, or of Python functions; see RewardWorker."""

    head = "value"
    functions: Functions | None = None
    _retokenizer: Retokenizer | None = None

    @classmethod
    def grid(cls, devices: int, settings: Mapping[str, Any]) -> RankGrid:
        if settings["function"] is not None:
            return RankGrid(d=devices)
        return super().grid(devices, settings)

    @classmethod
    def check(cls, grid: RankGrid, settings: Mapping[str, Any], device_type: str) -> None:
        name = cls.__name__
        if (settings["model"] is None) == (settings["function"] is None):
            raise ConfigError(f"{name}: give either model= (a checkpoint) or function= (a Python function).")
        if settings["level"] not in ("sample", "token"):
            raise ConfigError(f"{name}(level={settings['level']!r}): give 'sample', or 'token' for scores per token.")
        if settings["function"] is None:
            _check_unused(name, settings, _OF_FUNCTIONS, "a model has no use for it, it is of function=")
            super().check(grid, settings, device_type)
            check_reward_model(name, cls.role, settings)
            return
        _functions(cls.role, settings).check()
        if settings["offload"]:
            raise ConfigError(f"{name}(offload=True): a function has nothing to move to host memory.")
        _check_unused(name, settings, _OF_MODELS, "a function has no use for it, it is of model=")

    def __init__(
        self,
        *,
        model: str | os.PathLike[str] | None = None,
        train: TrainStrategy = Megatron(),  # noqa: B008  a frozen value
        function: Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]] | None = None,
        weights: Sequence[float] | Mapping[str, float] | None = None,
        level: Literal["sample", "token"] = "sample",
        workers: int = 0,
        timeout: float | None = None,
        on_failure: Literal["raise", "zero", "mask"] = "raise",
        tokenizer: str | os.PathLike[str] | None = None,
        template: Template = "auto",
        offload: bool = False,
    ) -> None:
        self.level, self.on_failure = level, on_failure
        if model is None:
            settings = {"weights": weights, "workers": workers, "timeout": timeout, "on_failure": on_failure}
            self.functions = _functions(self.role, {"function": function, "level": level, **settings})
            self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
            return
        self._build(model, train, None, offload)
        if retokenizes({"model": model, "tokenizer": tokenizer, "template": template}):
            self._retokenizer = Retokenizer(model, tokenizer, template, self.spec.context)

    def _scored(self, method: str, batch: Batch) -> Batch | None:
        """The columns that the worker's operation writes; None off the last pipeline stage."""
        if self.functions is not None:
            return self._called(self.functions, batch)
        self.context.method = method
        with self.at_work():
            ready = {}

            def prepare() -> None:
                ready["rows"] = batch if self._retokenizer is None else self._retokenizer(batch)
                self.engine.check(ready["rows"], ("values",))

            _ = agree(self.context, prepare)
            found = self.engine.score(ready["rows"], tokens=self.level == "token")
        return None if found is None else Batch({f"{self.role}s": found})

    def _called(self, functions: Functions, batch: Batch) -> Batch:
        row_ids = row_column(batch, "row_id").tolist() if "row_id" in batch else None
        columns = {name: batch[name] for name in batch.columns}
        responses = token_column(batch, "response_ids") if "response_ids" in batch else None
        found = functions(self._texts(batch, "prompt"), self._texts(batch, "response"), columns, row_ids, responses)
        out: dict[str, Any] = {f"{self.role}s": found.rewards, **found.components}
        if self.on_failure != "raise":
            out[f"{self.role}_failure"] = list(found.failures)
        if self.on_failure == "mask":
            out["response_mask"] = _without_failed(response_mask(batch), found.failures)
        return Batch(out)

    def _texts(self, batch: Batch, name: str) -> Sequence[Any]:
        if name in batch:
            return batch[name]
        if self.tokenizer is None:
            raise RewardError(
                f"the batch has {name}_ids and no {name} text: give {type(self).__name__}.on(..., tokenizer=...)."
            )
        return self.tokenizer.decode(token_column(batch, f"{name}_ids").tolist())

    def close(self) -> None:
        try:
            if self.functions is not None:
                self.functions.close()
        finally:
            super().close()


def _check_unused(worker: str, settings: Settings, defaults: Settings, why: str) -> None:
    """Errors: ConfigError for a setting that would be ignored."""
    for name, default in defaults.items():
        if settings[name] != default:
            raise ConfigError(f"{worker}({name}={settings[name]!r}): {why}. Leave it out.")


def _without_failed(mask: Ragged, failures: Sequence[str | None]) -> Ragged:
    """The mask with nothing left of the rows that failed."""
    kept = torch.tensor([failure is None for failure in failures], dtype=torch.bool)
    return mask.with_values(mask.values & mask.expand(kept))
