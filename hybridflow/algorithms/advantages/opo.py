"""OPO: the baseline of least variance, a mean weighted by length. Shapes: B rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.prompt_groups import GroupEstimator, PromptGroups
from hybridflow.settings import settings


@settings
class OPO(GroupEstimator):
    """A_i = r_i - sum_j l_j r_j / sum_j l_j over the rows j of its group.

    The number l_j of valid tokens of a response stands for the squared norm of its gradient. A group of one row gets
    exactly 0 (verl gives it its raw score).
    Hao et al., "On-policy RL with optimal reward baseline" (2025)."""

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        baseline = groups.mean(scores, groups.tokens)
        return torch.where(groups.size > 1, groups.zeroed(scores - baseline), 0.0)
