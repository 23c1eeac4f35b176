"""PPO's clipped policy loss per token.

Shapes: N response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.policy_terms import PolicyTerms, log_ratio, policy_kl


def ppo_terms(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """The clipped surrogate, as a loss, for each token; exactly 0, and without gradient, at masked tokens.

        ratio = exp(log_probs - old_log_probs)
        loss  = -min(ratio * A, clamp(ratio, 1 - clip, 1 + clip_high) * A)        (clip_high defaults to clip)

    With `dual_clip=c` (> 1) the loss of tokens with A < 0 is at most -c * A; without it there is no such bound (verl
    has c = 3 by default). All inputs [N] float, `mask` [N] bool. A token counts as clipped when it gets no gradient
    because of a clip. Log-ratios are kept within +-20.
    Schulman et al., "Proximal policy optimization algorithms" (2017), eq. 7; asymmetric clip: DAPO (2025), eq. 10;
    dual clip: Ye et al. (2020), eq. 5.
    """
    high = clip if clip_high is None else clip_high
    change = log_ratio(log_probs, old_log_probs, mask)
    advantages = torch.where(mask, advantages, 0.0)
    ratio = change.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip, 1.0 + high)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        capped = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(capped, ceiling, loss), clipped | capped
    return PolicyTerms(loss, clipped.to(loss.dtype), policy_kl(change))
