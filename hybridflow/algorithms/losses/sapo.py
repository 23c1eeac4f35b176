"""SAPO's policy loss: a smooth gate in the place of a clip. Shapes: R response tokens."""

from __future__ import annotations

import torch

from hybridflow.algorithms.losses.policy import PolicyLoss, TokenLoss, log_ratio, policy_kl
from hybridflow.batch.ragged import Ragged
from hybridflow.settings import Positive, settings


@settings
class SAPO(PolicyLoss):
    """The gated surrogate, as a loss, for each token:

        ratio = exp(log_probs - old_log_probs)
        loss  = -4 / tau * sigmoid(tau * (ratio - 1)) * A           (tau = tau_pos where A > 0, else tau_neg)

    There is no clip. Aggregated by "seq-mean-token-mean" by default. Log-ratios are kept within +-20.
    Gao et al., "Soft adaptive policy optimization" (2025), arXiv 2511.20347."""

    tau_pos: Positive = 1.0
    tau_neg: Positive = 1.05
    default_aggregation = "seq-mean-token-mean"

    def token_loss(self, log_probs: Ragged, old_log_probs: Ragged, advantages: Ragged) -> TokenLoss:
        change, a = log_ratio(log_probs, old_log_probs), advantages.values
        tau = torch.full_like(change, self.tau_neg).masked_fill(a > 0, self.tau_pos)
        gate = 4.0 / tau * torch.sigmoid(tau * (change.exp() - 1.0))
        return TokenLoss(-gate * a, kl=policy_kl(change))
