"""GSPO's policy loss: ratio and clip per sequence.

Shapes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

import torch

from hybridflow.algorithms.policy_terms import PolicyTerms, log_ratio, policy_kl
from hybridflow.algorithms.sequence_mean import sequence_mean
from hybridflow.ragged import Ragged


def gspo_terms(
    log_probs: Ragged,
    old_log_probs: Ragged,
    advantages: Ragged,
    mask: Ragged,
    *,
    clip: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyTerms:
    """The surrogate with the ratio of the whole sequence, for each token (GSPO-token); exactly 0 at masked tokens.

        s     = exp(mean over the row's valid tokens of log_probs - old_log_probs)
        s_t   = stop(s) * exp(log_probs_t - stop(log_probs_t))                     (the value of s, token t's gradient)
        loss  = -min(s_t * A_t, clamp(s_t, 1 - clip, 1 + clip_high) * A_t)

    All inputs ragged [B, R] float, `mask` bool; terms [N]. Aggregated by "seq-mean-token-mean", with one advantage per
    row, it is the sequence objective (eq. 5) and has its gradient. The log-ratio of each token is kept
    within +-20 before the mean; verl leaves them alone and bounds the log of s_t, by 10 from above.
    Zheng et al., "Group sequence policy optimization" (2025), eq. 13 and 14; clip ranges of section 5.1.
    """
    valid = mask.values
    change = log_ratio(log_probs.values, old_log_probs.values, valid)
    new = torch.where(valid, log_probs.values, 0.0)
    of_row = mask.expand(sequence_mean(change.detach(), mask))
    ratio = torch.where(valid, (of_row + new - new.detach()).exp(), 0.0)
    weights = torch.where(valid, advantages.values, 0.0)
    plain = -weights * ratio
    bounded = -weights * ratio.clamp(1.0 - clip, 1.0 + clip_high)
    clipped = (bounded > plain) & valid
    return PolicyTerms(torch.maximum(plain, bounded), clipped.to(plain.dtype), policy_kl(change))
