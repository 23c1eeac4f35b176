"""KL divergence to a reference policy: per-token estimators, the penalty in the reward, and its coefficient.

Shapes: B rows, R response tokens, N response tokens of all rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from hybridflow.algorithms.options import is_number
from hybridflow.algorithms.precision import result_dtype
from hybridflow.errors import ConfigError, nearest
from hybridflow.ragged import Ragged

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
    Schulman, "Approximating KL divergence" (2020). Errors: ConfigError for an unknown kind.
    """
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


def penalise(
    rewards: Ragged, log_probs: Ragged, ref_log_probs: Ragged, mask: Ragged, coef: float, kind: str = "k1"
) -> Ragged:
    """Token rewards with the KL penalty: r_t - coef * kl_t, ragged [B, R], exactly 0 at masked tokens.

    Computed in float64; float64 where the rewards are, else float32.
    Ziegler et al., "Fine-tuning language models from human preferences" (2019), eq. 2; InstructGPT (2022), eq. 2.
    """
    kl = kl_estimate(log_probs.values.to(torch.float64), ref_log_probs.values.to(torch.float64), kind)
    penalised = rewards.values.to(torch.float64) - float(coef) * kl
    return rewards.with_values(torch.where(mask.values, penalised, 0.0).to(result_dtype(rewards.dtype)))


@dataclass(frozen=True)
class FixedKL:
    """A KL coefficient that never changes. Errors: ConfigError when it is negative or not finite."""

    coef: float

    def __post_init__(self) -> None:
        if not (is_number(self.coef) and self.coef >= 0):
            raise ConfigError(f"FixedKL(coef={self.coef!r}): must be a finite number of at least 0.")

    @property
    def init(self) -> float:
        return self.coef

    def next(self, coef: float, measured: float, rows: int) -> float:
        return coef


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient that steers the measured KL (nats per row) towards `target` over about `horizon` rows.

        e    = clip(measured / target - 1, -0.2, 0.2)
        coef = coef * (1 + e * rows / horizon)

    Measured is the k1 estimate summed over the valid tokens of a row, mean over the rows of the batch (the column
    `kl`), whatever estimator the penalty itself uses: `target` is in these units. One object is one coefficient, kept
    from iteration to iteration for as long as the session lives and in no checkpoint: a run that continues starts from
    `init`, so give it the last figure `kl/coef`.
    Ziegler et al. (2019), section 2.2. Errors: ConfigError when a number is not positive and finite.
    """

    init: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("init", "target", "horizon"):
            if not (is_number(value := getattr(self, name)) and value > 0):
                raise ConfigError(f"AdaptiveKL({name}={value!r}): must be a finite number above 0.")

    def next(self, coef: float, measured: float, rows: int) -> float:
        """The coefficient after a batch of `rows` rows whose mean KL per row was `measured`."""
        error = min(max(measured / float(self.target) - 1.0, -0.2), 0.2)
        # never below 0, which a batch of more than 5 horizons would reach
        return coef * max(0.0, 1.0 + error * rows / float(self.horizon))


@dataclass
class KLState:
    """The coefficient in use, between iterations. `compute_advantage` reads `coef` and then calls `update`."""

    rule: FixedKL | AdaptiveKL
    coef: float = field(default=math.nan)

    def __post_init__(self) -> None:
        if math.isnan(self.coef):
            self.coef = float(self.rule.init)

    def update(self, measured: float, rows: int) -> float:
        """Take in the mean KL per row (nats) of a batch of `rows` rows; returns the next coefficient."""
        if math.isfinite(measured):
            self.coef = self.rule.next(self.coef, measured, rows)
        return self.coef
