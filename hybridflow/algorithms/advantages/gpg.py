"""GPG: the plain policy gradient, rescaled for groups without a gradient. Shapes: B rows."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.prompt_groups import GroupEstimator, PromptGroups
from hybridflow.settings import settings


@settings
class GPG(GroupEstimator):
    """A_i = alpha * (r_i - mean of its group), alpha = B / (B - M).

    M counts the rows of groups in which all scores are equal: their gradient is 0, and alpha takes them out of the mean
    over the batch. verl has B / (number of scores other than 0) in place of alpha. A group of one row gets 0 and counts
    as one of the M (verl: its raw score). The loss that goes with it is "reinforce".
    Chu et al., "GPG: a simple and strong reinforcement learning baseline for model reasoning" (2025)."""

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        differing = groups.differs(scores).sum()
        return groups.centred(scores) * groups.counts.sum() / differing.clamp(min=1)
