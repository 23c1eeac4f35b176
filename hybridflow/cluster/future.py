"""Future: a value that a call will return."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from hybridflow.cluster.columns import Part
from hybridflow.cluster.store import Known, fetch


@dataclass(frozen=True)
class Future:
    """The value of one rank (`merge=None`), or those of several: as a list, or with dicts of numbers averaged."""

    parts: tuple[Part, ...]
    merge: str | None = None
    timeout: float = 600.0

    @staticmethod
    def concat(futures: Sequence[Future]) -> Future:
        """Joined outputs of data parallel ranks: metrics are averaged, anything else becomes a list."""
        return Future(tuple(p for f in futures for p in f.parts), "join", futures[0].timeout)

    def done(self) -> bool:
        pending = [part.ref for part in self.parts if not isinstance(part.ref, Known)]
        return not pending or len(ray.wait(pending, num_returns=len(pending), timeout=0)[0]) == len(pending)

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the value. Errors: WorkerError of the rank that failed, WaitTimeoutError."""
        values = fetch([p.ref for p in self.parts], self.parts, self.timeout if timeout is None else timeout)
        if self.merge is None:
            return values[0]
        if self.merge == "join" and all(map(_is_metrics, values)):
            return values[0] if len(values) == 1 else _mean(values)
        return values


def _is_metrics(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(v, int | float) for v in value.values())


def _mean(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name in metrics[0]:
        column = [m[name] for m in metrics if name in m]
        out[name] = sum(column) / len(column)
    return out


class Deadline:
    """What is left of a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())
