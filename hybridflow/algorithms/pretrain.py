"""The language-model loss per token.

Shapes: N response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def negative_log_likelihood(log_probs: Tensor, mask: Tensor) -> Tensor:
    """[N]: -log p of each token, in nats, differentiable; exactly 0 at masked tokens. `mask` [N] bool.

    The pretraining loss of PPO-ptx (InstructGPT, 2022, eq. 2) and of Safe-RLHF.
    """
    return -torch.where(mask, log_probs, 0.0)
