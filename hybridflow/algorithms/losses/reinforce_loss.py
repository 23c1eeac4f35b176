"""The policy gradient itself as a loss, plain, and with CISPO's importance weight. Shapes: R response tokens."""

from __future__ import annotations

from hybridflow.algorithms.losses.policy import PolicyLoss, TokenLoss, log_ratio, policy_kl
from hybridflow.batch.ragged import Ragged
from hybridflow.settings import Positive, settings


@settings
class ReinforceLoss(PolicyLoss):
    """-A * log_probs for each token. It knows no old policy: right for one update per batch.

    Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (1992)."""

    def token_loss(self, log_probs: Ragged, advantages: Ragged) -> TokenLoss:
        return TokenLoss(-advantages.values * log_probs.values)


@settings
class CISPO(PolicyLoss):
    """REINFORCE with a clipped importance weight, for each token:

        ratio = exp(log_probs - old_log_probs)
        loss  = -stop(clamp(ratio, 1 - clip, 1 + clip_high)) * A * log_probs       (clip_high defaults to clip)

    Every valid token keeps its gradient; one counts as clipped when its weight is not its ratio. `clip=1` puts no lower
    bound on the weight, as in the paper. The upper bound is 1 + clip_high, as in the paper and in verl; TRL's
    `epsilon_high` of CISPO is the bound itself (5.0 there is clip_high=4.0 here). Log-ratios are kept within +-20.
    MiniMax, "MiniMax-M1: scaling test-time compute efficiently with lightning attention" (2025), eq. 4 and 5."""

    clip: Positive = 0.2
    clip_high: Positive | None = None

    def token_loss(self, log_probs: Ragged, old_log_probs: Ragged, advantages: Ragged) -> TokenLoss:
        high = self.clip if self.clip_high is None else self.clip_high
        change = log_ratio(log_probs, old_log_probs).detach()
        ratio = change.exp()
        weight = ratio.clamp(1.0 - self.clip, 1.0 + high)
        loss = -weight * advantages.values * log_probs.values
        return TokenLoss(loss, (weight != ratio).to(loss.dtype), policy_kl(change))
