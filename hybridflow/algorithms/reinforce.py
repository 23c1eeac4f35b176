"""REINFORCE with the batch mean as its baseline. Shapes: B rows, R response tokens."""

from __future__ import annotations

import torch

from hybridflow.algorithms.gae import rewards_to_go
from hybridflow.algorithms.precision import result_dtype
from hybridflow.algorithms.reinforce_plus_plus import reinforce_plus_plus
from hybridflow.algorithms.whitening import masked_moments
from hybridflow.ragged import Ragged


def reinforce(rewards: Ragged, mask: Ragged, *, gamma: float = 1.0, normalize: bool = False) -> tuple[Ragged, Ragged]:
    """Advantages and returns, ragged [B, R]: rewards to go minus their mean over the valid tokens of the batch.

    `rewards` ragged [B, R], `mask` ragged [B, R] bool; 0 at masked tokens. `normalize=True` also divides by the
    standard deviation: that is `reinforce_plus_plus`.
    Williams, "Simple statistical gradient-following algorithms" (1992).
    """
    if normalize:
        return reinforce_plus_plus(rewards, mask, gamma=gamma)
    returns, dtype = rewards_to_go(rewards.to(torch.float64), mask, gamma), result_dtype(rewards.dtype)
    mean, _ = masked_moments(returns.values, mask.values)
    return returns.with_values(torch.where(mask.values, returns.values - mean, 0.0)).to(dtype), returns.to(dtype)
