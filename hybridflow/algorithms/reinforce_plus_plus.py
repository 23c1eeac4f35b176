"""REINFORCE++: rewards to go, normalised over the whole batch; with a baseline, the group's mean is taken off first.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.credit import every_token
from hybridflow.algorithms.gae import rewards_to_go
from hybridflow.algorithms.group import Groups
from hybridflow.algorithms.precision import result_dtype
from hybridflow.algorithms.whitening import whiten
from hybridflow.ragged import Ragged


def reinforce_plus_plus(rewards: Ragged, mask: Ragged, *, gamma: float = 1.0) -> tuple[Ragged, Ragged]:
    """Advantages and returns, ragged [B, R]: A_t = whiten(r_t + gamma * r_{t+1} + ...) over the batch's valid tokens.

    `rewards` ragged [B, R] float, with the KL penalty of every token in them (`kl_coef`), `mask` ragged [B, R] bool.
    The variance has Bessel's correction and 1e-8 added, as in verl. Masked tokens of a multi-turn response are skipped:
    the sum runs on over them, where verl's starts again at each, so that a reward at the end does not reach earlier
    turns.
    Hu et al., "REINFORCE++" (2025, arXiv 2501.03262), section 3.
    """
    returns, dtype = rewards_to_go(rewards.to(torch.float64), mask, gamma), result_dtype(rewards.dtype)
    return whiten(returns, mask).to(dtype), returns.to(dtype)


def reinforce_plus_plus_baseline(scores: Tensor, groups: Groups, mask: Ragged) -> Ragged:
    """Ragged [B, R]: A = whiten(r_i - mean of its group), the same for every token of a response before whitening.

    `scores` [B] float, `mask` ragged [B, R] bool. The variance of the batch has Bessel's correction and 1e-8 added, as
    in verl. A group of one row is centred to 0 (verl: its raw score).
    Hu et al., "REINFORCE++" (2025, arXiv 2501.03262), section 3: REINFORCE++ with baseline.
    """
    return whiten(every_token(groups.centred(scores), mask), mask).to(result_dtype(scores.dtype))
