"""Whitening over the valid tokens of the whole batch.

Shapes: B rows, R response tokens, N response tokens of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.precision import result_dtype
from hybridflow.ragged import Ragged


def masked_moments(values_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (divisor n - 1, Bessel's correction) of the valid values, float64 scalars.

    The variance of a single value is 0; without valid values both are.
    """
    valid = values_N[mask_N].to(torch.float64)
    if len(valid) == 0:
        return valid.new_zeros(()), valid.new_zeros(())
    mean = valid.mean()
    return mean, (valid - mean).square().sum() / max(len(valid) - 1, 1)


def whiten(values: Ragged, mask: Ragged, *, eps: float = 1e-8) -> Ragged:
    """Ragged [B, R]: (x - mean) / sqrt(var + eps) over all valid tokens; exactly 0 at masked ones.

    `mask` ragged [B, R] bool. Computed in float64; float64 where the values are, else float32. The variance has
    Bessel's correction, so this is `masked_whiten` of TRL and verl, which however refuse a single token, that is 0
    here, and leave values at masked ones; `whiten` of Ziegler et al. (2019) has the population variance.
    """
    mean, variance = masked_moments(values.values, mask.values)
    white = (values.values.to(torch.float64) - mean) * torch.rsqrt(variance + eps)
    return values.with_values(torch.where(mask.values, white, 0.0).to(result_dtype(values.dtype)))
