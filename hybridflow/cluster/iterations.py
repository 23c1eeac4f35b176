"""Iterations: which calls are under way, how many iterations may be, and how long each call took."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import ray

from hybridflow.cluster.failure import Status
from hybridflow.cluster.future import fetch, raise_failure
from hybridflow.cluster.liveness import Deadline, WaitNotice, whom
from hybridflow.cluster.row_refs import IssuedCall, RankOutput
from hybridflow.errors import WaitTimeoutError

_KEPT = 64
_LOOK_BACK = 256  # statuses that a driver may hold before it looks which calls are done
_MOST = 16384  # ... and before it waits for them


PerRank = dict[tuple[str, int], float]
"""(role.method, rank) -> seconds."""


@dataclass(frozen=True)
class StageSeconds:
    """The seconds of each call of one iteration, as figures for a tracker."""

    iterations: Iterations
    iteration: int

    def get(self) -> dict[str, float]:
        """`time/<role>.<method>` in seconds; waits for the iteration. Errors: WorkerError of a call that failed."""
        return {f"time/{name}": seconds for name, seconds in self.iterations.seconds(self.iteration).items()}


@dataclass
class Iterations:
    """Bookkeeping of the calls of a driver; `timeout` seconds bound the wait for an iteration.

    `reported` are the ids of errors that the driver has raised already: they are not raised again.
    """

    timeout: float
    reported: set[str] = field(default_factory=set)
    _pending: deque[list[RankOutput]] = field(default_factory=lambda: deque([[]]))
    _seconds: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _early: PerRank = field(default_factory=dict)
    _kept: dict[int, PerRank] = field(default_factory=dict)
    _look_at: int = _LOOK_BACK
    _settled: int = 0
    _has_loader: bool = False
    _sequence: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def sequence(self) -> int:
        """The next number of a call: hosts run calls in this order."""
        return next(self._sequence)

    def new_call(self) -> IssuedCall:
        """A call whose statuses are still to be filled in."""
        return IssuedCall([], self.reported, self.timeout)

    @property
    def current(self) -> int:
        """Index of the iteration that the driver is in."""
        return self._settled + len(self._pending) - 1

    def stage_seconds(self) -> StageSeconds:
        """The figures of the iteration that the driver is in, once it is done. Without a loader it ends here."""
        found = StageSeconds(self, self.current)
        if not self._has_loader:
            self._next(in_flight=2)
        return found

    def issued(self, statuses: Sequence[RankOutput]) -> None:
        """Remember calls until their iteration is waited for; forget, now and then, those that are done."""
        now = self._pending[-1]
        now.extend(statuses)
        if len(now) < self._look_at:
            return
        self._look_at = len(now) + _LOOK_BACK
        oldest = now[: len(now) // 2]
        if len(now) < _MOST:
            ready, _ = ray.wait([output.ref for output in oldest], num_returns=len(oldest), timeout=0)
            done = set(ready)
            oldest = [output for output in oldest if output.ref in done]
        gone = {id(output) for output in oldest}
        self._pending[-1] = [output for output in now if id(output) not in gone]
        self._look_at = len(self._pending[-1]) + _LOOK_BACK
        _add(self._early, self.wait(oldest))

    def begin(self, in_flight: int) -> None:
        """Begin an iteration; wait until at most `in_flight`, this one included, are under way."""
        self._has_loader = True
        self._next(in_flight)

    def _next(self, in_flight: int) -> None:
        self._open()
        while len(self._pending) > in_flight:
            self._settle_oldest()

    def drain(self) -> None:
        """Wait for everything issued so far; no loader is at work any more."""
        self._has_loader = False
        self._open()
        while len(self._pending) > 1:
            self._settle_oldest()

    def seconds(self, iteration: int) -> dict[str, float]:
        """Seconds of each call in an iteration, `role.method` -> the slowest rank's; waits if it is under way."""
        place = iteration - self._settled
        if place < 0:
            return self._seconds[place] if -place <= len(self._seconds) else {}
        if place >= len(self._pending):
            return {}
        early = dict(self._early) if place == len(self._pending) - 1 else dict(self._kept.get(iteration, {}))
        return _slowest(_add(early, self.wait(self._pending[place])))

    def _open(self) -> None:
        self._kept[self.current], self._early = self._early, {}
        self._pending.append([])
        self._look_at = _LOOK_BACK

    def _settle_oldest(self) -> None:
        statuses = self._pending.popleft()
        early = self._kept.pop(self._settled, {})
        self._settled += 1
        self._seconds.append({})
        self._seconds[-1] = _slowest(_add(early, self.wait(statuses)))

    def wait(self, outputs: Sequence[RankOutput]) -> list[tuple[RankOutput, Status]]:
        """The statuses of all calls. Errors: WorkerError of the first that failed, WaitTimeoutError."""
        deadline, notice = Deadline(self.timeout), WaitNotice()
        waiting = {output.ref: output for output in outputs}
        done: list[tuple[RankOutput, Status]] = []
        while waiting:
            # short waits leave room for Ctrl-C
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(1.0, deadline.left))
            finished = [waiting.pop(ref) for ref in ready]
            statuses: list[Status] = fetch([output.ref for output in finished], finished, 60.0, follow=False)
            self._raise_new(zip(finished, statuses, strict=True))
            done += zip(finished, statuses, strict=True)
            notice.look(lambda: list(waiting.values()))
            if waiting and not deadline.left:
                late = whom(list(waiting.values()))
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


def _add(seconds: PerRank, statuses: Iterable[tuple[RankOutput, Status]]) -> PerRank:
    for output, status in statuses:
        for name, spent in status.seconds:
            key = (f"{output.origin.role}.{name}", output.origin.rank)
            seconds[key] = seconds.get(key, 0.0) + spent
    return seconds


def _slowest(seconds: PerRank) -> dict[str, float]:
    out: dict[str, float] = {}
    for (name, _), spent in seconds.items():
        out[name] = max(out.get(name, 0.0), spent)
    return out
