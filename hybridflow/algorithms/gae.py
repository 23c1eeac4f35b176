"""Generalised advantage estimation over response tokens.

Shapes: B rows, N response tokens of all rows, V valid (unmasked) tokens of all rows, L longest row of valid tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.ragged import Ragged


def gae(
    rewards: Ragged, values: Ragged, mask: Ragged, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Ragged, Ragged]:
    """Advantages and returns, each ragged [B, R] like `values`, exactly 0 at masked tokens.

    Over the valid tokens t = 0..T-1 of a row (masked ones are skipped: the recursion runs over the row as if they were
    not there, and rewards or values at them do not count):

        delta_t = r_t + gamma * v_{t+1} - v_t              (v_T = 0: the response ends the episode)
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + v_t

    `rewards` and `values` ragged [B, R] float32 (or float64), `mask` ragged [B, R] bool.
    Schulman et al., "High-dimensional continuous control using generalized advantage estimation" (2016), eq. 16.
    """
    valid = mask.values
    # Summed in float64: over a row of thousands of tokens float32 loses digits.
    reward_V, value_V = rewards.values[valid].to(torch.float64), values.values[valid].to(torch.float64)
    delta_V = reward_V + gamma * _next_in_row(value_V, mask) - value_V
    advantage_V = discounted_sum(delta_V, valid_lengths(mask), gamma * lam)
    advantages, returns = torch.zeros_like(values.values), torch.zeros_like(values.values)
    advantages[valid] = advantage_V.to(values.dtype)
    returns[valid] = (advantage_V + value_V).to(values.dtype)
    return values.with_values(advantages), values.with_values(returns)


def rewards_to_go(rewards: Ragged, mask: Ragged, gamma: float = 1.0) -> Ragged:
    """Ragged [B, R]: r_t + gamma * r_{t+1} + ... over the valid tokens of each row, exactly 0 at masked tokens."""
    out = torch.zeros_like(rewards.values)
    to_go_V = discounted_sum(rewards.values[mask.values].to(torch.float64), valid_lengths(mask), gamma)
    out[mask.values] = to_go_V.to(rewards.dtype)
    return rewards.with_values(out)


def valid_lengths(mask: Ragged) -> Tensor:
    """[B] int64: valid tokens of each row of `mask` ragged [B, R] bool."""
    return mask.with_values(mask.values.to(torch.int64)).row_sum()


def discounted_sum(x_V: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """[V]: y_t = x_t + factor * y_{t+1} within each of the rows of `lengths` [B] int64, for all rows at once."""
    if len(x_V) == 0:
        return x_V.clone()
    if factor == 0.0:
        return x_V.clone()
    row_V = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    at_V = torch.arange(len(x_V)) - (lengths.cumsum(0) - lengths)[row_V]
    # Time first, so that each step of the scan reads and writes contiguous memory; beyond a row's end x is 0.
    scan_LB = x_V.new_zeros(int(lengths.max()), len(lengths))
    scan_LB[at_V, row_V] = x_V
    for t in range(len(scan_LB) - 2, -1, -1):
        scan_LB[t].add_(scan_LB[t + 1], alpha=factor)
    return scan_LB[at_V, row_V]


def _next_in_row(x_V: Tensor, mask: Ragged) -> Tensor:
    """[V]: the value at the next valid token of the same row, 0 at the last one."""
    shifted = torch.cat([x_V[1:], x_V.new_zeros(1)])[: len(x_V)]
    ends = valid_lengths(mask)
    last = (ends.cumsum(0) - 1)[ends > 0]
    shifted[last] = 0
    return shifted
