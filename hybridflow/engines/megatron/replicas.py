"""Replicas: the numbers that data parallel ranks have in common - what a mini-batch holds, and its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.typed_columns import response_mask
from hybridflow.batch import Batch
from hybridflow.engines.contract import Totals
from hybridflow.engines.process_groups import RankContext


class Replicas:
    """The ranks that hold the same weights as this one and other rows. Their numbers travel by gloo, on the CPU."""

    def __init__(self, context: RankContext) -> None:
        self.size = context.grid.d
        self.group = context.groups.new("replicas", context.grid.group(context.rank, "d"), "gloo")

    def totals(self, batch: Batch) -> Totals:
        """What the mini-batch holds over all replicas; without a `response_mask` every response token counts."""
        responses: Any = batch.peek("response_ids")
        prompts: Any = batch.peek("prompt_ids")
        tokens = int(response_mask(batch).values.sum())
        counts = torch.tensor(
            [tokens, batch.rows, len(prompts.values) + len(responses.values)], dtype=torch.float64, device="cpu"
        )
        if self.size > 1:
            dist.all_reduce(counts, group=self.group)
        return Totals(*counts.tolist())

    def summed(self, shares: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Metrics added over micro-batches and replicas; a replica without rows does not know their names."""
        names = list(shares[0])
        sums = dict.fromkeys(names, 0.0)
        if names:
            stacked = torch.stack([torch.stack([share[name].double() for name in names]) for share in shares])
            sums = dict(zip(names, stacked.sum(0).tolist(), strict=True))
        if self.size == 1:
            return sums
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, sums, group=self.group)
        keys = dict.fromkeys(name for other in everyone for name in other)
        return {name: sum(other.get(name, 0.0) for other in everyone) for name in keys}
