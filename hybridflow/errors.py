"""Exceptions of hybridflow: what was asked, what was found, what to do.

Every class also inherits the standard exception that a Python programmer would expect, so `except ValueError`
keeps working, and every instance survives pickling (exceptions cross process boundaries).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HybridFlowError(Exception):
    """Base of all errors raised by hybridflow."""


class ConfigError(HybridFlowError, ValueError):
    """A configuration value is unknown, of the wrong type or out of range."""


class PlacementError(HybridFlowError, ValueError):
    """Models, parallel sizes and devices do not fit together."""


class ModelError(HybridFlowError, ValueError):
    """A model configuration cannot be sharded or run as asked."""


class CheckpointError(HybridFlowError, ValueError):
    """A checkpoint directory is missing, incomplete or does not match the model."""


class LayoutError(HybridFlowError, ValueError):
    """Two weight layouts do not describe the same model."""


class BatchError(HybridFlowError, ValueError):
    """Columns or rows of a batch do not fit together."""


class MissingColumnError(BatchError, KeyError):
    """An operation reads a column that no call has written."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class EmptyBatchError(BatchError):
    """An operation was given a batch without rows."""


class PromptError(HybridFlowError, ValueError):
    """A prompt or a prompt file cannot be used."""


class RewardError(HybridFlowError, ValueError):
    """A reward function raised or returned something that is not one finite number per row."""


class ProtocolError(HybridFlowError, ValueError):
    """A transfer protocol returned something that does not fit its group."""


class WaitTimeoutError(HybridFlowError, TimeoutError):
    """A result did not arrive within its deadline."""


class WorkerError(HybridFlowError, RuntimeError):
    """A call failed in a worker: names role, rank and method and carries the remote traceback.

    Attributes: `role`, `rank` (in the group), `method`, `rows` (global row range of the rank's input, or None),
    `cause` (the original exception where it could be pickled, else None) and `remote_traceback` (text).
    """

    def __init__(
        self,
        message: str,
        *,
        role: str = "",
        rank: int = -1,
        method: str = "",
        rows: tuple[int, int] | None = None,
        cause: BaseException | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.role, self.rank, self.method, self.rows = role, rank, method, rows
        self.cause, self.remote_traceback = cause, remote_traceback

    def __reduce__(self):
        return _rebuild_worker_error, (self.args[0], self.__dict__)

    def __str__(self) -> str:
        text = str(self.args[0])
        return f"{text}\n\n{self.remote_traceback}" if self.remote_traceback else text


def _rebuild_worker_error(message: str, state: dict) -> WorkerError:
    error = WorkerError(message)
    error.__dict__.update(state)
    return error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest known name (or the list of known names if none is close)."""
    names = sorted(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else f" Known: {', '.join(names)}."
