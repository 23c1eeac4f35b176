"""Generalised advantage estimation. Shapes: B rows, R response tokens, V valid (unmasked) tokens of all rows."""

from __future__ import annotations

import torch

from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.token_rewards import discounted_sum, valid_only
from hybridflow.algorithms.masked import finite_column, mask_column, valid_lengths, whiten
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.settings import Fraction, settings


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
