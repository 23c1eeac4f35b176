"""Speeds of a run, fitted to what its calls took. Pure."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridflow.planner.elastic.state import Speeds
from hybridflow.planner.stream_simulation import DecodingSpeed

_KEPT, _LENGTHS, _SWITCHES, _ITERATIONS = 64, 8192, 3, 32


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

    @property
    def in_order(self) -> list[int]:
        """The lengths of responses as they ended."""
        return [*self._order]

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
        base, per_row, prefill = fitted(self._decoding, 3)
        if base + per_row == 0:
            base = 1e-6  # nothing seen
        train, per_token = fitted(self._training, 2)
        others = {name: sum(seen) / len(seen) for name, seen in self._others.items()}
        decoding = DecodingSpeed(base=base, per_row=per_row, prefill=prefill, slots=self.slots)
        return Speeds(decoding, train, per_token, **others)


def fitted(seen: Sequence[tuple[float, ...]], count: int) -> list[float]:
    """Coefficients of at least 0 of the first `count` values of each tuple for its last one, which is above 0."""
    if not seen:
        return [0.0] * count
    from scipy.optimize import nnls  # takes a while to import

    rows = np.array(seen)  # the sum of squared relative errors is least
    return nnls(rows[:, :-1] / rows[:, -1:], np.ones(len(rows)))[0].tolist()
