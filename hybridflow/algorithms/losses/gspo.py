"""GSPO's policy loss: ratio and clip per sequence. Shapes: B rows, R response tokens, N those of all rows."""

from __future__ import annotations

import torch

from hybridflow.algorithms.losses.policy import PolicyLoss, TokenLoss, log_ratio, policy_kl
from hybridflow.algorithms.masked import sequence_mean
from hybridflow.batch.ragged import Ragged
from hybridflow.settings import Positive, settings


@settings
class GSPO(PolicyLoss):
    """The surrogate with the ratio of the whole sequence, for each token (GSPO-token):

        s     = exp(mean over the row's valid tokens of log_probs - old_log_probs)
        s_t   = stop(s) * exp(log_probs_t - stop(log_probs_t))                     (the value of s, token t's gradient)
        loss  = -min(s_t * A_t, clamp(s_t, 1 - clip, 1 + clip_high) * A_t)

    Aggregated by "seq-mean-token-mean", the default here, with one advantage per row, it is the sequence objective (eq.
    5) and has its gradient. The log-ratio of each token is kept within +-20 before the mean; verl leaves them alone and
    bounds the log of s_t, by 10 from above.
    Zheng et al., "Group sequence policy optimization" (2025), eq. 13 and 14; clip ranges of section 5.1."""

    clip: Positive = 3e-4
    clip_high: Positive = 4e-4
    default_aggregation = "seq-mean-token-mean"

    def token_loss(self, log_probs: Ragged, old_log_probs: Ragged, advantages: Ragged, mask: Ragged) -> TokenLoss:
        change, new, a = log_ratio(log_probs, old_log_probs), log_probs.values, advantages.values
        of_row = mask.expand(sequence_mean(change.detach(), mask))
        ratio = (of_row + new - new.detach()).exp()
        plain = -a * ratio
        bounded = -a * ratio.clamp(1.0 - self.clip, 1.0 + self.clip_high)
        return TokenLoss(torch.maximum(plain, bounded), (bounded > plain).to(plain.dtype), policy_kl(change))
