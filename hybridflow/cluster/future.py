"""Future: the result of a call, or its Failure with role, rank and method; and waiting for results, on the driver and
on hosts. Iterations: tracks calls in flight, limits iterations in flight, and measures each call."""

from __future__ import annotations

import itertools
import logging
import pickle
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from hybridflow.cluster.liveness import WaitNotice, blamed, unfinished, whom
from hybridflow.cluster.row_refs import IssuedCall, RankOutput
from hybridflow.engines.process_groups import is_communication_error
from hybridflow.errors import CheckpointError, HostLostError, HybridFlowError, WaitTimeoutError, WorkerError

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_TIMEOUT = 600.0  # for results that no call of this process writes


@dataclass(slots=True)
class Failure:
    """Takes the place of a result. `upstream`: the call never ran because an input had failed."""

    error: WorkerError
    upstream: bool = False
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Status:
    """Outcome of a call on one rank, which the driver keeps longer than the data.

    `seconds` are the times of the method, without its wait for inputs, and of the stages that it recorded.
    """

    failure: Failure | None
    seconds: tuple[tuple[str, float], ...] = ()


def first_failure(values: Sequence[Any]) -> Failure | None:
    """The first failure, if any; a rank's own failure comes before those of ranks that were notified."""
    found = [value.failure if isinstance(value, Status) else value for value in values]
    failures = [value for value in found if isinstance(value, Failure)]
    return min(failures, key=lambda failure: (failure.upstream, failure.at), default=None)


def failure_of(
    error: Exception, role: str, rank: int, method: str, rows: tuple[int, int] | None = None, upstream: bool = False
) -> Failure:
    """Keep the original error of a worker; wrap anything else with role, rank, method and traceback.

    `rows` is the range of the rank's rows in the call's batch. An error of torch.distributed or its backends becomes a
    WaitTimeoutError: a peer did not take part.
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


@dataclass(frozen=True, slots=True)
class Known:
    """Takes the place of a reference in a trace, where no process computes the value."""

    value: Any


@dataclass(frozen=True)
class Future:
    """The value of one rank (`merge=None`), or those of several: as a list, or with dicts of numbers averaged."""

    outputs: tuple[RankOutput, ...]
    merge: str | None = None

    @staticmethod
    def concat(futures: Sequence[Future], merge: str = "join") -> Future:
        """Joined outputs of data parallel ranks: metrics are averaged, anything else becomes a list."""
        return Future(tuple(output for future in futures for output in future.outputs), merge)

    def done(self) -> bool:
        pending = [output.ref for output in self.outputs if not isinstance(output.ref, Known)]
        return not pending or len(ray.wait(pending, num_returns=len(pending), timeout=0)[0]) == len(pending)

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the value. Errors: WorkerError of the rank that failed, WaitTimeoutError."""
        values = fetch([output.ref for output in self.outputs], self.outputs, timeout)
        if self.merge is None:
            return values[0]
        if self.merge == "join" and all(map(_is_metrics, values)):
            return values[0] if len(values) == 1 else _mean(values)
        return values


def _is_metrics(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(v, int | float) for v in value.values())


def _mean(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    columns = {name: [m[name] for m in metrics if name in m] for name in metrics[0]}
    return {name: sum(column) / len(column) for name, column in columns.items()}


def fetch(
    refs: Sequence[Any], outputs: Sequence[RankOutput], timeout: float | None = None, follow: bool = True
) -> list[Any]:
    """The values of `refs`; `outputs`, one for each, say who writes them. Errors: WorkerError, WaitTimeoutError.

    On the driver a `Failure` raises at once, even of a rank whose output is not collected: the failed rank's peers may
    be waiting in a collective. `follow=False` does not watch the calls. `timeout` defaults to the calls' own.
    """
    if known := [ref.value for ref in refs if isinstance(ref, Known)]:
        return known  # a trace has no other references
    if not refs:
        return []
    if not ray.is_initialized():
        raise _gone(outputs)
    calls = list({id(output.call): output.call for output in outputs if output.call is not None}.values())
    if timeout is None:
        timeout = max((call.timeout for call in calls), default=_TIMEOUT)
    calls = calls if follow else []
    statuses = [status for call in calls for status in call.statuses]
    everything, writers = [*refs, *(status.ref for status in statuses)], [*outputs, *statuses]
    try:
        values = _get(everything, writers, calls, timeout)
    except ray.exceptions.RayError as error:
        raise _lost(everything, writers, error).as_cause() from None
    except ValueError as error:
        if "owner is unknown" not in str(error):  # Ray's words for a reference of another session
            raise
        raise _gone(outputs) from None
    if values is None:
        raise WaitTimeoutError(f"waited {timeout:g} s for {whom(unfinished(outputs) or outputs)} without a result.")
    if calls:
        raise_failure(values, calls)
    return values[: len(refs)]


def _get(
    refs: list[Any], writers: Sequence[RankOutput], calls: Sequence[IssuedCall], timeout: float
) -> list[Any] | None:
    """All values, or None after the deadline. Meanwhile a driver looks for failures and reports long waits."""
    end, notice = time.monotonic() + timeout, WaitNotice()
    while True:
        left = end - time.monotonic()
        try:
            return ray.get(refs, timeout=max(0.0, min(left, _LOOK_SECONDS) if calls else left))
        except ray.exceptions.GetTimeoutError:
            if calls:
                statuses = [status.ref for call in calls for status in call.statuses]
                ready, _ = ray.wait(statuses, num_returns=len(statuses), timeout=0)
                raise_failure(ray.get(ready), calls)
                notice.look(lambda: unfinished(writers) or writers)
            if end <= time.monotonic():
                return None


def as_done(outputs: Sequence[RankOutput], seconds: float) -> Iterator[list[RankOutput]]:
    """The outputs as their calls end; stops after `seconds`. Reports on the console which ranks a long wait is for."""
    end, notice, waiting = time.monotonic() + seconds, WaitNotice(), {output.ref: output for output in outputs}
    while waiting:
        left = max(0.0, end - time.monotonic())
        # short waits leave room for Ctrl-C
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(_LOOK_SECONDS, left))
        yield [waiting.pop(ref) for ref in ready]
        notice.look(lambda: list(waiting.values()))
        if not left:
            return


def raise_failure(values: Sequence[Any], calls: Sequence[IssuedCall]) -> None:
    """Errors: WorkerError of the first failure among `values`, which are results and statuses of these calls."""
    if (failure := first_failure(values)) is not None:
        for call in calls:
            call.observed = True
            call.reported.add(failure.error.id)
        raise blamed(failure.error, calls).as_cause()


def _gone(outputs: Sequence[RankOutput]) -> WorkerError:
    names = sorted({str(output.origin) for output in outputs})
    writers = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return WorkerError(f"{writers} ran in a session that is closed: its results are gone.")


def _lost(refs: Sequence[Any], outputs: Sequence[RankOutput], error: Exception) -> WorkerError:
    """Name the output that was lost: Ray's own text names neither role nor rank."""
    for ref, output in zip(refs, outputs, strict=True):
        try:
            ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayError as own:
            origin, cause = output.origin, None
            if isinstance(own, ray.exceptions.RayTaskError):  # our own host code never raises
                why = f"could not take its arguments or give back its result: {str(own.cause).strip()}"
            else:
                reason = str(own).strip().splitlines()[0]
                why = f"was lost: its host process died or its data cannot be reached ({type(own).__name__}: {reason})"
                cause = HostLostError(reason)
            return WorkerError(f"{origin} {why}", role=origin.role, rank=origin.rank, method=origin.method, cause=cause)
    return WorkerError(f"a result was lost: {type(error).__name__}: {error}")


_KEPT = 64
_LOOK_BACK = 256  # statuses held before the driver looks for finished calls
_MOST = 16384  # ... and before it waits

PerRank = dict[tuple[str, int], float]
"""(role.method, rank) -> seconds."""


@dataclass(frozen=True)
class StageSeconds:
    """The seconds of each call of one iteration, as metrics for a tracker."""

    iterations: Iterations
    iteration: int

    def get(self) -> dict[str, float]:
        """`time/<role>.<method>` in seconds; waits for the iteration. Errors: WorkerError of a call that failed."""
        return {f"time/{name}": seconds for name, seconds in self.iterations.seconds(self.iteration).items()}


@dataclass
class _Iteration:
    waiting: list[RankOutput] = field(default_factory=list)  # statuses not yet examined
    seconds: PerRank = field(default_factory=dict)  # of finished calls


@dataclass
class Iterations:
    """Bookkeeping of the calls of a driver; `timeout` seconds bound the wait for an iteration.

    `current` is the index of the driver's iteration. `reported` are the ids of errors that the driver has raised and
    does not raise again.
    """

    timeout: float
    reported: set[str] = field(default_factory=set)
    current: int = 0
    _all: dict[int, _Iteration] = field(default_factory=lambda: {0: _Iteration()})
    _look_at: int = _LOOK_BACK
    _has_loader: bool = False
    _sequence: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def sequence(self) -> int:
        """The next number of a call: hosts run calls in this order."""
        return next(self._sequence)

    def new_call(self) -> IssuedCall:
        """A call whose statuses are still to be filled in."""
        return IssuedCall([], self.reported, self.timeout)

    def stage_seconds(self) -> StageSeconds:
        """The metrics of the current iteration, once it is done. Without a loader the iteration ends here."""
        found = StageSeconds(self, self.current)
        if not self._has_loader:
            self._next(in_flight=2)
        return found

    def issued(self, statuses: Sequence[RankOutput]) -> None:
        """Track calls until their iteration is waited for; drops finished calls from time to time."""
        now = self._all[self.current]
        now.waiting.extend(statuses)
        if len(now.waiting) < self._look_at:
            return
        self._look_at = len(now.waiting) + _LOOK_BACK
        oldest = now.waiting[: len(now.waiting) // 2]
        if len(now.waiting) < _MOST:
            done = set(ray.wait([output.ref for output in oldest], num_returns=len(oldest), timeout=0)[0])
            oldest = [output for output in oldest if output.ref in done]
        self._settle(now, oldest)
        self._look_at = len(now.waiting) + _LOOK_BACK

    def begin(self, in_flight: int = 2) -> None:
        """Begin an iteration; wait until at most `in_flight`, including this one, are running.

        Errors: WorkerError of a failed call in a finished iteration.
        """
        self._has_loader = True
        self._next(in_flight)

    def drain(self) -> None:
        """Wait for all calls issued so far; the loader has ended. Errors: as `begin`."""
        self._has_loader = False
        self._next(in_flight=1)

    def _next(self, in_flight: int) -> None:
        self.current += 1
        self._all[self.current], self._look_at = _Iteration(), _LOOK_BACK
        over = self.current - in_flight
        for number in [number for number in self._all if number <= over]:
            self._settle(self._all[number])
            if number <= over - _KEPT:
                del self._all[number]

    def _settle(self, one: _Iteration, outputs: Sequence[RankOutput] | None = None) -> None:
        """Wait for these calls of an iteration (default: all) and drop them, even after an error."""
        outputs = one.waiting if outputs is None else outputs
        gone = set(map(id, outputs))
        one.waiting = [output for output in one.waiting if id(output) not in gone]
        for output, status in self.wait(outputs):
            for name, spent in status.seconds:
                key = (f"{output.origin.role}.{name}", output.origin.rank)
                one.seconds[key] = one.seconds.get(key, 0.0) + spent

    def seconds(self, iteration: int) -> dict[str, float]:
        """Seconds of each call in an iteration, `role.method` -> the slowest rank's; waits for a running iteration."""
        out: dict[str, float] = {}
        if (one := self._all.get(iteration)) is not None:
            self._settle(one)
            for (name, _), spent in one.seconds.items():
                out[name] = max(out.get(name, 0.0), spent)
        return out

    def wait(self, outputs: Sequence[RankOutput]) -> list[tuple[RankOutput, Status]]:
        """The statuses of all calls. Errors: WorkerError of the first failed call, WaitTimeoutError."""
        done: list[tuple[RankOutput, Status]] = []
        for finished in as_done(outputs, self.timeout):
            statuses: list[Status] = fetch([output.ref for output in finished], finished, 60.0, follow=False)
            self._raise_new(zip(finished, statuses, strict=True))
            done += zip(finished, statuses, strict=True)
        if len(done) < len({output.ref for output in outputs}):
            late = whom(unfinished(outputs) or outputs)
            raise WaitTimeoutError(f"waited {self.timeout:g} s for {late} without a result.")
        return done

    def _raise_new(self, statuses: Iterable[tuple[RankOutput, Status]]) -> None:
        """Raise the first failure that the driver has not raised yet."""
        new = [
            (output, status)
            for output, status in statuses
            if status.failure
            and status.failure.error.id not in self.reported
            and not (output.call and output.call.observed)
        ]
        if new:
            raise_failure([status for _, status in new], [output.call for output, _ in new if output.call])
