"""Replicas: the numbers that data parallel ranks have in common - what a mini-batch holds, and its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.masked import response_mask
from hybridflow.batch.batch import Batch
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
        every = len(prompts.values) + len(responses.values)
        longest = int(responses.lengths.max()) if batch.rows else 0
        counts = torch.tensor([tokens, batch.rows, every, longest], dtype=torch.float64, device="cpu")
        everyone = [counts]
        if self.size > 1:
            everyone = [torch.empty_like(counts) for _ in range(self.size)]
            dist.all_gather(everyone, counts, group=self.group)
        found = torch.stack(everyone)
        return Totals(*found[:, :3].sum(0).tolist(), longest=float(found[:, 3].max()))

    def most(self, count: int) -> int:
        """The largest `count` of all replicas."""
        largest = torch.tensor(count, device="cpu")
        if self.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def summed(self, shares: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Metrics added over micro-batches and replicas; a replica without rows does not know their names."""
        names = list(dict.fromkeys(name for share in shares for name in share))
        sums: dict[str, float] = {}
        if names:
            values = [torch.stack([share[name].double() for share in shares if name in share]) for name in names]
            sums = dict(zip(names, torch.stack([value.sum() for value in values]).tolist(), strict=True))
        if self.size == 1:
            return sums
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, sums, group=self.group)
        keys = dict.fromkeys(name for other in everyone for name in other)
        return {name: sum(other.get(name, 0.0) for other in everyone) for name in keys}
