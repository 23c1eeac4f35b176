"""ReMax: the reward of the greedy response is the baseline. Shapes: B rows, R response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.gae import rewards_to_go
from hybridflow.algorithms.precision import result_dtype
from hybridflow.ragged import Ragged


def remax(rewards: Ragged, baseline: Tensor, mask: Ragged, *, gamma: float = 1.0) -> tuple[Ragged, Ragged]:
    """Advantages and returns, ragged [B, R]: A_t = (r_t + gamma * r_{t+1} + ...) - baseline; 0 at masked tokens.

    `rewards` ragged [B, R] float, `baseline` [B] float: the reward of a greedy response to the same prompt.
    Li et al., "ReMax" (2023), algorithm 1.
    """
    returns, dtype = rewards_to_go(rewards.to(torch.float64), mask, gamma), result_dtype(rewards.dtype)
    advantages = returns.values - returns.expand(baseline.to(torch.float64))
    return returns.with_values(torch.where(mask.values, advantages, 0.0)).to(dtype), returns.to(dtype)
