"""OPO: the baseline of least variance, a mean weighted by length. Shapes: B rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.group import Groups
from hybridflow.algorithms.precision import result_dtype


def opo(scores: Tensor, groups: Groups, lengths: Tensor) -> Tensor:
    """[B]: A_i = r_i - sum_j l_j r_j / sum_j l_j over the rows j of its group.

    `scores` [B] float, `lengths` [B] valid tokens of each response, which stand for the squared norm of its gradient.
    A group of one row gets exactly 0 (verl gives it its raw score).
    Hao et al., "On-policy RL with optimal reward baseline" (2025).
    """
    centred = torch.where(groups.size > 1, groups.kept(scores - groups.mean(scores, lengths)), 0.0)
    return centred.to(result_dtype(scores.dtype))
