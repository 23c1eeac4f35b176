"""PromptLoader: batches of prompts, and the place where the loop waits; Mixture of several; TextLoader: rows for
pretraining; dynamic sampling (DAPO): prompts are drawn until a batch has enough groups with different rewards."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Self

from hybridflow.algorithms.advantages.prompt_groups import GroupFilter
from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.session import Session
from hybridflow.config import VLLM
from hybridflow.data.lm_dataset import TextSource, read_texts
from hybridflow.data.mixture import MixtureSource
from hybridflow.data.prompts import PromptSource
from hybridflow.data.resumable_sampler import check_sizes
from hybridflow.data.tokenizer import RandomTokens, TokenizerLike, as_tokenizer, has_tokenizer, load_tokenizer
from hybridflow.engines.vllm.requirements import prompt_limit
from hybridflow.errors import BatchError, ConfigError, MissingColumnError, PromptError
from hybridflow.models.hf_spec import read_spec
from hybridflow.settings import require
from hybridflow.workers.reward import retokenizes

logger = logging.getLogger(__name__)


class PromptLoader(PromptSource):
    """Yields `steps` batches of `batch_size` prompts and lets at most `in_flight` iterations be under way.

    `prompts` is a JSONL or Parquet file (or a directory or pattern of them, or a list of files), a Hugging Face dataset
    (`datasets.Dataset`, a directory of `save_to_disk`, or a hub name such as "openai/gsm8k" with its configuration
    `name` and `split`), or a list of mappings. The column `prompt` (text, or chat messages for the tokenizer's chat
    template) becomes the column `prompt`; further columns are kept for reward functions. `map(record) -> record`
    converts records first: a pure function, called once per record when the loader is built, which checks all records,
    and again for each drawn record. Rows in verl's shape also get their `reward_model["ground_truth"]` as the columns
    `ground_truth` and `answer`, unless they have these.

    Batches have `row_id` [B] int64, `prompt` and the further columns as objects, and `prompt_ids` (ragged int64) when a
    `tokenizer` (a checkpoint directory, hub name, or tokenizer of transformers) is given; otherwise the actor
    tokenises. A last message of the assistant is continued; otherwise an assistant turn is opened; with a tokenizer
    `chat_template_kwargs`, such as {"enable_thinking": False}, go to the chat template. With
    `max_prompt_tokens` longer prompts are left out; `filtered` counts them. A prompt of more than 4,194,304 characters
    is never tokenised: it is left out too, or refused without `max_prompt_tokens`. `workers` processes map and tokenise
    ahead.

    A prompt that leaves no room for a response in any group that generates is refused when the loop begins
    (`check_context=False` does not look).

    With `processor`, a model that reads images (a directory or hub name, or transformers' processor), messages may have
    parts {"type": "image"}, one for each of the row's images: the column `images`, a list or a single one of paths
    (relative ones begin at the prompts' file), bytes of files, and images of PIL or `datasets`, of at most
    `max_image_pixels`. Batches then have `pixel_values` (ragged float32) and `image_grid_thw` (ragged int64) too, and
    as `images` the bytes of files, which reward functions get as images of PIL.

    The order follows from `seed`; `state()` and `load_state` continue a run exactly, even in the middle of an epoch or
    with another number of `workers`. A state records the prompts in order and the column names; values of further
    columns may change between runs. With `allow_changed=True` a run continues with other data: in their own order, from
    the number of rows that had been drawn.

    Errors: PromptError naming file, row and column; ConfigError for settings; when iterating, WorkerError of a call
    that failed.
    """

    @classmethod
    def synthetic(
        cls, rows: int, prompt_tokens: int | tuple[int, int], model: str | os.PathLike[str], seed: int = 0, **how: Any
    ) -> Self:
        """`rows` prompts of random tokens of the model's vocabulary, none of them special, to measure throughput
        (`hf.Sampling(max_tokens=, ignore_eos=True)` fixes the lengths of responses): of `prompt_tokens` tokens each, or
        spread evenly from the first to the second number. Further arguments are those of a PromptLoader.

        Errors: ConfigError for numbers below 1; CheckpointError for a model without a tokenizer.
        """
        least, most = prompt_tokens if isinstance(prompt_tokens, tuple) else (prompt_tokens, prompt_tokens)
        check_sizes(rows=rows, prompt_tokens=least)
        check_sizes(prompt_tokens=most)
        require(least <= most, f"prompt_tokens={prompt_tokens}: give the smaller number first.")
        lengths = [least + row * (most - least + 1) // rows for row in range(rows)]
        texts = [{"prompt": f"{row:.>{size}}"[-size:]} for row, size in enumerate(lengths)]
        return cls(texts, tokenizer=RandomTokens(model, seed), seed=seed, **how)

    def drawn(self) -> Iterator[Batch]:
        """The remaining batches. Errors: PromptError for prompts that no group of the session can generate for, and for
        images that a model of the session does not read."""
        session = Session.existing() if self.check_context and _models_known() else None
        groups = [] if session is None else [*session.groups.values()]
        every = [one.settings for group in groups for one in group.all_ranks]
        able = [one for one in every if isinstance(one.get("generate"), VLLM) and has_tokenizer(one["model"])]
        limits = [prompt_limit(read_spec(one["model"], "lm"), one["generate"]) for one in able]
        check_images(self.prompts, groups)
        if limits:
            most, model = max((limit, str(one["model"])) for limit, one in zip(limits, able, strict=True))
            self.prompts.check_fit(most, partial(load_tokenizer, model), model)
        self.check_context = False  # for this loader, whose prompts do not change
        return super().drawn()

    def __iter__(self) -> Iterator[BatchRef]:
        return _iterations(self, self.in_flight)


def _models_known() -> bool:
    """Whether groups have the models of the run: in a session, and where a driver is checked before it starts."""
    return Session.replay is None or getattr(Session.replay, "checks", False)


def check_images(prompts: Any, groups: Iterable[WorkerGroup]) -> None:
    """Errors: PromptError for images of `prompts` that a model of the groups does not read, or otherwise."""
    ranks = [one for group in groups for one in group.all_ranks] if prompts.processor and _models_known() else ()
    for one in ranks:
        if one.spec.model is not None and "model" in one.settings:
            decodes = "template" in one.settings and retokenizes(one.settings)
            model = f"{one.name}, whose tokenizer= or template= decodes rows," if decodes else one.settings["model"]
            generates = one.settings.get("generate") is not None
            prompts.check_images(None if decodes else one.spec.model().images, str(model), generates)


def _iterations(loader: PromptLoader | TextLoader, in_flight: int) -> Iterator[BatchRef]:
    """The batches of a loader, each of which begins an iteration."""
    session = Session.current()
    session.attach(loader)
    for number, batch in enumerate(session.iterations.timed(loader.drawn(), "loader", ahead=1)):
        if number == 1:
            session.check_assignment()
        session.iterations.begin(in_flight)
        yield BatchRef.from_batch(batch)
    session.iterations.drain()


class Mixture(MixtureSource, PromptLoader):
    """Batches of rows of several PromptLoaders, `sources` by name, in shares that `weights` decide.

        hf.Mixture({"math": math, "code": code}, weights={"math": 0.7, "code": 0.3})

    `weights` are numbers by name (default: equal), or a function of the number of the batch, from 0, that gives them: a
    curriculum. They need not add up to 1. Shares are exact: after any number of rows a source has had its share to
    within as many rows as there are sources; `seed` decides where the pattern begins, and `taken` counts the rows. The
    order of a source's rows is that of its loader. `batch_size`, `steps`, `in_flight` and `workers` are those of the
    loaders, which must agree.

    Batches are as a PromptLoader's, `row_id` [B] int64 unique over the run, with a column `source` of names, by which
    `batch.metrics()` reports `source/<name>/...` and RewardWorker(by="source") chooses functions. `defaults` has values
    of columns for the rows of sources that lack them.

    It stands wherever a PromptLoader does; `state()` and `load_state` continue a run exactly, also with other weights.

    Errors: ConfigError for settings that differ, weights, and a state of other data; PromptError for columns.
    """


class TextLoader(TextSource):
    """Batches of `batch_size` texts for the pretraining loss: `actor.update_actor(text, loss="pretrain")`.

    `texts` is anything that a `PromptLoader` takes. The loss covers all but the first token of the column `text`
    (default "text"), between the tokenizer's begin and end tokens; each epoch takes the next piece of a text longer
    than `max_tokens`. A text of more than 65,536 characters (or 8 `max_tokens`, if more) is cut into sections of at
    most that length; each epoch tokenises the next section only and takes a piece of it. Or `prompt` and `completion`
    name two columns (text; a prompt may be chat messages, a completion one message of the assistant): the loss covers
    the completion and the end token, and rows are cut at `max_tokens`; records whose prompt leaves no room are left
    out; `filtered` counts them.

    Two names, `completion=("chosen", "rejected")`, make pairs for `loss="dpo"` and `"bradley_terry"`: of each record
    two adjacent rows with one `trajectory_id` [B] int64, and `preference` ragged float32, 1.0 at tokens of the first
    and -1.0 at those of the second. With `scored` each response has one more token, its last again: the value before
    it is the score of a reward model.

    Batches have `row_id` [B] and `num_tokens` [B] int64, `prompt_ids` and `response_ids` ragged int64, `response_mask`
    ragged bool, all True. With `steps` it is the loader of a loop, and waits and counts iterations as a `PromptLoader`.
    Without, it does neither and has no end: use `next(texts)` in the loop of another loader, or `zip(loader, texts)`.
    `state()` and `load_state` continue a run exactly; `whole()` is one batch of all texts, such as held-out ones.

    Errors: PromptError naming file, row and column; ConfigError for settings; CheckpointError without a tokenizer.
    """

    _batches: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[BatchRef]:
        return self if self.steps is None else _iterations(self, in_flight=2)

    def __next__(self) -> BatchRef:
        session = Session.current()
        session.attach(self)
        batches = self._batches = self._batches or session.iterations.timed(self.drawn(), "loader")
        try:
            batch = next(batches)
        except PromptError:
            self._batches = None  # an iterator that raised is exhausted: reusing it would end the loop silently
            raise
        return BatchRef.from_batch(batch)


def text_batch(texts: Sequence[Any], tokenizer: TokenizerLike | WorkerGroup, *, max_tokens: int | None = None) -> Batch:
    """Own texts as one batch for supervised fine-tuning: `actor.update_actor(hf.text_batch(pairs, actor), loss="sft")`.

    A text is a (prompt, completion) pair or a mapping with these two (text; the prompt may be chat messages, the
    completion a message of the assistant), or a list of messages that the assistant ends: the loss covers the
    completion and the end token. Or all of them are plain texts: the loss covers all but the first token. `tokenizer`
    is that of an actor's model, or what a `TextLoader` takes. Rows are cut at `max_tokens`. Columns are those of a
    `TextLoader`; `row_id` counts from 0. Errors: PromptError naming the row, ConfigError.
    """
    if isinstance(tokenizer, WorkerGroup) and not tokenizer.settings.get("model"):
        raise ConfigError(f"text_batch(tokenizer={tokenizer.name}): the group has no model. Give the actor.")
    given = tokenizer.settings["model"] if isinstance(tokenizer, WorkerGroup) else tokenizer
    return read_texts(texts, as_tokenizer(given), max_tokens)


def dynamic_sampling(
    loader: PromptLoader,
    sample: Callable[[BatchRef], BatchRef],
    *,
    rows: int,
    steps: int | None = None,
    max_rounds: int = 10,
    by: str = "rewards",
) -> DynamicSampler:
    """Iterates over batches of exactly `rows` rows, made of groups of responses whose scores differ.

    Groups with equal scores have zero advantage. So `sample(prompts) -> batch` (generation and rewards, with
    `group_id`) is called with further prompts of `loader` until `rows` rows are in groups with different scores;
    surplus rows are dropped. Scores are the column `by`, per row or per token: use a component `rewards/<name>` where
    other rewards would always differ.

    After `max_rounds` draws the batch is filled with groups of equal scores, and a warning is logged. The sampler
    yields `steps` batches, or as many as `loader` has prompts for: the loader's own `steps` count draws. `state()`
    continues the run with the next batch. Each batch is one iteration, which waits for its rewards; `metrics()`
    describes it.

    Yu et al., "DAPO" (2025), section 3.2, equation 11. Errors: ConfigError; BatchError for groups of different sizes,
    or of a size that does not divide `rows`; those of `sample`.
    """
    if not isinstance(loader, PromptLoader):
        raise ConfigError(f"dynamic_sampling takes a PromptLoader, got {type(loader).__name__}.")
    if not callable(sample):
        raise ConfigError(f"dynamic_sampling: sample={sample!r} must be a function of a batch of prompts.")
    check_sizes(rows=rows, max_rounds=max_rounds, **({} if steps is None else {"steps": steps}))
    return DynamicSampler(loader, sample, rows, steps, max_rounds, by)


@dataclass
class DynamicSampler:
    """The batches of `dynamic_sampling`, and the metrics of the last one."""

    loader: PromptLoader
    sample: Callable[[BatchRef], BatchRef]
    rows: int
    steps: int | None
    max_rounds: int
    by: str
    _metrics: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _done: int = field(default=0, init=False, repr=False)

    def state(self) -> dict[str, Any]:
        """State for `load_state` to continue with the next batch: plain data, for JSON."""
        return {"batches": self._done, "loader": self.loader.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Errors: ConfigError when it is not a state, or one of other data or settings."""
        if not isinstance(state, Mapping) or type(done := state.get("batches")) is not int or done < 0:
            raise ConfigError("the saved state is not one of dynamic sampling: give what state() has given.")
        self.loader.load_state(state.get("loader"))  # type: ignore[arg-type]  which is checked there
        self._done = done

    def metrics(self) -> dict[str, float]:
        """Metrics of the last batch.

        `sampling/rounds`: draws. `sampling/kept`: share of the drawn groups with different scores. `sampling/filled`:
        share of the batch's rows in groups with equal scores. `sampling/reward`: mean score of all drawn rows, which is
        the policy's; the batch's mean covers selected groups only.
        """
        return dict(self._metrics)

    def __iter__(self) -> Iterator[BatchRef]:
        session = Session.current()
        session.attach(self)
        source = session.iterations.timed(self.loader.drawn(), "loader")
        while self.steps is None or self._done < self.steps:
            session.iterations.begin(self.loader.in_flight)
            draws = self._draws(source, session)
            kept = [(batch, found.informative) for batch, found in draws]
            filled = [(batch, found.degenerate) for batch, found in draws]
            useful, others = (sum(len(group) for _, groups in kind for group in groups) for kind in (kept, filled))
            if useful + others < self.rows:
                self._explain(len(draws), useful + others)
                break
            if useful < self.rows:
                logger.warning(
                    "dynamic sampling: after %d rounds %d of %d rows are in groups whose %s differ; the others are "
                    "filled with groups of equal scores, from which nothing is learned.",
                    *(len(draws), useful, self.rows, self.by),
                )
            self._metrics, self._done = self._measured([found for _, found in draws], useful), self._done + 1
            rows = [batch.take([*chain.from_iterable(groups)]) for batch, groups in [*kept, *filled] if groups]
            yield BatchRef.concat(rows)[: self.rows]
        session.iterations.drain()

    def _draws(self, source: Iterator[Batch], session: Session) -> list[tuple[BatchRef, GroupFilter]]:
        """Until `rows` rows are in groups whose scores differ, `max_rounds` are over, or the prompts have ended."""
        out, useful = list[tuple[BatchRef, GroupFilter]](), 0
        while useful < self.rows and len(out) < self.max_rounds and (prompts := next(source, None)) is not None:
            batch = self.sample(BatchRef.from_batch(prompts))
            self._check(batch)
            found = session.controller.filter_groups(batch, self.by).get()
            sizes = {len(group) for group in (*found.informative, *found.degenerate)}
            if len(sizes) > 1:
                raise BatchError(f"dynamic_sampling needs groups of one size, got sizes {sorted(sizes)}.")
            if sizes and self.rows % (size := sizes.pop()):
                raise BatchError(
                    f"dynamic_sampling(rows={self.rows}): groups have {size} rows, which does not divide it."
                )
            useful += sum(map(len, found.informative))
            out.append((batch, found))
        return out

    def _measured(self, draws: list[GroupFilter], useful: int) -> dict[str, float]:
        informative = sum(len(draw.informative) for draw in draws)
        groups = informative + sum(len(draw.degenerate) for draw in draws)
        out = {
            "sampling/rounds": float(len(draws)),
            "sampling/kept": informative / max(groups, 1),
            "sampling/filled": max(0, self.rows - useful) / self.rows,
        }
        scored = sum(draw.rows for draw in draws)
        return out | ({"sampling/reward": sum(draw.total for draw in draws) / scored} if scored else {})

    def _explain(self, rounds: int, rows: int) -> None:
        """Errors: BatchError: the prompts have ended, or `rows` is out of reach."""
        if rounds == self.max_rounds:
            raise BatchError(
                f"dynamic_sampling(rows={self.rows}): {rounds} rounds gave {rows} rows in all. Raise the loader's "
                f"batch_size or max_rounds."
            )
        if rounds:
            logger.warning(
                "dynamic sampling: the prompts ended after %d batches; %d rows do not fill another and are left out.",
                *(self._done, rows),
            )

    def _check(self, batch: object) -> None:
        if not isinstance(batch, BatchRef):
            raise ConfigError(
                f"dynamic_sampling: sample() must return the batch with its rewards, got {type(batch).__name__}."
            )
        for name in (self.by, "group_id"):
            if name not in batch:
                hint = "generate n >= 2 responses per prompt" if name == "group_id" else "sample() must compute it"
                raise MissingColumnError(f"dynamic_sampling reads {name!r}; no call has written it: {hint}.")
