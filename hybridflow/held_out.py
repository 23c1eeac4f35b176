"""Held-out prompts, whose greedy answers have a mean reward, and held-out texts, which have a loss: before and after a
run, and every few iterations."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch

from hybridflow.algorithms.losses.loss import Loss, Totals
from hybridflow.algorithms.masked import response_mask
from hybridflow.algorithms.registry import VALUE_LOSSES, policy_loss, value_loss
from hybridflow.algorithms.trajectories import trajectories_of
from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.session import Session
from hybridflow.cluster.startup import stage
from hybridflow.data.image_processor import ImageProcessor, check_same
from hybridflow.data.lm_dataset import TextSource
from hybridflow.data.prompts import PromptSource
from hybridflow.loader import check_images
from hybridflow.settings import by_name, require
from hybridflow.tracking.tracker import Tracker, thumbnails

_SHOWN, _READ_AT_ONCE = 8, 64


class HeldOut:
    """`prompts`, which `actor` (or a rollout group) answers greedily and `reward` judges.

    `prompts` are a Batch, a PromptLoader or Mixture (its prompts, each once), or what a PromptLoader reads, and
    `options` are its. `every` iterations the metric `name` is the mean reward of the present weights (0: only before
    and after the run). `column`: the rewards that count, such as "rewards/task" where penalties are added to those of
    the task; a row whose reward is NaN does not count. `by`: a column, such as the `source` of a Mixture, whose every
    value v has a metric `name`/v.

    Errors: ConfigError, and as PromptLoader; PromptError for images that a model of the groups does not read.
    """

    @by_name
    def __init__(
        self,
        actor: WorkerGroup,
        reward: WorkerGroup,
        prompts: Batch | PromptSource | str | os.PathLike[str] | Any,
        *,
        every: int = 0,
        name: str = "held_out/reward",
        column: str = "rewards",
        by: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        require(type(every) is int and every >= 0, f"every={every!r}: give iterations, or 0 for none in between.")
        self.actor, self.reward, self.every, self.name, self.column = actor, reward, every, name, column
        ready = isinstance(prompts, Batch | PromptSource)
        require(not (ready and options), f"HeldOut(options={options!r}): they are for a file; these prompts are read.")
        self.processor: ImageProcessor | None = None
        if not isinstance(prompts, Batch):
            given: dict[str, Any] = {"batch_size": 1} | (options or {})
            found = prompts if isinstance(prompts, PromptSource) else PromptSource(prompts, **given)
            if (processor := found.prompts.processor) is not None:
                check_images(found.prompts, (actor, reward))
            # images go to the store part by part; the call numbers other prompts
            parts = map(BatchRef.from_batch, found.prompts.in_parts(_READ_AT_ONCE))
            prompts = BatchRef.concat([*parts]) if processor else found.prompts.whole().without("row_id")
            self.processor = processor
        self.by = by
        require(by is None or by in prompts, f"HeldOut(by={by!r}): the prompts have the columns {prompts.columns}.")
        self.prompts = prompts

    def check_loader(self, loader: Any) -> None:
        """Errors: PromptError where the images of `loader` are processed otherwise than those of these prompts."""
        theirs = getattr(getattr(loader, "prompts", None), "processor", None)
        if self.processor is not None and theirs is not None:
            whose = "HeldOut(options={'processor': ...}) is another one than that of the loader"
            check_same(self.processor.settings, theirs.settings, whose, "the loader's", "Give both the same")

    @property
    def best(self) -> str:
        """The metric by which `hf.Run` chooses the best checkpoint: the highest is."""
        return self.name

    def after(self, step: int) -> Evaluation:
        """The metric after iteration `step`, if it is time for one; does not wait for it."""
        return Evaluation(self._answers() if self.every and step % self.every == 0 else None, self)

    def measure(self, when: str, tracker: Tracker) -> None:
        """Note the mean reward as `accuracy_<when>`, and show some answers. `when`: "before" or "after" the run."""
        if Session.current().traces:
            self._answers()
            return
        with stage(f"generating answers {when} the run"):
            batch = self._answers()
            found = batch.get([name for name in ("prompt", "response", "answer", self.column) if name in batch])
        mean = self._mean(found)
        title = f"greedy answers {when}: mean reward {mean:.3f} on {len(found)} held-out prompts"
        shown = BatchRef.from_batch(found[:_SHOWN], number=False) | thumbnails(batch, _SHOWN)
        tracker.samples(shown.get().to_dicts(), title=title)
        tracker.note(**{f"accuracy_{when}": mean})

    def _answers(self) -> BatchRef:
        batch = self.actor.generate_sequences(self.prompts, greedy=True, n=1)
        return batch | self.reward.compute_reward(batch)

    def _mean(self, rows: Batch) -> float:
        return float(rows[self.column].nanmean())

    def metrics(self, batch: BatchRef) -> dict[str, float]:
        rows = batch.get([self.column, *([] if self.by is None else [self.by])])
        kinds = [] if self.by is None else rows[self.by]
        parts = {f"{self.name}/{kind}": rows.filter([each == kind for each in kinds]) for kind in dict.fromkeys(kinds)}
        return {self.name: self._mean(rows)} | {name: self._mean(part) for name, part in parts.items()}


class HeldOutLoss:
    """`loss` of held-out `texts`, without training on them: `held_out/loss` and the metrics of the loss.

        texts = hf.TextLoader("held_out.jsonl", batch_size=1, tokenizer=model, max_tokens=512)
        hf.HeldOutLoss(actor.compute_log_prob, texts, "sft", every=20)

    `compute` gives what the loss differentiates: `actor.compute_log_prob`, or for a loss of values
    `critic.compute_values`. `texts` are a TextLoader, whose texts are all taken once, or a batch with the columns that
    the loss reads (for "dpo" `ref_log_probs`, too). `every` iterations it is measured after a step (0: only before and
    after the run); a lower loss is better. `options` are those of the loss.

    Errors: ConfigError for a loss of other outputs; as the calls.
    """

    @by_name
    def __init__(
        self,
        compute: Callable[[Batch | BatchRef], BatchRef],
        texts: TextSource | Batch | BatchRef,
        loss: str | Loss,
        *,
        every: int = 0,
        name: str = "held_out/loss",
        **options: Any,
    ) -> None:
        require(type(every) is int and every >= 0, f"every={every!r}: give iterations, or 0 for none in between.")
        values = loss in VALUE_LOSSES if isinstance(loss, str) else loss.outputs == ("values",)
        self.loss = value_loss(loss, **options) if values else policy_loss(loss, **options)
        good = self.loss.outputs in (("values",), ("log_probs",)) and self.loss.reads is not None
        require(good, f"HeldOutLoss: {loss!r} is computed of {self.loss.outputs}; give a loss of log_probs or values.")
        self._column = "values" if values else "old_log_probs"
        self.compute, self.every, self.name = compute, every, name
        if isinstance(texts, BatchRef) and not Session.current().traces:
            texts = texts.get()  # on the driver: a host that is lost takes its rows with it
        self.texts = texts.whole() if isinstance(texts, TextSource) else texts

    @property
    def best(self) -> str:
        """As `HeldOut.best`: the lowest is."""
        return f"-{self.name}"

    def after(self, step: int) -> Evaluation:
        """The metrics after iteration `step`, if it is time for them; does not wait for them."""
        return Evaluation(self._computed() if self.every and step % self.every == 0 else None, self)

    def measure(self, when: str, tracker: Tracker) -> None:
        """Note the loss as `loss_<when>`, and its metrics likewise. `when`: "before" or "after" the run."""
        with stage(f"computing the held-out loss {when} the run"):
            batch = self._computed()
            found = {} if Session.current().traces else self.metrics(batch)
        tracker.note(**{f"{name.rpartition('/')[2]}_{when}": value for name, value in found.items()})

    def _computed(self) -> BatchRef:
        texts = self.texts if isinstance(self.texts, BatchRef) else BatchRef.from_batch(self.texts)
        return texts | self.compute(texts)

    def metrics(self, batch: BatchRef) -> dict[str, float]:
        read = [
            name.removesuffix("?") for name in (*(self.loss.reads or ()), "response_ids", "row_id?", "trajectory_id?")
        ]
        rows = batch.get([name for name in dict.fromkeys([*read, self._column]) if name in batch])
        self.loss.check(rows)
        if (whole := trajectories_of(self.loss, rows)) is not None:
            rows = whole.join(rows)
        mask = response_mask(rows)
        totals = Totals(tokens=float(mask.values.sum()), rows=len(rows), longest=float(mask.lengths.max()))
        with torch.no_grad():
            value, found = self.loss({self.loss.outputs[0]: rows[self._column]}, rows, totals)
        others = {name.rpartition("/")[2]: float(each) for name, each in found.items() if not name.endswith("loss")}
        return {f"held_out/{name}": each for name, each in others.items()} | {self.name: float(value)}


class Evaluation:
    """The metric of answers that are being generated: `get()` waits for them. Empty without a batch."""

    def __init__(self, batch: BatchRef | None, held_out: HeldOut | HeldOutLoss) -> None:
        self._batch, self._held_out, self._metrics, self._lock = batch, held_out, dict[str, float](), Lock()

    def get(self) -> dict[str, float]:
        with self._lock:  # the tracker asks, and the thread of a checkpoint
            if self._batch is not None:
                self._metrics = self._held_out.metrics(self._batch)
                self._batch = None  # its rows are not needed any more
            return dict(self._metrics)
