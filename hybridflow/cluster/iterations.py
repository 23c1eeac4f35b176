"""Iterations: tracks the driver's calls in flight, limits iterations in flight, and measures each call."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
import ray.exceptions

from hybridflow.cluster import startup
from hybridflow.cluster.future import (
    Status,
    as_done,
    fetch,
    host_lost,
    late,
    lost_peer,
    raise_failure,
    received,
    skipped_steps,
    without_work,
)
from hybridflow.cluster.held_calls import HeldCalls
from hybridflow.cluster.incidents import Incidents
from hybridflow.cluster.row_refs import CallOrigin, IssuedCall, RankOutput
from hybridflow.engines.call_events import Event

T = TypeVar("T")
_KEPT = 64
_MOST_EVENTS = 1 << 17
_LOOK_BACK = 256  # statuses held before the driver looks for finished calls
_MOST = 16384  # ... and before it waits

PerRank = dict[tuple[str, int], float]
"""(role.method, rank) -> seconds."""


@dataclass(frozen=True)
class IterationSeconds:
    """The seconds of each call of one iteration, as metrics for a tracker."""

    iterations: Iterations
    iteration: int

    def get(self) -> dict[str, float]:
        """`time/<role>.<method>` in seconds, and `time/iteration`, from the end of the iteration before to that of this
        one (unless there was none); waits for the iteration. Errors: WorkerError of a call that failed."""
        found = {f"time/{name}": seconds for name, seconds in self.iterations.seconds(self.iteration).items()}
        span = self.iterations.span(self.iteration)
        return found if span is None else {"time/iteration": span, **found}


@dataclass(frozen=True, slots=True)
class Incident:
    """A time span of the driver: `kind` is "wait" (for data), "restart" (hosts were replaced), "skipped" (an
    optimizer step) or "note"."""

    kind: str
    step: int | None
    what: str
    start: float
    end: float


@dataclass
class _Iteration:
    waiting: list[RankOutput] = field(default_factory=list)  # statuses not yet examined
    seconds: PerRank = field(default_factory=dict)  # of finished calls
    end: float = 0.0  # of the last of them


@dataclass
class Iterations:
    """Bookkeeping of the calls of a driver; `timeout` seconds bound the wait for an iteration.

    `events`, unless None, collects the events of finished calls, each with the number of its iteration; if they are not
    taken, the oldest are dropped and counted (`dropped`). `looped`: iterations are those of a loader's loop, of which
    the last may have ended.

    `current` is the index of the driver's iteration, `done_before` the steps of its loop that an earlier run made.
    `defer` returns whether the loop handles an error of a call. `held` are calls that are not sent yet.
    """

    timeout: float
    incidents: Incidents = field(default_factory=Incidents)
    current: int = 0
    done_before: int = 0
    defer: Callable[[BaseException], bool] = lambda error: False
    held: HeldCalls = field(default_factory=HeldCalls)
    events: deque[tuple[int, Event | Incident]] | None = None
    looped: bool = False
    dropped: int = 0
    _skipped: set[tuple[str, int, int]] = field(default_factory=set)
    _loop_start: int = 0
    _all: dict[int, _Iteration] = field(default_factory=lambda: {0: _Iteration()})
    _look_at: int = _LOOK_BACK
    _has_loader: bool = False
    _sequence: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def sequence(self) -> int:
        """The next number of a call: hosts run calls in this order."""
        return next(self._sequence)

    @property
    def step(self) -> int | None:
        """The iteration of the loader's loop, from 1; None outside a loop."""
        return self.done_before + self.current - self._loop_start if self._has_loader else None

    def listen(self) -> deque[tuple[int, Event | Incident]]:
        """Collect events from now on, no longer for who listened before."""
        self.events = deque(maxlen=_MOST_EVENTS)
        return self.events

    def note(self, kind: str, what: str, start: float, ahead: int = 0) -> None:
        """Collect a time span of the driver from `start` to now; `ahead`: it belongs to the next iteration."""
        if self.events is not None:
            step = self.done_before if self.step is None else self.step
            self._add(self.current + ahead, Incident(kind, step + ahead, what, start, time.time()))

    def _add(self, number: int, *events: Event | Incident) -> None:
        """Collect events, and count those that are dropped for them."""
        if self.events is not None:
            self.dropped += max(len(self.events) + len(events) - _MOST_EVENTS, 0)
            self.events.extend((number, event) for event in events)

    def timed(self, source: Iterable[T], what: str, ahead: int = 0) -> Iterator[T]:
        """The items of a loader; collects the waits for them. `ahead` as in `note`."""
        items, start = iter(source), time.time()
        for item in items:
            self.note("wait", what, start, ahead)
            yield item
            start = time.time()

    def new_call(self) -> IssuedCall:
        """A call whose statuses are still to be filled in."""
        return IssuedCall([], self.incidents, self.timeout)

    def origin(self, role: str, rank: int, method: str, host: Any) -> CallOrigin:
        """The origin of a call that is issued now to a rank in this `HostProcess`."""
        return CallOrigin(role, rank, method, host.node_name, self.step)

    def check_hosts(self, role: str, method: str, hosts: Sequence[Any], deferrable: bool = False) -> None:
        """Errors: WorkerError (HostLostError) when one of a group's host processes is known to be lost, unless it is
        `deferrable` and the loop handles it."""
        for rank, host in enumerate(hosts):
            if (lost := self.incidents.lost.get(host.address)) is not None:
                error = host_lost(self.origin(role, rank, method, host), lost).as_cause()
                if not (deferrable and self.defer(error)):
                    raise error
                return

    def stage_seconds(self) -> IterationSeconds:
        """The metrics of the current iteration, once it is done. Without a loader the iteration ends here."""
        found = IterationSeconds(self, self.current)
        if not self._has_loader:
            self._next(in_flight=2)
            self.looped = False
        return found

    def unsettled(self) -> list[RankOutput]:
        """Statuses of all calls whose iteration has not been waited for."""
        return [status for one in self._all.values() for status in one.waiting]

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
        with without_work():
            self._settle(self.current, oldest)
        self._look_at = len(now.waiting) + _LOOK_BACK

    def begin(self, in_flight: int = 2) -> None:
        """Begin an iteration; wait until at most `in_flight`, including this one, are running.

        Errors: WorkerError of a failed call in a finished iteration.
        """
        if not self._has_loader:
            self._has_loader, self._loop_start, self.looped = True, self.current, True
        startup.begin("first iteration")
        self._next(in_flight)
        if self.current - self._loop_start > in_flight:
            startup.started()  # a tracker that shows something has said so before

    def forget(self, hosts: Sequence[Any]) -> None:
        """Stop tracking the calls of these `HostProcess`es, which are replaced."""
        addresses = {id(host.address) for host in hosts}
        for one in self._all.values():
            one.waiting = [output for output in one.waiting if id(output.address) not in addresses]

    def wait_quietly(self, seconds: float) -> bool:
        """Whether all calls issued so far end within `seconds`; raises no error of theirs."""
        self.held.send()
        outputs = self.unsettled()
        return sum(map(len, as_done(outputs, seconds))) == len({output.ref for output in outputs})

    def reset(self) -> None:
        """Forget all calls: the hosts that ran them are gone."""
        self.done_before = self.step or self.done_before  # what is noted meanwhile belongs to the step that failed
        self.current += 1
        self._all, self._look_at, self._has_loader = {self.current: _Iteration()}, _LOOK_BACK, False

    def drain(self) -> None:
        """Wait for all calls issued so far; the loader has ended. Errors: as `begin`."""
        self._has_loader = False
        self._next(in_flight=1)

    def _next(self, in_flight: int) -> None:
        self.held.send()
        self.current += 1
        self._all[self.current], self._look_at = _Iteration(), _LOOK_BACK
        over = self.current - in_flight
        for number in [number for number in self._all if number <= over]:
            self._settle(number)
            if number <= over - _KEPT:
                del self._all[number]

    def _settle(self, number: int, outputs: Sequence[RankOutput] | None = None) -> None:
        """Wait for these calls of an iteration (default: all) and drop them, even after an error."""
        one, done = self._all[number], list[tuple[RankOutput, Status]]()
        outputs = one.waiting if outputs is None else outputs
        gone = set(map(id, outputs))
        one.waiting = [output for output in one.waiting if id(output) not in gone]
        try:
            self.wait(outputs, done)
        finally:
            for output, status in done:
                for event in status.events:
                    key = (f"{event.role}.{event.method}", output.origin.rank)
                    one.seconds[key] = one.seconds.get(key, 0.0) + event.seconds
                    one.end = max(one.end, event.end)
                if self.events is not None:
                    self._add(number, *status.events)
                    self._note_skipped(number, status)

    def collect(self) -> None:
        """Collect the events of calls that have ended well, and leave all others as they are."""
        for number, one in self._all.items():
            sent = {output.sent_ref: output for output in one.waiting if output.sent_ref is not None}
            ended = ray.wait(list(sent), num_returns=len(sent), timeout=0)[0] if sent else []
            for ref in ended:
                with contextlib.suppress(ray.exceptions.RayError):  # a lost host's
                    if received(ray.get(ref)).failure is None:
                        self._settle(number, [sent[ref]])

    def _note_skipped(self, number: int, status: Status) -> None:
        """Optimizer steps that were skipped, once for all ranks."""
        assert self.events is not None
        for step in status.skipped:
            if (key := (step.role, step.call, step.number)) not in self._skipped:
                self._skipped.add(key)
                at = status.events[-1].end if status.events else time.time()
                what = f"{step.role}.{step.method}, mini-batch {step.number}: {step.reason}"
                self._add(number, Incident("skipped", step.step, what, at, at))

    def seconds(self, iteration: int) -> dict[str, float]:
        """Seconds of each call in an iteration, `role.method` -> the slowest rank's; waits for a running iteration."""
        out: dict[str, float] = {}
        if (one := self._all.get(iteration)) is not None:
            self._settle(iteration)
            for (name, _), spent in one.seconds.items():
                out[name] = max(out.get(name, 0.0), spent)
        return out

    def span(self, iteration: int) -> float | None:
        """Seconds from the end of the calls of the iteration before to that of this one's; None where that says
        nothing."""
        before, one = self._all.get(iteration - 1), self._all.get(iteration)
        if before is None or one is None or not 0.0 < before.end < one.end:
            return None
        return one.end - before.end

    def wait(
        self, outputs: Sequence[RankOutput], done: list[tuple[RankOutput, Status]] | None = None
    ) -> list[tuple[RankOutput, Status]]:
        """The statuses of all calls, which are appended to `done` as the calls end. Errors: WorkerError of the first
        failed call, WaitTimeoutError."""
        done = [] if done is None else done
        for finished in as_done(outputs, self.timeout):
            statuses: list[Status] = fetch([output.ref for output in finished], finished, 60.0, follow=False)
            self.incidents.write_skipped(skipped_steps(statuses))
            done += zip(finished, statuses, strict=True)
            self._raise_new(zip(finished, statuses, strict=True))
            if self.incidents.lost and (lost := lost_peer(output.call for output in outputs)) is not None:
                raise lost.as_cause()
        if len(done) < len({output.ref for output in outputs}):
            raise late(self.timeout, outputs)
        for output in outputs:
            if output.call is not None:
                output.call.inputs.clear()
        return done

    def _raise_new(self, statuses: Iterable[tuple[RankOutput, Status]]) -> None:
        """Raise the first failure that the driver has not raised yet."""
        new = [
            (output, status)
            for output, status in statuses
            if status.failure
            and status.failure.error.id not in self.incidents.reported
            and not (output.call and output.call.observed)
        ]
        if new:
            raise_failure([status for _, status in new], [output.call for output, _ in new if output.call])
