"""Greedy accuracy of an actor on held-out prompts, before and after a run."""

from __future__ import annotations

import hybridflow as hf
from hybridflow.batch.columns import Objects
from hybridflow.data.prompts import read_prompts
from recipes.task import Task

_SHOWN = 8


class Accuracy:
    """Mean reward of greedy answers to held-out prompts; the tracker gets some of them."""

    def __init__(self, actor: hf.WorkerGroup, reward: hf.WorkerGroup, task: Task, tracker: hf.Tracker) -> None:
        self.actor, self.reward, self.tracker = actor, reward, tracker
        self.prompts: hf.Batch | None = None
        if task.held_out is not None:
            records = read_prompts(task.held_out, **task.held_out_columns)
            # columns keep the objects of the file, as in a PromptLoader
            self.prompts = hf.Batch({name: Objects(record[name] for record in records) for name in records[0]})

    def measure(self, when: str) -> float | None:
        """Mean reward; None without held-out prompts. `when`: "before" or "after"."""
        if self.prompts is None:
            return None
        batch = self.actor.generate_sequences(self.prompts, greedy=True, n=1)
        batch |= self.reward.compute_reward(batch)
        shown = [name for name in ("prompt", "response", "answer", "rewards") if name in batch]
        found = batch.get(shown)
        accuracy = float(found["rewards"].mean())
        title = f"greedy answers {when}: mean reward {accuracy:.3f} on {len(found)} held-out prompts"
        self.tracker.samples(found[:_SHOWN].to_dicts(), title=title)
        self.tracker.note(**{f"accuracy_{when}": accuracy})
        return accuracy
