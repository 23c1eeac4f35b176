"""GRPO and its relatives: the advantage of a response over the others to its prompt. Shapes: B rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.prompt_groups import GroupEstimator, PromptGroups
from hybridflow.settings import Positive, settings


@settings
class GRPO(GroupEstimator):
    """A_i = (r_i - mean of its group) / (std of its group + eps), the same for every token of the response.

    The standard deviation has Bessel's correction, as in TRL and verl; `eps` is verl's (TRL adds 1e-4). A group of one
    row gets 0, where verl gives it its raw score: without a comparison there is no signal. `normalize=False` leaves out
    the division: `DrGRPO`.
    Shao et al., "DeepSeekMath" (2024), section 4.1."""

    normalize: bool = True
    eps: Positive = 1e-6

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        centred = groups.centred(scores)
        return centred / (groups.std(scores) + self.eps) if self.normalize else centred


@settings
class DrGRPO(GroupEstimator):
    """A_i = r_i - mean of its group.

    Liu et al., "Understanding R1-Zero-like training: a critical perspective" (Dr. GRPO, 2025): dividing by the std
    favours prompts that are nearly always or nearly never solved. The constant length of its loss is the aggregation
    `seq-mean-token-sum-norm`."""


@settings
class RLOO(GroupEstimator):
    """A_i = r_i - mean of r_j over the *other* rows j of its group.

    With n rows that is n / (n - 1) * (r_i - mean of the group). A group of one row has no others and gets 0 (verl gives
    it its raw score).
    Ahmadian et al., "Back to basics: revisiting REINFORCE-style optimization" (2024), section 3.2."""

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        return groups.centred(scores) * groups.size / (groups.size - 1).clamp(min=1)


@settings
class OPO(GroupEstimator):
    """A_i = r_i - sum_j l_j r_j / sum_j l_j over the rows j of its group.

    The number l_j of valid tokens of a response stands for the squared norm of its gradient. A group of one row gets
    exactly 0 (verl gives it its raw score).
    Hao et al., "On-policy RL with optimal reward baseline" (2025)."""

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        baseline = groups.mean(scores, groups.tokens)
        return torch.where(groups.size > 1, groups.zeroed(scores - baseline), 0.0)


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
