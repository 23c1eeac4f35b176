"""GPG: the plain policy gradient, scaled up for the groups that teach nothing. Shapes: B rows."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.group import Groups
from hybridflow.algorithms.precision import result_dtype


def gpg(scores: Tensor, groups: Groups) -> Tensor:
    """[B]: A_i = alpha * (r_i - mean of its group), alpha = B / (B - M).

    `scores` [B] float. M counts the rows of groups in which all scores are equal: their gradient is 0, and alpha takes
    them out of the mean over the batch. verl has B / (number of scores other than 0) in place of alpha. A group of one
    row gets 0 and counts as one of the M (verl: its raw score). The loss that goes with it is "reinforce".
    Chu et al., "GPG: a simple and strong reinforcement learning baseline for model reasoning" (2025).
    """
    differing = groups.differs(scores).sum()
    return (groups.centred(scores) * groups.counts.sum() / differing.clamp(min=1)).to(result_dtype(scores.dtype))
