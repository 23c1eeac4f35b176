"""What a policy loss gives for every token, and the log-ratio that most of them are made of.

Shapes: N response tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.algorithms.kl import MAX_LOG_RATIO, kl_estimate


class PolicyTerms(NamedTuple):
    """Per token: `loss` [N] differentiable; `clipped` [N] 0/1, None where the loss has no clip; `kl` [N] (k3, old
    policy to new one), None where it is not known. Means of them are the figures `actor/clip_fraction` and
    `actor/ppo_kl`, of which the latter is k1, mean(old_log_probs - log_probs), in verl."""

    loss: Tensor
    clipped: Tensor | None = None
    kl: Tensor | None = None


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """[N]: log_probs - old_log_probs within +-20, differentiable; exactly 0, and without gradient, at masked tokens.

    Whatever stands at masked tokens, inf and nan included, stays out.
    """
    # where() also inside: the gradient of a difference that is dropped later would still be nan at an infinite one
    new, old = torch.where(mask, log_probs, 0.0), torch.where(mask, old_log_probs, 0.0)
    return (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_kl(log_ratio: Tensor) -> Tensor:
    """[N] without gradient: the k3 estimate of KL(old policy || new policy), in nats, from `log_ratio`."""
    ratio = log_ratio.detach()
    return kl_estimate(torch.zeros_like(ratio), ratio, "k3")
