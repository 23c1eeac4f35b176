"""The policy gradient itself as a loss per token.

Shapes: N response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.policy_terms import PolicyTerms


def policy_gradient_terms(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyTerms:
    """-A * log_probs for each token; exactly 0, and without gradient, at masked tokens.

    All inputs [N] float, `mask` [N] bool. It knows no old policy: right for one update per batch.
    Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (1992).
    """
    return PolicyTerms(-torch.where(mask, advantages, 0.0) * torch.where(mask, log_probs, 0.0))
