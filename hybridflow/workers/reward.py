"""RewardWorker and CostWorker: scores of responses, from a model or from Python functions (paper, table 4).

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from hybridflow.algorithms.masked import response_mask, row_column, token_column
from hybridflow.algorithms.trajectories import Trajectories
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import Megatron, TrainStrategy
from hybridflow.data.encoded_image import EncodedImage
from hybridflow.data.tokenizer import Tokenizer, check_messages, has_tokenizer, load_tokenizer, plain_messages
from hybridflow.engines.agreement import agree
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.contract import PARAMETERS
from hybridflow.engines.worker_spec import WorkerSpec
from hybridflow.errors import CheckpointError, ConfigError, PromptError, RewardError, nearest, rows_named
from hybridflow.models.images import GRIDS, IMAGES, PIXELS
from hybridflow.protocols.operation import Settings, register
from hybridflow.protocols.protocol import THREE_D_PROTO
from hybridflow.rewards.functions import Functions
from hybridflow.settings import require
from hybridflow.topology import RankGrid
from hybridflow.workers.model_worker import ModelWorker

_OF_FUNCTIONS: dict[str, Any] = {"weights": None, "by": None, "workers": 0, "timeout": None, "on_failure": "raise"}
_OF_MODELS: dict[str, Any] = {"template": "auto"}
Template = Literal["auto", "plain", "chat"]
TEXT_READS = ("prompt|prompt_ids", "response|response_ids", "response_ids?", "finished?", "row_id?", f"{GRIDS}?")
"""Columns of rows that are re-tokenised."""


def check_reward_model(worker: str, role: str, settings: Mapping[str, Any]) -> None:
    """Check a reward model's checkpoint on the driver.

    Errors: CheckpointError without a head, ConfigError for an unusable template or tokenizer.
    """
    model, template = settings["model"], settings["template"]
    checkpoint = Checkpoint(model)
    if checkpoint.find("score.weight") is None:
        found = "a language model's lm_head.weight" if checkpoint.find("lm_head.weight") else "no head"
        raise CheckpointError(
            f"{role}: {model} has {found} and no score.weight: as a {role} model it would give 0 "
            f"for every row. Give a sequence-classification checkpoint (one label), or function=."
        )
    if template not in get_args(Template):
        raise ConfigError(f"{worker}(template={template!r}) is unknown.{nearest(str(template), get_args(Template))}")
    needed = "tokenizer=" if settings["tokenizer"] is not None else "template='chat'" if template == "chat" else None
    require(
        needed is None or has_tokenizer(model),
        f"{worker}({needed}): {model} has no tokenizer of its own, so rows cannot be put into its tokens. Add its "
        f"tokenizer files to the directory; or leave {needed} out, and ids go in as they are.",
    )
    require(
        template != "chat" or load_tokenizer(model).raw.chat_template is not None,
        f"{worker}(template='chat'): the tokenizer of {model} has no chat template. Use template='plain', or add one "
        f"(chat_template.jinja).",
    )
    require(
        settings["level"] != "token" or not retokenizes(settings),
        f"{worker}(level='token'): rows are re-tokenised for {model}, so its tokens are not those of the response. Use "
        f"level='sample', or a model with the actor's tokenizer and template='auto'.",
    )


def retokenizes(settings: Mapping[str, Any]) -> bool:
    """Whether token ids must pass through text: a chat template is requested, or the tokenizers differ.

    Tokenizers are equal if their vocabularies and their begin and end tokens are: rows without padding hold no others.
    """
    if settings["template"] == "chat":
        return True
    model, tokenizer = settings["model"], settings["tokenizer"]
    return tokenizer is not None and not _same_tokenizer(str(model), str(tokenizer))


@lru_cache(maxsize=16)
def _same_tokenizer(one: str, other: str) -> bool:
    if Path(one).resolve() == Path(other).resolve():
        return True
    found, expected = load_tokenizer(one).raw, load_tokenizer(other).raw
    ends = ("bos_token_id", "eos_token_id")
    same_ends = all(getattr(found, name) == getattr(expected, name) for name in ends)
    return same_ends and found.get_vocab() == expected.get_vocab()


class Retokenizer:
    """Decodes rows with the actor's tokenizer (default: the reward model's own) and re-encodes them.

    Prompts of chat messages, with `template="chat"` all prompts, go through the reward model's chat template with the
    response as the assistant's turn (or its continuation), which stays open where the response was cut. Other rows are
    prompt + response as one text, with the special tokens that the model's tokenizer adds, and its end token where the
    response was ended. `limit` is the reward model's maximum of tokens.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None,
        template: Template,
        limit: int,
    ) -> None:
        self.own = load_tokenizer(model)
        self.actors: Tokenizer = self.own if tokenizer is None else load_tokenizer(tokenizer)
        self.template, self.limit = template, limit

    def __call__(self, batch: Batch) -> Batch:
        """`prompt_ids` ragged [B, S] int64 with whole rows in the reward model's tokens, and empty `response_ids`.
        Errors: RewardError naming the row, for messages that cannot be rendered, no tokens, or too many; ConfigError
        for rows with images.
        """
        if GRIDS in batch and (seen := int((token_column(batch, GRIDS).lengths > 0).sum())):
            raise ConfigError(
                f"{seen} of {len(batch)} rows have images, of which a reward model with a tokenizer of its own would "
                f"read the text only. Use a function, or a reward model of the policy's family without tokenizer=."
            )
        rows = row_column(batch, "row_id").tolist() if "row_id" in batch else list(range(len(batch)))
        prompts, responses = self._texts(batch, "prompt"), self._texts(batch, "response")
        chat = [self.template == "chat" or not isinstance(prompt, str) for prompt in prompts]
        whole, texts = self._ended(batch), []
        for row, prompt, response, rendered, ended in zip(rows, prompts, responses, chat, whole, strict=True):
            text = self._chat(row, prompt, response) if rendered else prompt + response
            texts.append(text.removesuffix(self.own.turn_end) if rendered and ended is False else text)
        ids = self._encoded(texts, chat)
        end = self.own.end_id
        for tokens, rendered, ended in zip(ids, chat, whole, strict=True):
            # some tokenizers add it themselves
            if ended and not rendered and end is not None and self.own.end_ids.isdisjoint(tokens[-1:]):
                tokens.append(end)
        for row, tokens in zip(rows, ids, strict=True):
            self._check(row, len(tokens))
        nothing = Ragged.from_lengths(torch.empty(0, dtype=torch.int64), [0] * len(ids))
        return Batch({"prompt_ids": Ragged.from_rows(ids, torch.int64), "response_ids": nothing})

    def _texts(self, batch: Batch, name: str) -> Sequence[Any]:
        return batch[name] if name in batch else self.actors.decode(token_column(batch, f"{name}_ids").tolist())

    def _ended(self, batch: Batch) -> Sequence[bool | None]:
        """[B]: whether the model ended each response: the column `finished`, or its end token; None: not known."""
        if "finished" in batch:
            return row_column(batch, "finished").tolist()
        ends = self.actors.end_ids
        if "response_ids" not in batch or not ends:
            return [None] * len(batch)
        return [bool(len(row)) and int(row[-1]) in ends for row in token_column(batch, "response_ids").rows()]

    def _encoded(self, texts: Sequence[str], chat: Sequence[bool]) -> list[list[int]]:
        """Token ids of all texts; chat templates have already added their special tokens."""
        out: list[list[int]] = [[]] * len(texts)
        for rendered in (False, True):
            if at := [i for i, kind in enumerate(chat) if kind is rendered]:
                for i, ids in zip(at, self.own.ids([texts[i] for i in at], special=not rendered), strict=True):
                    out[i] = ids
        return out

    def _chat(self, row: int, prompt: Any, response: str) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.template == "plain" or self.own.raw.chat_template is None:
            why = "template='plain' takes texts" if self.template == "plain" else "its tokenizer has no chat template"
            raise RewardError(
                f"row {row}: the prompt is chat messages and the reward model cannot read them: {why}. Leave the "
                f"column 'prompt' out to have prompt_ids decoded, or use a model and template that can."
            )
        if not isinstance(messages, list):
            raise RewardError(f"row {row}: the prompt is {type(messages).__name__}, neither text nor chat messages.")
        try:
            check_messages(f"row {row}", "prompt", messages)
        except PromptError as error:
            raise RewardError(str(error)) from None
        turns = plain_messages(messages)
        if turns[-1]["role"] == "assistant":  # the response continues what the prompt began
            turns[-1]["content"] += response
        else:
            turns.append({"role": "assistant", "content": response})
        try:
            return self.own.render(turns)
        except Exception as error:  # templates are third-party programs: any error is reported with its row
            raise RewardError(f"row {row}: the reward model's chat template refuses the messages: {error}.") from error

    def _check(self, row: int, length: int) -> None:
        if not length:
            raise RewardError(f"row {row} is empty text: the reward model has nothing to score.")
        if length > self.limit:
            raise RewardError(
                f"row {row} has {length} tokens in the reward model's tokenizer, its context is {self.limit}. Make "
                f"prompts or responses shorter, or take a reward model with a longer context."
            )


def scores(role: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares the scoring operation of a worker with this role: "reward" or "cost"."""
    return register(
        THREE_D_PROTO,
        reads=partial(_reads, role),
        writes=partial(_writes, role),
        trajectories=True,
        whole=lambda own: own["function"] is not None and any(r.bound.whole for r in _functions(role, own).rewards),
    )


def _functions(role: str, settings: Settings) -> Functions:
    """Cheap to build anywhere: nothing runs before the first call."""
    own = {name: settings[name] for name in (*_OF_FUNCTIONS, "level")}
    return Functions(settings["function"], column=f"{role}s", **own)


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
