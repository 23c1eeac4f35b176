"""PPO's clipped policy loss and its relatives: a clip or gate of the ratio per token, of the ratio per sequence, of the
weight alone, and none. Shapes: B rows, R response tokens, N those of all rows."""

from __future__ import annotations

from typing import Annotated

import torch

from hybridflow.algorithms.losses.policy import PolicyLoss, TokenLoss, log_ratio, policy_kl
from hybridflow.algorithms.masked import sequence_mean
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


@settings
class ReinforceLoss(PolicyLoss):
    """-A * log_probs for each token. It knows no old policy: right for one update per batch.

    Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (1992)."""

    def token_loss(self, log_probs: Ragged, advantages: Ragged) -> TokenLoss:
        return TokenLoss(-advantages.values * log_probs.values)
