"""Greedy accuracy of an actor on held-out prompts: before and after a run, and every few iterations."""

from __future__ import annotations

from threading import Lock

import hybridflow as hf
from hybridflow.cluster.startup import stage
from hybridflow.errors import ConfigError
from recipes.settings import BEST, is_traced
from recipes.task import Task

_SHOWN = 8


class Evaluation:
    """Metrics of an evaluation that runs: `get()` waits for it. Without a batch there are none."""

    def __init__(self, batch: hf.BatchRef | None, column: str) -> None:
        self._batch, self._column, self._metrics, self._lock = batch, column, dict[str, float](), Lock()

    def get(self) -> dict[str, float]:
        with self._lock:  # the tracker asks, and the thread of a checkpoint
            if self._batch is not None:
                self._metrics = {BEST: float(self._batch.get([self._column])[self._column].nanmean())}
                self._batch = None  # its rows are not needed any more
            return dict(self._metrics)


class Accuracy:
    """Mean reward of greedy answers to held-out prompts; the tracker gets some of them. `column`: the rewards
    that count, such as "rewards/task" where penalties are added to those of the task."""

    def __init__(
        self,
        actor: hf.WorkerGroup,
        reward: hf.WorkerGroup,
        task: Task,
        tracker: hf.Tracker,
        every: int = 0,
        column: str = "rewards",
    ) -> None:
        self.actor, self.reward, self.tracker, self.every, self.column = actor, reward, tracker, every, column
        self.prompts: hf.Batch | None = None
        if every and task.held_out is None:
            raise ConfigError(f"evaluate_every={every} needs held-out prompts: give held_out=.")
        if task.held_out is not None:
            from hybridflow.batch.columns import Objects
            from hybridflow.data.prompts import read_prompts

            records = read_prompts(task.held_out, **task.held_out_columns)
            # columns keep the objects of the file, as in a PromptLoader
            self.prompts = hf.Batch({name: Objects(record[name] for record in records) for name in records[0]})

    def evaluate(self, step: int) -> Evaluation:
        """The accuracy of the present weights, every few iterations; does not wait for it."""
        due = self.prompts is not None and self.every and step % self.every == 0
        return Evaluation(self._answers() if due else None, self.column)

    def measure(self, when: str) -> float | None:
        """Mean reward; None without held-out prompts, and in a trace. `when`: "before" or "after"."""
        if self.prompts is None:
            return None
        if is_traced():
            self._answers()
            return None
        with stage(f"generating answers {when} the run"):
            batch = self._answers()
            found = batch.get([name for name in ("prompt", "response", "answer", self.column) if name in batch])
        accuracy = float(found[self.column].nanmean())
        title = f"greedy answers {when}: mean reward {accuracy:.3f} on {len(found)} held-out prompts"
        self.tracker.samples(found[:_SHOWN].to_dicts(), title=title)
        self.tracker.note(**{f"accuracy_{when}": accuracy})
        return accuracy

    def _answers(self) -> hf.BatchRef:
        assert self.prompts is not None
        batch = self.actor.generate_sequences(self.prompts, greedy=True, n=1)
        return batch | self.reward.compute_reward(batch)
