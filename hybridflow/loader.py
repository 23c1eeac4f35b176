"""PromptLoader: batches of prompts for the loop, and the one place where the loop waits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.session import Session
from hybridflow.data.prompts import PromptSource


class PromptLoader:
    """Yields `steps` batches of `batch_size` prompts and lets at most two iterations be in flight.

    `prompts` is a JSONL file or a list of mappings with `prompt` (text, or chat messages) and further columns, which
    come along for reward functions. Batches have `row_id` [B] int64, `prompt` and the further columns as objects, and
    `prompt_ids` (ragged int64) when a `tokenizer` (a checkpoint directory) is given; otherwise the actor tokenises.
    The order follows from `seed`; `state()` and `load_state` continue a run exactly where it was.

    Errors: PromptError naming file, line and column; when iterating, WorkerError of a call that failed.
    """

    def __init__(
        self,
        prompts: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
        *,
        batch_size: int,
        steps: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tokenizer: str | os.PathLike[str] | None = None,
        in_flight: int = 2,
    ) -> None:
        self.source = PromptSource(
            prompts, batch_size=batch_size, steps=steps, seed=seed, shuffle=shuffle, tokenizer=tokenizer
        )
        self.in_flight = in_flight

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[BatchRef]:
        session = Session.current()
        for batch in self.source:
            session.next_iteration(self.in_flight)
            yield BatchRef.from_batch(batch, session)
        session.drain()

    def state(self) -> dict[str, int]:
        """What `load_state` needs to continue with the next batch."""
        return self.source.state()

    def load_state(self, state: Mapping[str, int]) -> None:
        self.source.load_state(state)
