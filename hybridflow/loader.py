"""PromptLoader: batches of prompts, and the place where the loop waits; TextLoader: rows for pretraining."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.session import Session
from hybridflow.data.lm_dataset import TextSource
from hybridflow.data.prompts import PromptSource
from hybridflow.errors import PromptError


class PromptLoader(PromptSource):
    """Yields `steps` batches of `batch_size` prompts and lets at most `in_flight` iterations be under way.

    `prompts` is a JSONL or Parquet file (or a directory or pattern of them, or a list of files), a Hugging Face dataset
    (`datasets.Dataset`, a directory of `save_to_disk`, or a hub name such as "openai/gsm8k" with its configuration
    `name` and `split`), or a list of mappings. The column `prompt` (text, or chat messages for the tokenizer's chat
    template) becomes the column `prompt`; further columns are kept for reward functions. `map(record) -> record`
    converts records first: a pure function, called once per record when the loader is built, which checks all records,
    and again for each drawn record.

    Batches have `row_id` [B] int64, `prompt` and the further columns as objects, and `prompt_ids` (ragged int64) when a
    `tokenizer` (a checkpoint directory, hub name, or tokenizer of transformers) is given; otherwise the actor
    tokenises. A last message of the assistant is continued; otherwise an assistant turn is opened. With
    `max_prompt_tokens` longer prompts are left out; `filtered` counts them. A prompt of more than 4,194,304 characters
    is never tokenised: it is left out too, or refused without `max_prompt_tokens`. `workers` processes map and tokenise
    ahead.

    The order follows from `seed`; `state()` and `load_state` continue a run exactly, even in the middle of an epoch or
    with another number of `workers`. A state records the prompts in order and the column names; values of further
    columns may change between runs.

    Errors: PromptError naming file, row and column; ConfigError for settings; when iterating, WorkerError of a call
    that failed.
    """

    def __iter__(self) -> Iterator[BatchRef]:
        session = Session.current()
        for batch in self.drawn():
            session.next_iteration(self.in_flight)
            yield BatchRef.from_batch(batch)
        session.drain()


class TextLoader(TextSource):
    """Batches of `batch_size` texts for the pretraining loss, without end: `actor.update_actor(text, loss="pretrain")`.

    `texts` is anything that a `PromptLoader` takes. The loss covers all but the first token of the column `text`
    (default "text"), between the tokenizer's begin and end tokens; each epoch takes the next piece of a text longer
    than `max_tokens`. A text of more than 65,536 characters (or 8 `max_tokens`, if more) is cut into sections of at
    most that length; each epoch tokenises the next section only and takes a piece of it. Or `prompt` and `completion`
    name two columns (text; a prompt may be chat messages, a completion one message of the assistant): the loss covers
    the completion and the end token, and rows are cut at `max_tokens`; records whose prompt leaves no room are left
    out; `filtered` counts them.

    Batches have `row_id` [B] and `num_tokens` [B] int64, `prompt_ids` and `response_ids` ragged int64, `response_mask`
    ragged bool, all True. Unlike a `PromptLoader` it neither waits nor counts iterations: use `next(texts)` in the
    loop, or `zip(loader, texts)`. `state()` and `load_state` continue a run exactly.

    Errors: PromptError naming file, row and column; ConfigError for settings; CheckpointError without a tokenizer.
    """

    _batches: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[BatchRef]:
        return self

    def __next__(self) -> BatchRef:
        self._batches = self._batches or self.drawn()
        try:
            batch = next(self._batches)
        except PromptError:
            self._batches = None  # an iterator that raised is exhausted: reusing it would end the loop silently
            raise
        Session.current()  # its store holds large columns
        return BatchRef.from_batch(batch)
