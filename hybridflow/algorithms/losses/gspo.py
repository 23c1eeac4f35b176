"""GSPO's and GMPO's policy losses: one ratio per sequence. Shapes: B rows, R response tokens, N those of all rows."""

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


@settings
class GMPO(PolicyLoss):
    """The surrogate with the geometric mean of the clipped token ratios:

        d_t  = log_probs_t - old_log_probs_t
        A    = mean over the row's valid tokens of the advantages
        c_t  = min(d_t, clip_high) where A > 0, max(d_t, -clip) where A < 0        (clip_high defaults to clip)
        loss = -A * exp(mean over the row's valid tokens of c_t)

    Every valid token of a row has the row's loss, so that "seq-mean-token-mean", the default here, is the paper's mean
    over rows. The paper has one advantage per row; where tokens differ, sign and size are those of their mean (verl
    clips each token by the sign of its own). A `rollout_correction` of level "token" weighs the row's loss at each
    token, so that the row gets the arithmetic mean of these weights, not their geometric one. Ranges are of the
    log-ratio: 0.4 is (e^-0.4, e^0.4) of the ratio. A token counts as clipped when a clip takes its gradient.
    Zhao et al., "Geometric-mean policy optimization" (2025), arXiv 2507.20673."""

    clip: Positive = 0.4
    clip_high: Positive | None = None
    default_aggregation = "seq-mean-token-mean"

    def token_loss(self, log_probs: Ragged, old_log_probs: Ragged, advantages: Ragged, mask: Ragged) -> TokenLoss:
        high = self.clip if self.clip_high is None else self.clip_high
        change = log_ratio(log_probs, old_log_probs)
        of_row = sequence_mean(advantages.values, mask)
        sign = mask.expand(of_row.sign())
        bounded = torch.where(sign > 0, change.clamp(max=high), change.clamp(min=-self.clip))
        bounded = torch.where(sign == 0, 0.0, bounded)
        loss = mask.expand(-of_row * sequence_mean(bounded, mask).exp())
        clipped = ((sign > 0) & (change > high)) | ((sign < 0) & (change < -self.clip))
        return TokenLoss(loss, clipped.to(loss.dtype), policy_kl(change))
