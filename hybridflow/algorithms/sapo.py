"""SAPO's policy loss per token: a smooth gate in the place of a clip.

Shapes: N response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.policy_terms import PolicyTerms, log_ratio, policy_kl


def sapo_terms(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyTerms:
    """The gated surrogate, as a loss, for each token; exactly 0, and without gradient, at masked tokens.

        ratio = exp(log_probs - old_log_probs)
        loss  = -4 / tau * sigmoid(tau * (ratio - 1)) * A           (tau = tau_pos where A > 0, else tau_neg)

    All inputs [N] float, `mask` [N] bool. There is no clip. Log-ratios are kept within +-20.
    Gao et al., "Soft adaptive policy optimization" (2025), arXiv 2511.20347.
    """
    change = log_ratio(log_probs, old_log_probs, mask)
    advantages = torch.where(mask, advantages, 0.0)
    tau = torch.full_like(change, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = 4.0 / tau * torch.sigmoid(tau * (change.exp() - 1.0))
    return PolicyTerms(-gate * advantages, kl=policy_kl(change))
