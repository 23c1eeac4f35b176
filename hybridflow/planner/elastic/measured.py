"""Speeds of a run, fitted to what its calls took. Pure."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hybridflow.planner.elastic.state import Speeds
from hybridflow.planner.stream_simulation import DecodingSpeed

_KEPT, _LENGTHS, _SWITCHES, _ITERATIONS = 64, 8192, 3, 32


def non_negative_fit(features: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients of at least 0 with the least sum of squared relative errors; values are above 0."""
    scaled, best = features / values[:, None], np.zeros(features.shape[1])
    least = float(len(values))
    columns = range(features.shape[1])
    for used in (list(some) for count in columns for some in combinations(columns, count + 1)):
        found = np.linalg.lstsq(scaled[:, used], np.ones(len(values)), rcond=None)[0]
        error = float(((scaled[:, used] @ found - 1.0) ** 2).sum())
        if (found >= 0).all() and error < least * (1 - 1e-9):
            best, least = np.zeros(features.shape[1]), error
            best[used] = found
    return best


@dataclass
class Measured:
    """What was seen so far: the latest observations count. Without observations of its kind a speed is 0."""

    slots: int = 256  # rows that an instance decodes at once
    lengths: list[int] = field(default_factory=list)  # of responses, ascending
    switches: deque[float] = field(default_factory=lambda: deque(maxlen=_SWITCHES))
    iterations: deque[tuple[bool, float]] = field(default_factory=lambda: deque(maxlen=_ITERATIONS))
    """Of the latest ones: whether devices moved, and seconds per token."""
    _decoding: deque[tuple[float, float, float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _training: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _others: dict[str, deque[float]] = field(default_factory=dict)
    _order: deque[int] = field(default_factory=deque)

    def response(self, tokens: int) -> None:
        insort(self.lengths, tokens)
        self._order.append(tokens)
        if len(self._order) > _LENGTHS:
            self.lengths.remove(self._order.popleft())

    def decoded(self, seconds: float, rows: float, tokens: int, prefilled: int) -> None:
        """An instance decoded `tokens` of `rows` rows at once, on average, and took up `prefilled` tokens."""
        if seconds > 0 and rows > 0 and tokens > 0:
            self._decoding.append((tokens / rows, float(tokens), float(prefilled), seconds))

    def trained(self, seconds: float, tokens: int, instances: int) -> None:
        """A mini-batch of `tokens` by `instances`: all that the loop does with it."""
        if seconds > 0 and instances > 0:
            self._training.append((1.0, tokens / instances, seconds))

    def iteration(self, seconds: float, tokens: int, moved: bool) -> None:
        self.iterations.append((moved, seconds / max(1, tokens)))

    def took(self, what: str, seconds: float) -> None:
        """`what` of `Speeds`: resize, hand_over, join, look."""
        self._others.setdefault(what, deque(maxlen=8)).append(seconds)

    def speeds(self) -> Speeds:
        base, per_row, prefill = _fitted(self._decoding, 3)
        if base + per_row == 0:
            base = 1e-6  # nothing seen
        train, per_token = _fitted(self._training, 2)
        others = {name: sum(seen) / len(seen) for name, seen in self._others.items()}
        return Speeds(
            DecodingSpeed(base=base, per_row=per_row, prefill=prefill, slots=self.slots), train, per_token, **others
        )


def _fitted(seen: Sequence[tuple[float, ...]], count: int) -> list[float]:
    if not seen:
        return [0.0] * count
    rows = np.array(seen)
    return non_negative_fit(rows[:, :-1], rows[:, -1]).tolist()
