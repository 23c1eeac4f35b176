"""Failures of hosts, as values that say who failed where."""

from __future__ import annotations

import logging
import pickle
import traceback

from hybridflow.cluster.store import Failure
from hybridflow.errors import HybridFlowError, WorkerError

logger = logging.getLogger(__name__)


def failure_of(
    error: Exception,
    role: str,
    rank: int,
    method: str,
    rows: tuple[int, int] | None = None,
    upstream: bool = False,
) -> Failure:
    """Keep the original error of a worker; wrap anything else with role, rank, method and traceback.

    `rows` are where the rank's rows lie in the call's batch.
    """
    if isinstance(error, WorkerError):
        return Failure(error, upstream)
    span = f", rows {rows[0]}..{rows[1] - 1}" if rows and rows[0] < rows[1] else ""
    text = "".join(traceback.format_exception(error))
    message = f"{role}.{method} failed on rank {rank}{span}: {type(error).__name__}: {error}"
    try:
        pickle.loads(pickle.dumps(error))
        cause: Exception | None = error
    except Exception:  # an exception that cannot be pickled still has its text
        logger.debug("the exception of %s cannot be pickled", method, exc_info=True)
        cause = None
    if not isinstance(error, HybridFlowError):
        logger.debug("%s", text)
    worker_error = WorkerError(
        message, role=role, rank=rank, method=method, rows=rows, cause=cause, remote_traceback=text
    )
    return Failure(worker_error, upstream)
