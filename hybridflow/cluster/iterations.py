"""Iterations: which calls are under way, how many iterations may be, and how long each call took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import ray

from hybridflow.cluster.columns import Part
from hybridflow.cluster.future import Deadline
from hybridflow.cluster.store import Status, fetch, first_failure
from hybridflow.errors import WaitTimeoutError

_KEPT = 64
_LOOK_BACK = 4096


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

    `reported` are the ids of errors that the driver has met already: they are not raised again.
    """

    timeout: float
    reported: set[str] = field(default_factory=set)
    _pending: deque[list[Part]] = field(default_factory=lambda: deque([[]]))
    _seconds: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _settled: int = 0
    _has_loader: bool = False

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

    def issued(self, statuses: Sequence[Part]) -> None:
        """Remember calls until their iteration is waited for."""
        now = self._pending[-1]
        now.extend(statuses)
        if len(now) > _LOOK_BACK:  # a driver without a loader: look back so that references do not pile up
            oldest, self._pending[-1] = now[: _LOOK_BACK // 2], now[_LOOK_BACK // 2 :]
            self.wait(oldest)

    def begin(self, in_flight: int) -> None:
        """Begin an iteration; wait until at most `in_flight`, this one included, are under way."""
        self._has_loader = True
        self._next(in_flight)

    def _next(self, in_flight: int) -> None:
        self._pending.append([])
        while len(self._pending) > in_flight:
            self._settle_oldest()

    def drain(self) -> None:
        """Wait for everything issued so far; no loader is at work any more."""
        self._has_loader = False
        self._pending.append([])
        while len(self._pending) > 1:
            self._settle_oldest()

    def seconds(self, iteration: int) -> dict[str, float]:
        """Seconds of each call in an iteration, `role.method` -> the slowest rank's; waits if it is under way."""
        place = iteration - self._settled
        if place >= 0:
            return _slowest(self.wait(self._pending[place])) if place < len(self._pending) else {}
        return self._seconds[place] if -place <= len(self._seconds) else {}

    def _settle_oldest(self) -> None:
        statuses = self._pending.popleft()
        self._settled += 1
        self._seconds.append({})
        self._seconds[-1] = _slowest(self.wait(statuses))

    def wait(self, parts: Sequence[Part]) -> list[tuple[Part, Status]]:
        """The statuses of all calls. Errors: WorkerError of the first that failed, WaitTimeoutError."""
        deadline = Deadline(self.timeout)
        waiting = {part.ref: part for part in parts}
        done: list[tuple[Part, Status]] = []
        while waiting:
            # short waits leave room for Ctrl-C
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(1.0, deadline.left))
            finished = [waiting.pop(ref) for ref in ready]
            statuses: list[Status] = fetch([part.ref for part in finished], finished, 60.0, follow=False)
            self._raise_unmet(zip(finished, statuses, strict=True))
            done += zip(finished, statuses, strict=True)
            if waiting and not deadline.left:
                late = {f"{part.origin.role}.{part.origin.method}" for part in waiting.values()}
                raise WaitTimeoutError(f"{', '.join(sorted(late))} did not finish in {self.timeout:g} s.")
        return done

    def _raise_unmet(self, statuses: Iterable[tuple[Part, Status]]) -> None:
        """Raise the first failure that the driver was not told of."""
        unmet = [
            (part, status)
            for part, status in statuses
            if status.failure and status.failure.error.id not in self.reported and not (part.call and part.call.met)
        ]
        if (failure := first_failure([status for _, status in unmet])) is not None:
            self.reported.add(failure.error.id)
            for part, _ in unmet:
                if part.call:
                    part.call.met = True
            raise failure.error.as_cause()


def _slowest(statuses: Sequence[tuple[Part, Status]]) -> dict[str, float]:
    per_rank: dict[tuple[str, int], float] = {}
    for part, status in statuses:
        for name, seconds in status.seconds:
            key = (f"{part.origin.role}.{name}", part.origin.rank)
            per_rank[key] = per_rank.get(key, 0.0) + seconds
    out: dict[str, float] = {}
    for (name, _), seconds in per_rank.items():
        out[name] = max(out.get(name, 0.0), seconds)
    return out
