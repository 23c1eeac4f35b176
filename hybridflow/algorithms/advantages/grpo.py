"""GRPO: advantages relative to the other responses to the same prompt. Shapes: B rows."""

from __future__ import annotations

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

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        return groups.centred(scores)
