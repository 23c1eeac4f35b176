"""RLOO: the baseline of a response is the mean of the others to its prompt. Shapes: B rows."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.prompt_groups import GroupEstimator, PromptGroups
from hybridflow.settings import settings


@settings
class RLOO(GroupEstimator):
    """A_i = r_i - mean of r_j over the *other* rows j of its group.

    With n rows that is n / (n - 1) * (r_i - mean of the group). A group of one row has no others and gets 0 (verl gives
    it its raw score).
    Ahmadian et al., "Back to basics: revisiting REINFORCE-style optimization" (2024), section 3.2."""

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        return groups.centred(scores) * groups.size / (groups.size - 1).clamp(min=1)
