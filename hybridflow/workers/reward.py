"""RewardWorker and CostWorker: scores of responses, from a model or from Python functions (paper, table 4).

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import torch

from hybridflow.algorithms.masked import response_mask, row_column, token_column
from hybridflow.algorithms.trajectories import Trajectories
from hybridflow.batch.batch import Batch
from hybridflow.config import Megatron, TrainStrategy
from hybridflow.data.encoded_image import EncodedImage
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.engines.agreement import agree
from hybridflow.engines.contract import PARAMETERS
from hybridflow.engines.worker_spec import WorkerSpec
from hybridflow.errors import RewardError, rows_named
from hybridflow.models.images import GRIDS, IMAGES, PIXELS
from hybridflow.protocols.operation import Settings, register
from hybridflow.protocols.transfer_protocols import THREE_D_PROTO
from hybridflow.rewards.functions import Functions
from hybridflow.settings import require
from hybridflow.topology import RankGrid
from hybridflow.workers.model_worker import ModelWorker
from hybridflow.workers.reward_model import TEXT_READS, Retokenizer, Template, check_reward_model, retokenizes

_OF_FUNCTIONS: dict[str, Any] = {"weights": None, "by": None, "workers": 0, "timeout": None, "on_failure": "raise"}
_OF_MODELS: dict[str, Any] = {"template": "auto"}


def scores(role: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares the scoring operation of a worker with this role: "reward" or "cost"."""
    reads, writes = partial(_reads, role), partial(_writes, role)
    whole = partial(_takes_whole_batches, role)
    return register(THREE_D_PROTO, reads=reads, writes=writes, trajectories=True, balance=None, whole=whole)


def _functions(role: str, settings: Settings) -> Functions:
    """Cheap to build anywhere: nothing runs before the first call."""
    own = {name: settings[name] for name in (*_OF_FUNCTIONS, "level")}
    return Functions(settings["function"], column=f"{role}s", **own)


def _takes_whole_batches(role: str, settings: Settings) -> bool:
    return settings["function"] is not None and any(r.bound.whole for r in _functions(role, settings).rewards)


def _reads(role: str, settings: Settings, call: Settings) -> tuple[str, ...] | None:
    if settings["function"] is None:
        ids = TEXT_READS if retokenizes(settings) else ("prompt_ids", "response_ids", *IMAGES)
        return (*ids, *(("row_id?", "trajectory_id?") if settings["level"] == "sample" else ()))
    functions = _functions(role, settings)
    if (extra := functions.reads) is None:
        named = {entry.removesuffix("?") for reward in functions.rewards for entry in reward.bound.columns}
        unasked = {PIXELS} - named
        return tuple(name for name in call["batch"].columns if name not in unasked)
    grids = (f"{GRIDS}?",) if {"images", "images?"} & {*extra} else ()
    tokens = ("response_ids",) if settings["level"] == "token" else ()
    mask = ("response_mask|response_ids",) if settings["on_failure"] == "mask" else ()
    return ("prompt|prompt_ids", "response|response_ids", "row_id?", "trajectory_id?", *grids, *tokens, *mask, *extra)


def _are_files(images: Sequence[Any]) -> bool:
    """Whether a column `images` is that of a loader with a processor."""
    rows = [() if row is None else row for row in images]
    return all(isinstance(row, list | tuple) and all(isinstance(one, EncodedImage) for one in row) for row in rows)


def _writes(role: str, settings: Settings, call: Settings) -> tuple[str, ...]:
    if settings["function"] is None:
        return (f"{role}s",)
    failure = () if settings["on_failure"] == "raise" else (f"{role}_failure",)
    mask = ("response_mask",) if settings["on_failure"] == "mask" else ()
    return (f"{role}s", *_functions(role, settings).writes, *failure, *mask)


class ScoreWorker(ModelWorker):
    """Base of RewardWorker and CostWorker."""

    head = "value"
    functions: Functions | None = None
    _retokenizer: Retokenizer | None = None

    @classmethod
    def worker_spec(cls, settings: Settings) -> WorkerSpec:
        spec = super().worker_spec(settings)
        return replace(spec, check=partial(_check, cls.__name__, cls.role, settings, spec))

    def __init__(
        self,
        *,
        model: str | os.PathLike[str] | None = None,
        train: TrainStrategy = Megatron(),  # noqa: B008  a frozen value
        function: Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]] | None = None,
        weights: Sequence[float] | Mapping[str, float] | None = None,
        by: str | None = None,
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
            settings = {"weights": weights, "by": by, "workers": workers, "timeout": timeout, "on_failure": on_failure}
            self.functions = _functions(self.role, {"function": function, "level": level, **settings})
            self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
            return
        self._build(model, train, None, offload)
        if retokenizes({"model": model, "tokenizer": tokenizer, "template": template}):
            self._retokenizer = Retokenizer(model, tokenizer, template, self.spec.context)

    def _scored(self, batch: Batch) -> Batch | None:
        """The columns of the worker's operation; None except on the last pipeline stage."""
        rows, whole = batch, None

        def prepare() -> None:
            nonlocal rows, whole
            if self.level == "sample" and (whole := Trajectories.of(batch)) is not None:
                rows = batch.reorder(whole.last)
            if self.functions is not None:
                return
            if self._retokenizer is not None:
                rows = self._retokenizer(rows)
            with rows_named(lambda row: self.context.row_number(row if whole is None else int(whole.last[row]))):
                self.engine.check(rows, ("values",))

        if self.functions is not None:
            prepare()
            out = self._called(self.functions, rows)
        else:
            with self.resident(PARAMETERS):
                _ = agree(self.context, prepare)
                found = self.engine.score(rows, tokens=self.level == "token")
            if found is None:
                return None
            out = Batch({f"{self.role}s": found})
        out = out if whole is None else whole.spread(out)
        if self.functions is not None and self.on_failure == "mask":
            failed: Any = out.peek(f"{self.role}_failure")
            kept = torch.tensor([failure is None for failure in failed], dtype=torch.bool)
            mask = response_mask(batch)
            return out.with_columns(response_mask=mask.with_values(mask.values & mask.expand(kept)))
        return out

    def _called(self, functions: Functions, batch: Batch) -> Batch:
        row_ids = row_column(batch, "row_id").tolist() if "row_id" in batch else None
        columns = {name: batch[name] for name in batch.columns}
        if not _are_files(columns.get("images", ())):  # a column of the user's own
            columns.pop(GRIDS, None)
        elif GRIDS in columns and any({"images", "images?"} & {*reward.bound.columns} for reward in functions.rewards):
            opened = cache(EncodedImage.open)
            columns["images"] = [[opened(one).copy() for one in row or ()] for row in columns["images"]]
        responses = token_column(batch, "response_ids") if "response_ids" in batch else None
        found = functions(self._texts(batch, "prompt"), self._texts(batch, "response"), columns, row_ids, responses)
        out: dict[str, Any] = {f"{self.role}s": found.rewards, **found.components}
        if self.on_failure != "raise":
            out[f"{self.role}_failure"] = list(found.failures)
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


class RewardWorker(ScoreWorker):
    """One rank of a reward model (a sequence-classification checkpoint), or of Python functions.

    Functions: `function(prompts, completions, **columns) -> list[float]` (or several, with `weights`) gets texts and
    the batch columns that its parameters name; with a first parameter named `prompt` it is called row by row. See
    `hf.rewards` for all conventions. Each rank scores its share of the rows: a function that compares rows is wrapped
    in `hf.rewards.whole_batch`, and gets all of them on one rank. With `by`, a column, a row is judged by the function
    of its name alone: `function={"math": f, "code": g}, by="source"` for a Mixture; every row needs one. With `workers`
    they run in that many worker processes per rank, each call within `timeout` seconds. A failed row raises; with
    `on_failure="zero"` it gets 0, with "mask" it is also excluded from training. `tokenizer` is needed when the batch
    has token ids and no texts. `images` of a loader with a processor are images of PIL, a list for each row, for
    functions that name them.

    Models: `tokenizer` is the actor's. If the model's own differs, rows are decoded and re-encoded: chat messages in
    `prompt` through the model's chat template, texts as prompt + response. `template="chat"` applies the template to
    every row, "plain" to none. `offload=True` keeps the model in host memory between calls.

    `level="token"`: a reward for every response token (of a model, its head at the token's position).
    """

    role = "reward"

    @scores("reward")
    def compute_reward(self, batch: Batch) -> Batch | None:
        """`rewards` [B] float32, or ragged [B, R] float32 at level "token". Of the rows with one `trajectory_id` the
        last is scored, for all of them, unless at level "token".

        Several functions also write `rewards/<name>` [B] float32 each, NaN where a function does not apply. Unless
        `on_failure` is "raise", `reward_failure` is a reason or None per row; with "mask", failed rows have an
        all-False `response_mask`.

        Errors: RewardError naming the function and the row; never a silent 0.
        """
        return self._scored(batch)


class CostWorker(ScoreWorker):
    """One rank of a cost model, or of Python functions that score the harm of a response.

    Its settings are those of a RewardWorker. A cost above 0 is unwanted: training keeps its mean below a limit (Dai et
    al., "Safe RLHF", 2023).
    """

    role = "cost"

    @scores("cost")
    def compute_cost(self, batch: Batch) -> Batch | None:
        """`costs` [B] float32, or ragged [B, R] float32 at level "token"; as `compute_reward` of a RewardWorker, with
        components `costs/<name>` and `cost_failure`.

        Errors: RewardError naming the function and the row; never a silent 0.
        """
        return self._scored(batch)


def _check(name: str, role: str, settings: Settings, spec: WorkerSpec, grid: RankGrid, device_type: str) -> None:
    one, level = (settings["model"] is None) != (settings["function"] is None), settings["level"]
    require(one, f"{name}: give either model= (a checkpoint) or function= (a Python function).")
    good = level in ("sample", "token")
    require(good, f"{name}(level={level!r}): give 'sample', or 'token' for scores per token.")
    if settings["function"] is None:
        _check_unused(name, settings, _OF_FUNCTIONS, "a model has no use for it, it is of function=")
        spec.check(grid, device_type)
        check_reward_model(name, role, settings)
        return
    _functions(role, settings).check()
    require(not settings["offload"], f"{name}(offload=True): a function has nothing to move to host memory.")
    _check_unused(name, settings, _OF_MODELS, "a function has no use for it, it is of model=")


def _check_unused(worker: str, settings: Settings, defaults: Settings, why: str) -> None:
    """Errors: ConfigError for a setting without effect."""
    for name, default in defaults.items():
        require(settings[name] == default, f"{worker}({name}={settings[name]!r}): {why}. Leave it out.")
