"""CISPO's policy loss per token: a clipped importance weight.

Shapes: N response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.policy_terms import PolicyTerms, log_ratio, policy_kl


def cispo_terms(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
) -> PolicyTerms:
    """REINFORCE with a clipped importance weight, for each token; exactly 0 at masked tokens.

        ratio = exp(log_probs - old_log_probs)
        loss  = -stop(clamp(ratio, 1 - clip, 1 + clip_high)) * A * log_probs       (clip_high defaults to clip)

    Every valid token keeps its gradient; one counts as clipped when its weight is not its ratio. `clip=1` puts no
    lower bound on the weight, as in the paper. The upper bound is 1 + clip_high, as in the paper and in verl; TRL's
    `epsilon_high` of CISPO is the bound itself (5.0 there is clip_high=4.0 here). All inputs [N] float, `mask`
    [N] bool. Log-ratios are kept within +-20.
    MiniMax, "MiniMax-M1: scaling test-time compute efficiently with lightning attention" (2025), eq. 4 and 5.
    """
    high = clip if clip_high is None else clip_high
    change = log_ratio(log_probs, old_log_probs, mask).detach()
    ratio = change.exp()
    weight = ratio.clamp(1.0 - clip, 1.0 + high)
    loss = -weight * torch.where(mask, advantages, 0.0) * torch.where(mask, log_probs, 0.0)
    return PolicyTerms(loss, (weight != ratio).to(loss.dtype), policy_kl(change))
