"""The policy gradient itself as a loss. Shapes: R response tokens."""

from __future__ import annotations

from hybridflow.algorithms.losses.policy import PolicyLoss, TokenLoss
from hybridflow.batch.ragged import Ragged
from hybridflow.settings import settings


@settings
class ReinforceLoss(PolicyLoss):
    """-A * log_probs for each token. It knows no old policy: right for one update per batch.

    Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (1992)."""

    def token_loss(self, log_probs: Ragged, advantages: Ragged) -> TokenLoss:
        return TokenLoss(-advantages.values * log_probs.values)
