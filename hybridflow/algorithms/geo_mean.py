"""GMPO's policy loss: the geometric mean of the token ratios.

Shapes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

import torch

from hybridflow.algorithms.policy_terms import PolicyTerms, log_ratio, policy_kl
from hybridflow.algorithms.sequence_mean import sequence_mean
from hybridflow.ragged import Ragged


def geo_mean_terms(
    log_probs: Ragged,
    old_log_probs: Ragged,
    advantages: Ragged,
    mask: Ragged,
    *,
    clip: float = 0.4,
    clip_high: float | None = None,
) -> PolicyTerms:
    """The surrogate with the geometric mean of the clipped token ratios; exactly 0 at masked tokens.

        d_t  = log_probs_t - old_log_probs_t
        A    = mean over the row's valid tokens of the advantages
        c_t  = min(d_t, clip_high) where A > 0, max(d_t, -clip) where A < 0        (clip_high defaults to clip)
        loss = -A * exp(mean over the row's valid tokens of c_t)

    All inputs ragged [B, R] float, `mask` bool; terms [N]. Every valid token of a row has the row's loss, so that
    "seq-mean-token-mean" is the paper's mean over rows. The paper has one advantage per row; where tokens differ, sign
    and size are those of their mean (verl clips each token by the sign of its own). A `rollout_correction` of level
    "token" weighs the row's loss at each token, so that the row gets the arithmetic mean of these weights, not their
    geometric one. Ranges are of the log-ratio: 0.4 is
    (e^-0.4, e^0.4) of the ratio. A token counts as clipped when it gets no gradient because of a clip.
    Zhao et al., "Geometric-mean policy optimization" (2025), arXiv 2507.20673.
    """
    high = clip if clip_high is None else clip_high
    change = log_ratio(log_probs.values, old_log_probs.values, mask.values)
    of_row = sequence_mean(advantages.values, mask)
    sign = mask.expand(of_row.sign())
    bounded = torch.where(sign > 0, change.clamp(max=high), change.clamp(min=-clip))
    bounded = torch.where(sign == 0, 0.0, bounded)
    loss = mask.expand(-of_row * sequence_mean(bounded, mask).exp())
    clipped = ((sign > 0) & (change > high)) | ((sign < 0) & (change < -clip))
    return PolicyTerms(torch.where(mask.values, loss, 0.0), clipped.to(loss.dtype), policy_kl(change))
