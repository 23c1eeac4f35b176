"""Generalised advantage estimation, with one critic, or with critics of reward and cost (Safe RLHF).

Shapes: B rows, R response tokens, V valid (unmasked) tokens of all rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.token_rewards import discounted_sum, row_scores, token_rewards, valid_only
from hybridflow.algorithms.kl import Controller
from hybridflow.algorithms.masked import finite_column, mask_column, valid_lengths, whiten
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError
from hybridflow.settings import Check, Finite, Fraction, NonNegative, Positive, check_fields, is_number, settings

_LOG_STEP = 1.0
"""The most that one batch moves log lambda. Steps grow with lambda: unbounded, three of them can lead from 1 to 1e19,
and the next one back to 1e-100, from where there is no return."""
_LOG_BOUND = 20.0
"""|log lambda| stays within this: beyond it (A_r - lambda * A_c) / (1 + lambda) is one of the two in float32."""


@settings
class GAE(Estimator):
    """Generalised advantage estimates from the critic's `values`; `returns` are the critic's targets.

    Over the valid tokens t = 0..T-1 of a row (the recursion skips masked tokens and ignores rewards or values at them):

        delta_t = r_t + gamma * v_{t+1} - v_t              (v_T = 0: the response ends the episode)
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + v_t

    `whiten` brings the advantages to mean 0 and variance 1 over the valid tokens of the batch.
    Schulman et al., "High-dimensional continuous control using generalized advantage estimation" (2016), eq. 16."""

    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    whiten: bool = True
    reads = ("values",)

    def __call__(self, rewards: Ragged, batch: Batch, /) -> tuple[Ragged, Ragged]:
        mask = mask_column(batch)
        advantages, returns = gae(rewards, finite_column(batch, "values", mask), mask, gamma=self.gamma, lam=self.lam)
        return whiten(advantages, mask) if self.whiten else advantages, returns


def gae(rewards: Ragged, values: Ragged, mask: Ragged, *, gamma: float, lam: float) -> tuple[Ragged, Ragged]:
    """Advantages and returns, ragged [B, R] float64, 0 at masked tokens: see `GAE`.

    `rewards` and `values` ragged [B, R] of any type of number, `mask` ragged [B, R] bool."""
    valid = mask.values
    reward_V, value_V = rewards.values[valid].to(torch.float64), values.values[valid].to(torch.float64)
    ends = valid_lengths(mask)
    next_V = value_V.roll(-1)  # at the next valid token of the same row, 0 at the last one
    next_V[(ends.cumsum(0) - 1)[ends > 0]] = 0
    delta_V = reward_V + float(gamma) * next_V - value_V
    advantage_V = discounted_sum(delta_V, ends, float(gamma) * float(lam))
    return valid_only(advantage_V, mask), valid_only(advantage_V + value_V, mask)


@dataclass(eq=False)
class Lagrange(Controller):
    """A multiplier that rises while the mean cost of a response is above `limit` and falls while it is below.

        log lambda = log lambda + lr * lambda * (mean cost - limit)

    the gradient ascent of lambda * (mean cost - limit) in log lambda, from lambda = `init`, never above `maximum`. Of
    itself lambda stays between e^-20 and e^20 (2e-9 to 5e8): a higher `maximum` is without effect. One batch changes it
    by a factor of e at most, which the paper does not say: the step grows with lambda, and otherwise runs away.

    One object is one multiplier, kept from iteration to iteration and in the run's checkpoints (`hf.Checkpoints`); a
    run that starts from other weights begins with `init`.

    Dai et al., "Safe RLHF" (2023), equation 31; their code takes the mean over a window of the last responses, this one
    over the batch.
    Errors: ConfigError for a number that is not finite, or an init or maximum that is not above 0."""

    limit: Finite
    init: Positive = 1.0
    lr: NonNegative = 0.1
    maximum: Finite | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.maximum is not None and self.maximum < self.init:
            raise ConfigError(f"Lagrange(maximum={self.maximum}): must be at least init={self.init}.")
        self.state = math.log(self.init)  # log lambda

    @property
    def multiplier(self) -> float:
        return math.exp(self.state)

    def update(self, mean_cost: float) -> float:
        """Take in the mean cost per response of a batch (one that is not finite is left out); returns lambda."""
        if math.isfinite(mean_cost):
            step = float(self.lr) * self.multiplier * (mean_cost - float(self.limit))
            moved = self.state + max(-_LOG_STEP, min(step, _LOG_STEP))
            highest = _LOG_BOUND if self.maximum is None else min(_LOG_BOUND, math.log(self.maximum))
            self.state = max(-_LOG_BOUND, min(moved, highest))
        return self.multiplier


@settings
class SafeRLHF(Estimator):
    """A = (A_r - lambda * A_c) / (1 + lambda)

    with A_r, A_c the generalised advantage estimates of rewards with `values` and of `costs` with `cost_values`.
    `lagrange` is lambda: a number that stays, or `Lagrange(limit=...)`, which learns from the mean cost of the batch
    before the batch is weighed. `whiten` brings A_r and A_c to one scale before (not in the paper; lambda then weighs
    them whatever their units); `cost_advantages` are A_c as they went in. Of a KL penalty half is taken from the reward
    and half is added to the cost: A would otherwise count it 1 / (1 + lambda) times.
    Dai et al., "Safe RLHF" (2023), section 3.3 and equation 30."""

    lagrange: Annotated[
        float | Lagrange,
        Check(
            "a number of at least 0 (a multiplier that stays), or Lagrange(limit=...), which learns",
            lambda value: isinstance(value, Lagrange) or (is_number(value) and value >= 0),
        ),
    ]
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    whiten: bool = False
    reads = ("values", "costs", "cost_values")
    writes = ("cost_advantages", "cost_returns", "lagrange")
    kl = "split"

    def __call__(
        self, rewards: Ragged, batch: Batch, kl_rewards: Ragged | None = None, /
    ) -> dict[str, Ragged | Tensor]:
        mask = mask_column(batch)
        costs = token_rewards(batch.peek("costs"), mask, "costs")
        values, cost_values = finite_column(batch, "values", mask), finite_column(batch, "cost_values", mask)
        counted = row_scores(costs, mask)[valid_lengths(mask) > 0]
        lagrange = self.lagrange
        multiplier = lagrange.update(counted.mean().item()) if isinstance(lagrange, Lagrange) else float(lagrange)
        if kl_rewards is not None:
            half = kl_rewards.values / 2
            rewards, costs = rewards.with_values(rewards.values + half), costs.with_values(costs.values - half)
        advantages, returns = gae(rewards, values, mask, gamma=self.gamma, lam=self.lam)
        cost_advantages, cost_returns = gae(costs, cost_values, mask, gamma=self.gamma, lam=self.lam)
        if self.whiten:
            advantages, cost_advantages = whiten(advantages, mask), whiten(cost_advantages, mask)
        weighed = (advantages.values - multiplier * cost_advantages.values) / (1.0 + multiplier)
        return {
            "advantages": advantages.with_values(weighed),
            "returns": returns,
            "cost_advantages": cost_advantages,
            "cost_returns": cost_returns,
            "lagrange": torch.full((len(batch),), multiplier),
        }
