"""Exceptions of hybridflow: what was asked, what was found, what to do.

Every class also inherits the standard exception that a Python programmer would expect, so `except ValueError`
keeps working, and every instance survives pickling (exceptions cross process boundaries).
"""

from __future__ import annotations

import difflib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar


class HybridFlowError(Exception):
    """Base of all errors raised by hybridflow. `row`: the row that the message names, in the rank's part."""

    row: int | None = None


class ConfigError(HybridFlowError, ValueError):
    """A configuration value is unknown, of the wrong type or out of range."""


class PlacementError(HybridFlowError, ValueError):
    """Models, parallel sizes and devices do not fit together."""


class ModelError(HybridFlowError, ValueError):
    """A model configuration cannot be sharded or run as asked."""


class CheckpointError(HybridFlowError, ValueError):
    """A checkpoint directory is missing, incomplete, does not match the model or cannot be written.

    `rank` is the rank that found the error; all ranks of a group raise it.
    """

    rank: int | None = None


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


class DivergenceError(HybridFlowError, ArithmeticError):
    """Training has diverged: too many optimizer steps in a row were skipped for numbers that are not finite."""


class ReplicaError(HybridFlowError, ArithmeticError):
    """Weights that data parallel ranks must hold alike differ."""


class MismatchError(HybridFlowError, ArithmeticError):
    """Generation and training compute different policies from the same weights (`hf.Mismatch`)."""


class PromptError(HybridFlowError, ValueError):
    """A prompt or a prompt file cannot be used."""


class RewardError(HybridFlowError, ValueError):
    """A reward function raised or returned something that is not one finite number per row."""


class ProtocolError(HybridFlowError, ValueError):
    """A transfer protocol returned something that does not fit its group."""


class DeviceMemoryError(HybridFlowError, RuntimeError):
    """A device ran out of memory: names the phase, what was in memory and planned, and the settings to change."""


class WaitTimeoutError(HybridFlowError, TimeoutError):
    """A result did not arrive within its deadline."""


class BrokenGroupError(HybridFlowError, RuntimeError):
    """A group refuses a call: an earlier one failed, and what it changed or left under way could not be undone."""


class HostLostError(HybridFlowError, RuntimeError):
    """A host process died, or its machine is gone: its models and their results are lost."""


class WorkerError(HybridFlowError, RuntimeError):
    """A call failed in a worker: names role, rank and method and carries the remote traceback.

    Attributes: `role`, `rank` (in the group), `node` (the machine's host name, "" where it is unknown), `method`,
    `step` (the iteration of the driver's loop that issued the call, from 1; None outside a loop), `rows` (start and
    stop of the rank's rows in the call's batch, None where they are not adjacent), `cause` (the original exception
    where it could be pickled, else None), `remote_traceback` (text) and `id` (the same in every process that raises
    this error).
    """

    def __init__(
        self,
        message: str,
        *,
        role: str = "",
        rank: int = -1,
        method: str = "",
        node: str = "",
        step: int | None = None,
        rows: tuple[int, int] | None = None,
        cause: BaseException | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.role, self.rank, self.method, self.rows = role, rank, method, rows
        self.node, self.step = node, step
        self.cause, self.remote_traceback = cause, remote_traceback
        self.id = uuid.uuid4().hex

    def as_cause(self) -> WorkerError:
        """This error, also as an instance of its cause's class when that is one of hybridflow's.

        `except PromptError` then catches it, wherever in the cluster it was raised.
        """
        kind = type(self.cause)
        if not isinstance(self.cause, HybridFlowError) or isinstance(self.cause, WorkerError):
            return self
        both = type(kind.__name__, (WorkerError, kind), {"__module__": kind.__module__})
        assert both.__base__ is not None
        error = both.__base__.__new__(both, self.args[0])  # of the base that fixes the memory layout, e.g. OSError
        error.args = self.args
        error.__dict__.update(self.__dict__)
        return error

    def __reduce__(self):
        return _rebuilt, (self.args[0], self.__dict__, type(self) is not WorkerError)

    def __str__(self) -> str:
        text = str(self.args[0])
        return f"{text}\n\n{self.remote_traceback}" if self.remote_traceback else text


def _rebuilt(message: str, state: dict, as_cause: bool) -> WorkerError:
    error = WorkerError(message)
    error.__dict__.update(state)
    return error.as_cause() if as_cause else error


def rank_at(rank: int, node: str = "", step: int | None = None) -> str:
    """`rank 1 (node gpu-7, step 12)`, with the parts that are known."""
    known = [f"node {node}"] * bool(node) + [f"step {step}"] * (step is not None)
    return f"rank {rank}" + (f" ({', '.join(known)})" if known else "")


def add_outcome(error: BaseException, outcome: str) -> None:
    """Add to an error what is so after the failure."""
    if isinstance(error, HybridFlowError | RuntimeError) and error.args:
        error.args = (f"{error.args[0]}\n{outcome}", *error.args[1:])
    else:
        error.add_note(outcome)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest known name (or the list of known names if none is close)."""
    names = sorted(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else f" Known: {', '.join(names)}."


E = TypeVar("E", bound=HybridFlowError)


def at_row(row: int, error: E) -> E:
    """An error whose message says "row 3", a row of a rank's part, for `rows_named`."""
    error.row = row
    return error


def of_row(row: int, text: str) -> BatchError:
    """The error "row 3 <text>" of this row of a rank's part."""
    return at_row(row, BatchError(f"row {row} {text}"))


@contextmanager
def rows_named(row_number: Callable[[int], int]) -> Iterator[None]:
    """Errors of rows that leave the block name the row of the call's batch that `row_number` gives."""
    try:
        yield
    except HybridFlowError as error:
        if error.row is not None:
            text = re.sub(rf"\brow {error.row}\b", f"row {row_number(error.row)}", error.args[0], count=1)
            error.args, error.row = (text,), None
        raise
