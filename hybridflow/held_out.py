"""Held-out prompts: the mean reward of an actor's greedy answers, before and after a run, and every few iterations."""

from __future__ import annotations

import os
from threading import Lock
from typing import Any

from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.session import Session
from hybridflow.cluster.startup import stage
from hybridflow.data.prompts import Prompts, PromptSource
from hybridflow.settings import by_name, require
from hybridflow.tracking.tracker import Tracker

_SHOWN = 8


class HeldOut:
    """`prompts`, which `actor` (or a rollout group) answers greedily and `reward` judges.

    `prompts` are a Batch, a PromptLoader or Mixture (its prompts, each once), or what a PromptLoader reads, and
    `options` are its. `every` iterations the metric `name` is the mean reward of the present weights (0: only before
    and after the run). `column`: the rewards that count, such as "rewards/task" where penalties are added to those of
    the task; a row whose reward is NaN does not count. `by`: a column, such as the `source` of a Mixture, whose every
    value v has a metric `name`/v.

    Errors: ConfigError, and as PromptLoader.
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
        if not isinstance(prompts, Batch):
            found = prompts.prompts if isinstance(prompts, PromptSource) else Prompts(prompts, **options or {})
            prompts = found.whole().without("row_id")  # the call numbers them
        self.by = by
        require(by is None or by in prompts, f"HeldOut(by={by!r}): the prompts have the columns {prompts.columns}.")
        self.prompts = prompts

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
        tracker.samples(found[:_SHOWN].to_dicts(), title=title)
        tracker.note(**{f"accuracy_{when}": mean})

    def _answers(self) -> BatchRef:
        batch = self.actor.generate_sequences(self.prompts, greedy=True, n=1)
        return batch | self.reward.compute_reward(batch)

    def _mean(self, rows: Batch) -> float:
        return float(rows[self.column].nanmean())

    def _metrics(self, batch: BatchRef) -> dict[str, float]:
        rows = batch.get([self.column, *([] if self.by is None else [self.by])])
        kinds = [] if self.by is None else rows[self.by]
        parts = {f"{self.name}/{kind}": rows.filter([each == kind for each in kinds]) for kind in dict.fromkeys(kinds)}
        return {self.name: self._mean(rows)} | {name: self._mean(part) for name, part in parts.items()}


class Evaluation:
    """The metric of answers that are being generated: `get()` waits for them. Empty without a batch."""

    def __init__(self, batch: BatchRef | None, held_out: HeldOut) -> None:
        self._batch, self._held_out, self._metrics, self._lock = batch, held_out, dict[str, float](), Lock()

    def get(self) -> dict[str, float]:
        with self._lock:  # the tracker asks, and the thread of a checkpoint
            if self._batch is not None:
                self._metrics = self._held_out._metrics(self._batch)
                self._batch = None  # its rows are not needed any more
            return dict(self._metrics)
