"""The Lagrangian multiplier of a cost that has to stay below a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hybridflow.algorithms.options import is_number
from hybridflow.errors import ConfigError

_LOG_STEP = 1.0
"""The most that one batch moves log lambda. Steps grow with lambda: unbounded, three of them can lead from 1 to 1e19,
and the next one back to 1e-100, from where there is no return."""
_LOG_BOUND = 20.0
"""|log lambda| stays within this: beyond it (A_r - lambda * A_c) / (1 + lambda) is one of the two in float32."""


@dataclass(frozen=True)
class Lagrange:
    """A multiplier that rises while the mean cost of a response is above `limit` and falls while it is below.

        log lambda = log lambda + lr * lambda * (mean cost - limit)

    the gradient ascent of lambda * (mean cost - limit) in log lambda, from lambda = `init`, never above `maximum`. Of
    itself lambda stays between e^-20 and e^20 (2e-9 to 5e8): a higher `maximum` is without effect. One batch changes it
    by a factor of e at most, which the paper does not say: the step grows with lambda, and otherwise runs away.

    One object is one multiplier, kept from iteration to iteration for as long as the session lives and in no
    checkpoint: a run that continues starts from `init`, so give it the last figure `lagrange/multiplier`.

    Dai et al., "Safe RLHF" (2023), equation 31; their code takes the mean over a window of the last responses, this one
    over the batch.
    Errors: ConfigError for a number that is not finite, or an init or maximum that is not above 0.
    """

    limit: float
    init: float = 1.0
    lr: float = 0.1
    maximum: float | None = None

    def __post_init__(self) -> None:
        for name in ("limit", "init", "lr", *(("maximum",) if self.maximum is not None else ())):
            value = getattr(self, name)
            if not is_number(value):
                raise ConfigError(f"Lagrange({name}={value!r}): must be a finite number.")
        if self.init <= 0 or self.lr < 0:
            raise ConfigError(f"Lagrange(init={self.init}, lr={self.lr}): init must be above 0, and lr at least 0.")
        if self.maximum is not None and self.maximum < self.init:
            raise ConfigError(f"Lagrange(maximum={self.maximum}): must be at least init={self.init}.")

    def next(self, log_multiplier: float, mean_cost: float) -> float:
        """log lambda after a batch whose mean cost per response was `mean_cost`."""
        step = float(self.lr) * math.exp(log_multiplier) * (mean_cost - float(self.limit))
        moved = log_multiplier + max(-_LOG_STEP, min(step, _LOG_STEP))
        highest = _LOG_BOUND if self.maximum is None else min(_LOG_BOUND, math.log(self.maximum))
        return max(-_LOG_BOUND, min(moved, highest))


@dataclass
class LagrangeState:
    """The multiplier in use, between iterations. `compute_advantage` calls `update` and then uses what it returns."""

    rule: Lagrange
    log_multiplier: float = field(default=math.nan)

    def __post_init__(self) -> None:
        if math.isnan(self.log_multiplier):
            self.log_multiplier = math.log(self.rule.init)

    @property
    def multiplier(self) -> float:
        return math.exp(self.log_multiplier)

    def update(self, mean_cost: float) -> float:
        """Take in the mean cost per response of a batch (one that is not finite is left out); returns lambda."""
        if math.isfinite(mean_cost):
            self.log_multiplier = self.rule.next(self.log_multiplier, mean_cost)
        return self.multiplier
