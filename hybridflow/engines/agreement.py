"""Agreement: the ranks of a group continue together or all raise, so no rank waits in a collective for a failed one;
and sums over data parallel ranks."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.losses.aggregation import Totals
from hybridflow.algorithms.masked import response_mask
from hybridflow.batch.batch import Batch
from hybridflow.engines.process_groups import RankContext
from hybridflow.errors import BatchError, HybridFlowError, WorkerError

F = TypeVar("F")


def agree_on(group: dist.ProcessGroup, failure: F | None, number: float | None = None) -> tuple[F | None, float, float]:
    """One tiny all-reduce over a gloo group: the failure of the first rank that has one, the least and the largest
    number of all ranks (inf and -inf when no rank has one)."""
    largest, smallest = (-math.inf, -math.inf) if number is None else (number, -number)
    state = torch.tensor([failure is not None, largest, smallest], dtype=torch.float64)
    dist.all_reduce(state, dist.ReduceOp.MAX, group=group)
    failed, largest, smallest = state.tolist()
    if failed:
        everyone: list[F | None] = [None] * group.size()
        dist.all_gather_object(everyone, failure, group=group)
        failure = next(found for found in everyone if found is not None)
    return failure, -smallest, largest


def agree(context: RankContext, check: Callable[[], float | None], what: str = "a number") -> float | None:
    """Run `check` on every rank of the group; one tiny all-reduce on the CPU.

    Returns the number from `check`, equal on all ranks: a rank with None takes the others' number.

    Errors: the error that `check` raised, on a group of one rank. On a larger one the *same* WorkerError (with the
    failing rank and its error as the cause) on every rank; also when the numbers, which are called `what`, differ.
    """
    number, error = None, None
    try:
        number = check()
    except Exception as raised:  # any error: the other ranks must know before anything else
        error = raised
    if context.grid.size == 1:
        if error is not None:
            raise error
        return number
    failure, smallest, largest = agree_on(_group(context), error and _worker_error(context, error), number)
    if failure is None and smallest < largest:
        differs = BatchError(f"{what} differs between the ranks' rows: from {smallest:g} to {largest:g}.")
        failure = of_every_rank(context, _worker_error(context, differs))[0]
    if failure is not None:
        raise failure
    return None if largest == -math.inf else largest


def of_every_rank(context: RankContext, mine: Any) -> list[Any]:
    """The values of all ranks, in rank order. Collective, on the CPU."""
    everyone = [mine] * context.grid.size
    if len(everyone) > 1:
        dist.all_gather_object(everyone, mine, group=_group(context))
    return everyone


def _group(context: RankContext) -> dist.ProcessGroup:
    return context.groups.new("agreement", range(context.grid.size), "gloo")


def _worker_error(context: RankContext, error: Exception) -> WorkerError:
    where = f"{context.role}.{context.method}".rstrip(".")
    return WorkerError(
        f"{where} failed on rank {context.rank}: {type(error).__name__}: {error}",
        role=context.role,
        rank=context.rank,
        method=context.method,
        cause=error if isinstance(error, HybridFlowError) else None,  # these survive pickling
        remote_traceback="".join(traceback.format_exception(error)),
    )


class Replicas:
    """The ranks that hold the same weights as this one and other rows. Their numbers travel by gloo, on the CPU."""

    def __init__(self, context: RankContext) -> None:
        self.size = context.grid.d
        self.group = context.groups.new("replicas", context.grid.group(context.rank, "d"), "gloo")

    def totals(self, batch: Batch) -> Totals:
        """The mini-batch's totals over all replicas; without a `response_mask` every response token counts."""
        responses: Any = batch.peek("response_ids")
        prompts: Any = batch.peek("prompt_ids")
        tokens = int(response_mask(batch).values.sum())
        every = len(prompts.values) + len(responses.values)
        longest = int(responses.lengths.max()) if batch.rows else 0
        counts = torch.tensor([tokens, batch.rows, every, longest], dtype=torch.float64, device="cpu")
        found = counts.expand(self.size, -1).contiguous()
        if self.size > 1:
            dist.all_gather_single(found.view(-1), counts, group=self.group)
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
