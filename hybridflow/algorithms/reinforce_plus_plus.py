"""REINFORCE++: rewards to go, normalised over the whole batch; with a baseline, the group's mean is taken off first.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.credit import every_token
from hybridflow.algorithms.gae import rewards_to_go
from hybridflow.algorithms.group import Groups
from hybridflow.algorithms.whitening import whiten
from hybridflow.ragged import Ragged


def reinforce_plus_plus(rewards: Ragged, mask: Ragged, *, gamma: float = 1.0) -> tuple[Ragged, Ragged]:
    """Advantages and returns, ragged [B, R]: A_t = whiten(r_t + gamma * r_{t+1} + ...) over the batch's valid tokens.

    `rewards` ragged [B, R] float, with the KL penalty of every token in them (`kl_coef`), `mask` ragged [B, R] bool.
    Hu et al., "REINFORCE++" (2025, arXiv 2501.03262), section 3.
    """
    returns = rewards_to_go(rewards, mask, gamma)
    return whiten(returns, mask), returns


def reinforce_plus_plus_baseline(scores: Tensor, groups: Groups, mask: Ragged) -> Ragged:
    """Ragged [B, R]: A = whiten(r_i - mean of its group), the same for every token of a response before whitening.

    `scores` [B] float, `mask` ragged [B, R] bool. A group of one row is centred to 0 (verl: its raw score).
    Hu et al., "REINFORCE++" (2025, arXiv 2501.03262), section 3: REINFORCE++ with baseline.
    """
    return whiten(every_token(groups.centred(scores).to(scores.dtype), mask), mask)
