"""The critic's clipped value loss per token.

Shapes: N response tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueTerms(NamedTuple):
    """Per token: `loss` [N] differentiable, `clipped` [N] 0/1, `error` [N] = returns - values (detached)."""

    loss: Tensor
    clipped: Tensor
    error: Tensor


def value_terms(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = 0.2
) -> ValueTerms:
    """Half the squared error to the returns, clipped around the old values; exactly 0 at masked tokens.

        v_clip = old + clamp(v - old, -clip, clip)
        loss   = 1/2 * max((v - R)^2, (v_clip - R)^2)            (clip=None: 1/2 * (v - R)^2)

    All inputs [N] float, `mask` [N] bool. As in OpenAI's baselines and Ziegler et al. (2019); Huang et al., "The N
    implementation details of RLHF with PPO" (2023), detail 3.8.
    """
    values = torch.where(mask, values, 0.0)
    returns = torch.where(mask, returns, 0.0)
    error = (returns - values).detach()
    plain = 0.5 * (values - returns).square()
    if clip is None:
        return ValueTerms(plain, torch.zeros_like(plain), error)
    old = torch.where(mask, old_values, 0.0)
    moved = values - old
    bounded = 0.5 * (old + moved.clamp(-clip, clip) - returns).square()
    # old + (values - old) differs from values by rounding: a term is clipped only where the clamp bit
    clipped = (moved.abs() > clip) & (bounded > plain)
    return ValueTerms(torch.maximum(plain, bounded), clipped.to(plain.dtype), error)
