"""Agreement: the ranks of a group go on together or all raise, so that nobody waits in a collective for a rank that
met an error which depends on its data."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from hybridflow.engines.process_groups import RankContext
from hybridflow.errors import BatchError, HybridFlowError, WorkerError


def agree(context: RankContext, check: Callable[[], float | None], what: str = "a number") -> float | None:
    """Run `check` on every rank of the group; one tiny all-reduce on the CPU.

    Returns the number that `check` gave, the same on all ranks: a rank that has none (None) takes that of the others.

    Errors: the error that `check` raised, on a group of one rank. On a larger one the *same* WorkerError (with the
    failing rank and its error as the cause) on every rank; also when the numbers, which are called `what`, differ.
    """
    number, error = None, None
    try:
        number = check()
    except Exception as raised:  # whatever it is, the other ranks must hear of it before anything else
        error = raised
    size = context.grid.size
    if size == 1:
        if error is not None:
            raise error
        return number
    group = context.groups.new("agreement", range(size), "gloo")
    largest, smallest = (-math.inf, -math.inf) if number is None else (number, -number)
    state = torch.tensor([error is not None, largest, smallest], dtype=torch.float64)
    dist.all_reduce(state, dist.ReduceOp.MAX, group=group)
    failed, largest, smallest = state.tolist()
    if not failed and largest != -smallest and smallest != -math.inf:
        failed, error = True, BatchError(f"{what} differs between the ranks' rows: from {-smallest:g} to {largest:g}.")
    if failed:
        raise _first_error(context, group, error)
    return None if largest == -math.inf else largest


def _first_error(context: RankContext, group: dist.ProcessGroup, error: Exception | None) -> WorkerError:
    """The error of the first rank that has one, on all ranks: it is one failure, wherever the driver looks."""
    mine = None
    if error is not None:
        where = f"{context.role}.{context.method}".rstrip(".")
        mine = WorkerError(
            f"{where} failed on rank {context.rank}: {type(error).__name__}: {error}",
            role=context.role,
            rank=context.rank,
            method=context.method,
            cause=error if isinstance(error, HybridFlowError) else None,  # these survive pickling
            remote_traceback="".join(traceback.format_exception(error)),
        )
    everyone: list[WorkerError | None] = [None] * context.grid.size
    dist.all_gather_object(everyone, mine, group=group)
    return next(found for found in everyone if found is not None)
