"""Failures of hosts, as values that travel like data and say who failed where."""

from __future__ import annotations

import logging
import pickle
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.engines.process_groups import is_communication_error
from hybridflow.errors import CheckpointError, HybridFlowError, WaitTimeoutError, WorkerError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Failure:
    """Stands where a result would be. `upstream` says that the call never ran because an input had failed."""

    error: WorkerError
    upstream: bool = False
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Status:
    """How a call went on one rank: kept by the driver when the data is no longer held.

    `seconds` are those of the method once its inputs were there, and of the stages that it recorded.
    """

    failure: Failure | None
    seconds: tuple[tuple[str, float], ...] = ()


def first_failure(values: Sequence[Any]) -> Failure | None:
    """What failed first, if anything did; a rank that failed itself comes before those that heard of it."""
    found = [value.failure if isinstance(value, Status) else value for value in values]
    failures = [value for value in found if isinstance(value, Failure)]
    return min(failures, key=lambda failure: (failure.upstream, failure.at), default=None)


def failure_of(
    error: Exception, role: str, rank: int, method: str, rows: tuple[int, int] | None = None, upstream: bool = False
) -> Failure:
    """Keep the original error of a worker; wrap anything else with role, rank, method and traceback.

    `rows` are where the rank's rows lie in the call's batch. An error of torch.distributed or of one of its backends
    becomes a WaitTimeoutError: a peer did not take part.
    """
    if isinstance(error, WorkerError):
        return Failure(error, upstream)
    if isinstance(error, CheckpointError) and error.rank is not None:
        rank = error.rank
    span = f", rows {rows[0]}..{rows[1] - 1}" if rows and rows[0] < rows[1] else ""
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, HybridFlowError):
        logger.debug("%s", text)
        if is_communication_error(error):
            error = WaitTimeoutError(f"a peer did not take part: {error}")
    message = f"{role}.{method} failed on rank {rank}{span}: {type(error).__name__}: {error}"
    try:
        pickle.loads(pickle.dumps(error))
        cause: Exception | None = error
    except Exception:  # an exception that cannot be pickled still has its text
        logger.debug("the exception of %s cannot be pickled", method, exc_info=True)
        cause = None
    found = WorkerError(message, role=role, rank=rank, method=method, rows=rows, cause=cause, remote_traceback=text)
    return Failure(found, upstream)
