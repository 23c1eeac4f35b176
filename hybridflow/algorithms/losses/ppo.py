"""PPO's clipped policy loss, and SAPO's with a smooth gate in place of the clip. Shapes: R response tokens, N all."""

from __future__ import annotations

from typing import Annotated

import torch

from hybridflow.algorithms.losses.policy import PolicyLoss, TokenLoss, log_ratio, policy_kl
from hybridflow.batch.ragged import Ragged
from hybridflow.settings import Check, Positive, is_number, settings


@settings
class PPO(PolicyLoss):
    """The clipped surrogate, as a loss, for each token:

        ratio = exp(log_probs - old_log_probs)
        loss  = -min(ratio * A, clamp(ratio, 1 - clip, 1 + clip_high) * A)        (clip_high defaults to clip)

    With `dual_clip=c` (> 1) the loss of tokens with A < 0 is at most -c * A; without it there is no such bound (verl
    has c = 3 by default). A token counts as clipped when it gets no gradient because of a clip. Log-ratios are kept
    within +-20.
    Schulman et al., "Proximal policy optimization algorithms" (2017), eq. 7; asymmetric clip: DAPO (2025), eq. 10; dual
    clip: Ye et al. (2020), eq. 5."""

    clip: Positive = 0.2
    clip_high: Positive | None = None
    dual_clip: Annotated[float, Check("a finite number above 1", lambda c: is_number(c) and c > 1)] | None = None

    def token_loss(self, log_probs: Ragged, old_log_probs: Ragged, advantages: Ragged) -> TokenLoss:
        high = self.clip if self.clip_high is None else self.clip_high
        change, a = log_ratio(log_probs, old_log_probs), advantages.values
        ratio = change.exp()
        plain = -a * ratio
        bounded = -a * ratio.clamp(1.0 - self.clip, 1.0 + high)
        loss, clipped = torch.maximum(plain, bounded), bounded > plain
        if self.dual_clip is not None:
            ceiling = -self.dual_clip * a
            capped = (a < 0) & (loss > ceiling)
            loss, clipped = torch.where(capped, ceiling, loss), clipped | capped
        return TokenLoss(loss, clipped.to(loss.dtype), policy_kl(change))


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
