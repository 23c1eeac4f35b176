"""Future: the result of a call, or its Failure with role, rank and method; and waiting for results, on the driver and
on hosts."""

from __future__ import annotations

import io
import logging
import math
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.exceptions
from ray.experimental import get_local_object_locations

from hybridflow.batch import markup
from hybridflow.cluster.incidents import Incidents, LostHost
from hybridflow.cluster.liveness import ANSWER_SECONDS, WaitNotice, blamed, unfinished, whom, with_text
from hybridflow.cluster.row_refs import CallOrigin, IssuedCall, RankOutput
from hybridflow.engines.call_events import CallWork, Event
from hybridflow.engines.process_groups import SkippedStep, is_communication_error
from hybridflow.errors import CheckpointError, HostLostError, HybridFlowError, WaitTimeoutError, WorkerError

logger = logging.getLogger(__name__)
_LOOK_SECONDS, _WORK_SECONDS = 1.0, 0.05
_TIMEOUT = 600.0  # for results that no call of this process writes


@dataclass(slots=True)
class Failure:
    """Takes the place of a result. `upstream`: an input or another rank had failed."""

    error: WorkerError
    upstream: bool = False
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Lost:
    """Takes the place of an argument of a host's method that is lost: Ray's error, which would end the call unrun."""

    error: ray.exceptions.RayError


@dataclass(frozen=True, slots=True)
class Stored:
    """A value too large to come with the status of its call: `ref` refers to it."""

    ref: Any


@dataclass(frozen=True, slots=True)
class Status:
    """Outcome of a call on one rank, which the driver keeps longer than its columns.

    `events` are those of the method and of the stages that it recorded; `skipped` the optimizer steps that it skipped;
    `value` is what a method without columns returned.
    """

    failure: Failure | None
    events: tuple[Event, ...] = ()
    skipped: tuple[SkippedStep, ...] = ()
    value: Any = None

    def packed(self) -> bytes | Status:
        """As it is sent: flat and pickled by Python's own pickler, unless it has objects of classes; bytes travel
        through Ray as they are."""
        if self.failure is not None or self.skipped:
            return self
        events = [(*event[:_WORK], tuple(event.work), *event[_WORK + 1 :]) for event in self.events]
        packed = plainly_pickled((events, self.value))
        return self if packed is None else _PACKED + packed


_PACKED = b"\0hybridflow status\0"  # no other result begins with it
_WORK = Event._fields.index("work")


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        raise pickle.PicklingError(f"{type(obj)} is not plain")


def plainly_pickled(value: Any) -> bytes | None:
    """Numbers, texts, and lists, tuples and dicts of these, pickled; None for anything else, which cloudpickle takes
    ten times as long for."""
    try:
        _PlainPickler(out := io.BytesIO(), 5).dump(value)
    except pickle.PicklingError:
        return None
    return out.getvalue()


def received(value: Any) -> Any:
    """A result as its host gave it."""
    if type(value) is not bytes or not value.startswith(_PACKED):
        return value
    events, own = pickle.loads(memoryview(value)[len(_PACKED) :])
    made = [Event._make((*one[:_WORK], CallWork._make(one[_WORK]), *one[_WORK + 1 :])) for one in events]
    return Status(None, tuple(made), (), own)


def _results(refs: Sequence[Any], timeout: float) -> list[Any]:
    return list(map(received, ray.get(refs, timeout=timeout)))


def first_failure(values: Sequence[Any]) -> Failure | None:
    """The first failure, if any; a rank's own failure comes before those of ranks that were notified."""
    found = [value.failure if isinstance(value, Status) else value for value in values]
    failures = [value for value in found if isinstance(value, Failure)]
    return min(failures, key=lambda failure: (failure.upstream, failure.at), default=None)


def failure_of(
    error: Exception, origin: CallOrigin, rows: tuple[int, int] | None = None, upstream: bool = False
) -> Failure:
    """Keep the original error of a worker; wrap anything else with role, rank, node, method, step and traceback.

    `rows` is the range of the rank's rows in the call's batch. An error of torch.distributed or its backends becomes a
    WaitTimeoutError: a peer did not take part.
    """
    if isinstance(error, WorkerError):  # perhaps of another rank, on which all have agreed
        return Failure(error, upstream or (error.role, error.rank) != (origin.role, origin.rank))
    if isinstance(error, CheckpointError) and error.rank is not None:
        origin = replace(origin, rank=error.rank, node=origin.node if error.rank == origin.rank else "")
    span = f", rows {rows[0]}..{rows[1] - 1}" if rows and rows[0] < rows[1] else ""
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, HybridFlowError):
        logger.debug("%s", text)
        if is_communication_error(error):
            error = WaitTimeoutError(f"a peer did not take part: {error}")
    message = f"{origin.role}.{origin.method} failed on {origin.at}{span}: {type(error).__name__}: {error}"
    try:
        pickle.loads(pickle.dumps(error))
        cause: Exception | None = error
    except Exception:  # an exception that cannot be pickled still has its text
        logger.debug("the exception of %s cannot be pickled", origin, exc_info=True)
        cause = None
    return Failure(worker_error(message, origin, rows=rows, cause=cause, remote_traceback=text), upstream)


def worker_error(message: str, origin: CallOrigin, **more: Any) -> WorkerError:
    """A WorkerError of the call and rank `origin`."""
    known = {"role": origin.role, "rank": origin.rank, "method": origin.method, "node": origin.node}
    return WorkerError(message, **known, step=origin.step, **more)


@dataclass(frozen=True, slots=True)
class Known:
    """Takes the place of a reference in a trace, where no process computes the value."""

    value: Any


@dataclass(frozen=True, repr=False)
class Future:
    """The value of one rank (`merge=None`), or those of several: as a list, or with dicts of numbers joined: each
    metric as `joins` says (`Operation.metrics`), by default its mean over the ranks that give it."""

    outputs: tuple[RankOutput, ...]
    merge: str | None = None
    joins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @staticmethod
    def concat(futures: Sequence[Future], merge: str = "join") -> Future:
        """Joined outputs of data parallel ranks: metrics are averaged, anything else becomes a list."""
        joins = futures[0].joins if futures else {}
        return Future(tuple(output for future in futures for output in future.outputs), merge, joins)

    def done(self) -> bool:
        for output in self.outputs:
            output.note_read()
        pending = [output.ref for output in self.outputs if not isinstance(output.ref, Known)]
        return not pending or len(ray.wait(pending, num_returns=len(pending), timeout=0)[0]) == len(pending)

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the value. Errors: WorkerError of the rank that failed, WaitTimeoutError."""
        values = fetch([output.ref for output in self.outputs], self.outputs, timeout)
        values = [value.value if isinstance(value, Status) else value for value in values]
        if stored := {i: value.ref for i, value in enumerate(values) if isinstance(value, Stored)}:
            found = fetch(list(stored.values()), [self.outputs[i] for i in stored], timeout, follow=False)
            for i, value in zip(stored, found, strict=True):
                values[i] = value
        return self._merged(values)

    def _merged(self, values: list[Any]) -> Any:
        if self.merge is None:
            return values[0]
        flat = (isinstance(each, Mapping) and all(isinstance(v, int | float) for v in each.values()) for each in values)
        if self.merge == "join" and all(flat):
            return values[0] if len(values) == 1 else joined_metrics(values, self.joins)
        return values

    def __repr__(self) -> str:
        return f"Future({calls_of(self.outputs)}: {self._state()[0]})"

    def _repr_html_(self) -> str:
        state, value = self._state()
        metrics = value if isinstance(value, Mapping) else {}
        rows = [(markup.shown(str(name)), markup.shown(one)) for name, one in metrics.items()]
        return markup.table(f"Future: {calls_of(self.outputs)}: {'done' if rows else state}", (), rows)

    def _state(self) -> tuple[str, Any]:
        """State, or the value as text; and the value, if it is in this process."""
        state, values = look_at(self.outputs)
        if not values:
            return state, None
        value = self._merged(values)
        return markup.shown(value), value


def calls_of(outputs: Sequence[RankOutput]) -> str:
    """The calls that write these outputs: `actor.update_actor`."""
    names = dict.fromkeys(f"{output.origin.role}.{output.origin.method}" for output in outputs)
    return ", ".join(names) or "no call"


def look_at(outputs: Sequence[RankOutput]) -> tuple[str, list[Any]]:
    """ "pending", "done", "failed: ..." or "gone: ...", and the values where this process holds all of them.

    For the texts of notebooks: it neither waits, moves data, sends a held call nor raises.
    """
    refs = [output.sent_ref for output in outputs]
    if any(isinstance(ref, Known) for ref in refs):
        return "done", [ref.value for ref in refs if isinstance(ref, Known)]
    calls = {id(output.call): output.call for output in outputs if output.call is not None}.values()
    statuses = [status.sent_ref for call in calls for status in call.statuses]
    remote = [ref for ref in refs if isinstance(ref, ray.ObjectRef)]
    if all(hasattr(ref, "columns") for ref in refs):  # manifests of this process
        return "done", []
    try:
        known = get_local_object_locations([ref for ref in (*remote, *statuses) if ref is not None])
        ended = [ref for ref, found in known.items() if found["object_size"] is not None]
        here = {ref for ref in ended if not known[ref]["node_ids"]}  # not in the store of a node
        values = dict(zip(here, _results(list(here), 0), strict=True))
    except Exception as error:  # a session that is closed, a lost host, a type that cannot be read
        return f"gone: {type(error).__name__}", []
    if (failure := first_failure(list(values.values()))) is not None:
        return f"failed: {str(failure.error).splitlines()[0]}", []
    if None in refs or any(ref not in ended for ref in remote):
        return "pending", []
    found = [values[ref] for ref in remote if ref in here]
    found = [value.value if isinstance(value, Status) else value for value in found]
    return "done", found if len(found) == len(remote) and not any(isinstance(v, Stored) for v in found) else []


def joined_metrics(metrics: Sequence[Mapping[str, float]], joins: Mapping[str, str]) -> dict[str, float]:
    """The metrics of several ranks as one: of each, of the ranks that give it, the mean, or as `joins` says."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for one in metrics for name in one):
        given, how = [one for one in metrics if name in one], joins.get(name, "mean")
        values = [one[name] for one in given]
        if how in ("sum", "max", "min"):
            out[name] = {"sum": sum, "max": max, "min": min}[how](values)
            continue
        weights = [one.get(how.removeprefix("by "), 0.0) if how != "mean" else 1.0 for one in given]
        total = sum(weights)
        out[name] = sum(w * v for w, v in zip(weights, values, strict=True) if w) / total if total else math.nan
    return out


class _Waiting(threading.local):
    """Of one thread: what it does while it waits; `busy` when it must not."""

    def __init__(self) -> None:
        self.work, self.busy = list[Callable[[], None]](), False


_waiting = _Waiting()


@contextmanager
def while_waiting(work: Callable[[], None]) -> Iterator[None]:
    """Inside the block, this thread also calls `work`, again and again, while it waits for results."""
    known = _waiting.work  # a generator may be closed by another thread
    known.append(work)
    try:
        yield
    finally:
        known[:] = [other for other in known if other != work]


@contextmanager
def without_work() -> Iterator[None]:
    """Inside the block, waits do nothing else: a call is being issued."""
    before, _waiting.busy = _waiting.busy, True
    try:
        yield
    finally:
        _waiting.busy = before


def _look_seconds(left: float) -> float:
    """Do the work of `while_waiting`; returns how long to wait then."""
    idle = not _waiting.work or _waiting.busy
    if not idle:
        with without_work():
            for work in list(_waiting.work):
                work()
    return max(0.0, min(left, _LOOK_SECONDS if idle else _WORK_SECONDS))


def fetch(
    refs: Sequence[Any], outputs: Sequence[RankOutput], timeout: float | None = None, follow: bool = True
) -> list[Any]:
    """The values of `refs`; `outputs`, one for each, say who writes them. Errors: WorkerError, WaitTimeoutError.

    On the driver a `Failure` raises at once, even of a rank whose output is not collected: the failed rank's peers may
    be waiting in a collective. `follow=False` does not watch the calls. `timeout` defaults to the calls' own.
    """
    if known := [ref.value for ref in refs if isinstance(ref, Known)]:
        for output in outputs:
            output.note_read()
        return known  # a trace has no other references
    if not refs:
        return []
    if not ray.is_initialized():
        raise results_gone(outputs)
    calls = list({id(output.call): output.call for output in outputs if output.call is not None}.values())
    if timeout is None:
        timeout = max((call.timeout for call in calls), default=_TIMEOUT)
    calls = calls if follow else []
    own = {id(output) for output in outputs}  # a status that brings its value is both
    statuses = [status for call in calls for status in call.statuses if id(status) not in own]
    everything, writers = [*refs, *(status.ref for status in statuses)], [*outputs, *statuses]
    try:
        values = _get(everything, writers, calls, timeout)
    except ray.exceptions.RayError as error:
        raise _lost(everything, writers, error).as_cause() from None
    except ValueError as error:
        if "owner is unknown" not in str(error):  # Ray's words for a reference of another session
            raise
        raise results_gone(outputs) from None
    if values is None:
        raise late(timeout, writers)
    if calls:
        raise_failure(values, calls)
    return values[: len(refs)]


def _get(
    refs: list[Any], writers: Sequence[RankOutput], calls: Sequence[IssuedCall], timeout: float
) -> list[Any] | None:
    """All values, or None after the deadline. Meanwhile a driver looks for failures and reports long waits."""
    end, notice, look = time.monotonic() + timeout, WaitNotice(), time.monotonic() + _LOOK_SECONDS
    while True:
        left = end - time.monotonic()
        try:
            return _results(refs, _look_seconds(left) if calls else max(0.0, left))
        except ray.exceptions.GetTimeoutError:
            if calls and time.monotonic() >= min(look, end):
                look = time.monotonic() + _LOOK_SECONDS
                statuses = [status.ref for call in calls for status in call.statuses]
                ready, _ = ray.wait(statuses, num_returns=len(statuses), timeout=0)
                raise_failure(_results(ready, 0), calls)
                if (lost := lost_peer(calls)) is not None:
                    raise lost.as_cause() from None
                notice.look(lambda: unfinished(writers) or writers)
            if end <= time.monotonic():
                return None


def late(seconds: float, outputs: Sequence[RankOutput]) -> WaitTimeoutError:
    """The error of a wait that has ended, with the file of the processes' stacks unless the wait was a short one."""
    writers = unfinished(outputs) or outputs
    calls = list({id(output.call): output.call for output in writers if output.call is not None}.values())
    text = f"waited {seconds:g} s for {whom(writers)} without a result."
    return WaitTimeoutError(text + (_incidents(calls).write_stacks(calls) if seconds >= ANSWER_SECONDS else ""))


def as_done(outputs: Sequence[RankOutput], seconds: float) -> Iterator[list[RankOutput]]:
    """The outputs as their calls end; stops after `seconds`. Reports on the console which ranks a long wait is for."""
    end, notice, waiting = time.monotonic() + seconds, WaitNotice(), {output.ref: output for output in outputs}
    while waiting:
        left = max(0.0, end - time.monotonic())
        # short waits leave room for Ctrl-C
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=_look_seconds(left))
        yield [waiting.pop(ref) for ref in ready]
        notice.look(lambda: list(waiting.values()))
        if not left:
            return


def raise_failure(values: Sequence[Any], calls: Sequence[IssuedCall]) -> None:
    """Errors: WorkerError of the first failure among `values`, which are results and statuses of these calls."""
    if skipped := skipped_steps(values):
        _incidents(calls).write_skipped(skipped)
    if (failure := first_failure(values)) is not None:
        calls = list(dict.fromkeys(calls))
        for call in calls:
            call.observed = True
            call.incidents.reported.add(failure.error.id)
        error = failure.error
        if isinstance(error.cause, WaitTimeoutError):
            stacks = _incidents(calls).write_stacks(calls)
            if (lost := lost_peer(calls)) is None:
                error = blamed(error, calls)  # takes a moment
                lost = lost_peer(calls)
            error = with_text(lost or error, stacks)
        raise error.as_cause()


def skipped_steps(values: Sequence[Any]) -> list[SkippedStep]:
    return [step for value in values if isinstance(value, Status) for step in value.skipped]


def _incidents(calls: Sequence[IssuedCall]) -> Incidents:
    return calls[0].incidents if calls else Incidents()


def lost_peer(calls: Iterable[IssuedCall | None]) -> WorkerError | None:
    """The error of a rank of these calls, or of those whose results they read, whose host is lost: its peers only have
    timeouts, and Ray notices a vanished machine late."""
    found = {id(call): call for call in calls if call is not None}
    above = list(found.values())
    known = _incidents(above).lost
    while above and known:
        new = [(key, call) for key, call in list(above.pop().inputs.items()) if key not in found]
        found.update(new)
        above += [call for _, call in new]
    statuses = [status for call in found.values() for status in call.statuses if status.sent_ref is not None]
    refs = [status.ref for status in statuses]
    ready, waiting = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
    try:
        ray.get(ready)
    except ray.exceptions.RayError as error:
        return _lost(refs, statuses, error)
    pending = set(waiting)
    for status in statuses:
        if status.ref in pending and status.address in known:
            return host_lost(status.origin, known[status.address])
    return None


def host_lost(origin: CallOrigin, lost: LostHost) -> WorkerError:
    """The error of a call on a lost host."""
    return worker_error(f"{origin} was lost: {lost}", origin, cause=HostLostError(str(lost)))


def results_gone(outputs: Sequence[RankOutput]) -> WorkerError:
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
            return lost_output(output.origin, own)
    return WorkerError(f"a result was lost: {type(error).__name__}: {error}")


def lost_output(origin: CallOrigin, error: ray.exceptions.RayError) -> WorkerError:
    """The error of who needs a result that is lost."""
    if isinstance(error, ray.exceptions.RayTaskError):  # our own host code never raises
        why, cause = f"could not take its arguments or give back its result: {str(error.cause).strip()}", None
    else:
        reason = str(error).strip().splitlines()[0]
        why = f"was lost: its host process died or its data cannot be reached ({type(error).__name__}: {reason})"
        cause = HostLostError(reason)
    return worker_error(f"{origin} {why}", origin, cause=cause)
