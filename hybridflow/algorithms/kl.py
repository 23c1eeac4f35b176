"""KL divergence to a reference policy: per-token estimators, and a coefficient of the penalty that adapts."""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hybridflow.errors import ConfigError, nearest
from hybridflow.settings import Positive, check_fields

KLKind = Literal["k1", "k2", "k3", "abs"]
MAX_LOG_RATIO = 20.0  # where log-ratios are exponentiated: exp stays finite in float32, and no inf - inf comes of it


def check_kl_kind(kind: str) -> None:
    """Errors: ConfigError for an unknown estimator, with the nearest known one."""
    if kind not in get_args(KLKind):
        raise ConfigError(f"KL estimator {kind!r} is unknown.{nearest(str(kind), get_args(KLKind))}")


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str = "k1") -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens drawn from the policy, in nats, any shape.

    With d = log policy - log reference: `k1` = d (unbiased), `k2` = d^2 / 2 (biased, low variance),
    `k3` = exp(-d) - 1 + d (unbiased, never negative), `abs` = |d|. In `k3` d is kept within +-20, so that one token
    cannot give an infinite loss (verl keeps its result within +-10 as well).
    Schulman, "Approximating KL divergence" (2020). Errors: ConfigError for an unknown kind."""
    check_kl_kind(kind)
    difference = log_probs - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(-difference) + difference
    return difference.abs()


@dataclass(eq=False)
class Controller:
    """A coefficient or statistic that learns from batches. One object is one coefficient: copies that travel to another
    process share its `identity`, by which that process keeps the `state` between calls."""

    identity: str = field(default_factory=lambda: uuid.uuid4().hex, init=False, repr=False)
    state: Any = field(default=0.0, init=False, repr=False)
    """A number, or a list of numbers."""


@dataclass(eq=False)
class AdaptiveKL(Controller):
    """A KL coefficient that steers the measured KL (nats per row) towards `target` over about `horizon` rows.

        e    = clip(measured / target - 1, -0.2, 0.2)
        coef = coef * (1 + e * rows / horizon)

    Measured is the k1 estimate summed over the valid tokens of a row, mean over the rows of the batch (the column
    `kl`), whatever estimator the penalty itself uses: `target` is in these units. One object is one coefficient, kept
    from iteration to iteration and in the run's checkpoints (`hf.Checkpoints`).
    Ziegler et al. (2019), section 2.2. Errors: ConfigError when a number is not positive and finite."""

    init: Positive
    target: Positive
    horizon: Positive

    def __post_init__(self) -> None:
        check_fields(self)
        self.state = float(self.init)

    def update(self, measured: float, rows: int) -> float:
        """Take in the mean KL per row (nats) of a batch of `rows` rows; returns the next coefficient."""
        if math.isfinite(measured):
            error = min(max(measured / float(self.target) - 1.0, -0.2), 0.2)
            # never below 0, which a batch of more than 5 horizons would reach
            self.state *= max(0.0, 1.0 + error * rows / float(self.horizon))
        return self.state
