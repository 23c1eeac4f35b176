"""Generalised advantage estimation over response tokens.

Shapes: B rows, N response tokens of all rows, V valid (unmasked) tokens of all rows, L longest row of valid tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.precision import result_dtype
from hybridflow.algorithms.valid_lengths import valid_lengths
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

    `rewards` and `values` ragged [B, R] of any type of number, `mask` ragged [B, R] bool. Summed in float64; the
    results are float64 where one of the inputs is, else float32.
    Schulman et al., "High-dimensional continuous control using generalized advantage estimation" (2016), eq. 16.
    """
    valid, dtype = mask.values, result_dtype(rewards.dtype, values.dtype)
    reward_V, value_V = rewards.values[valid].to(torch.float64), values.values[valid].to(torch.float64)
    delta_V = reward_V + float(gamma) * _next_in_row(value_V, mask) - value_V
    advantage_V = discounted_sum(delta_V, valid_lengths(mask), float(gamma) * float(lam))
    return _at_valid(advantage_V, mask, dtype), _at_valid(advantage_V + value_V, mask, dtype)


def rewards_to_go(rewards: Ragged, mask: Ragged, gamma: float = 1.0) -> Ragged:
    """Ragged [B, R]: r_t + gamma * r_{t+1} + ... over the valid tokens of each row, exactly 0 at masked tokens.

    Summed in float64; float64 where the rewards are, else float32.
    """
    to_go_V = discounted_sum(rewards.values[mask.values].to(torch.float64), valid_lengths(mask), float(gamma))
    return _at_valid(to_go_V, mask, result_dtype(rewards.dtype))


def discounted_sum(x_V: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """[V]: y_t = x_t + factor * y_{t+1} within each of the rows of `lengths` [B] int64, for all rows at once."""
    if len(x_V) == 0 or factor == 0.0:
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


def _at_valid(x_V: Tensor, mask: Ragged, dtype: torch.dtype) -> Ragged:
    """Ragged [B, R] of the type: the values at valid tokens, exactly 0 at masked ones."""
    out = x_V.new_zeros(len(mask.values), dtype=dtype)
    out[mask.values] = x_V.to(dtype)
    return mask.with_values(out)
