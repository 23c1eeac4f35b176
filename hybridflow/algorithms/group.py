"""Advantages relative to the other responses to the same prompt: GRPO and RLOO.

Shapes: B rows, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.errors import BatchError


def grpo(scores: Tensor, group_id: Tensor, *, normalize: bool = True, eps: float = 1e-6) -> Tensor:
    """[B]: (score - mean of its group) / (std of its group + eps), the same for every token of the response.

    `scores` [B] float, `group_id` [B] int64 (rows of a group need not be adjacent). The standard deviation has Bessel's
    correction; a group of one row gets 0. `normalize=False` leaves out the division (Dr. GRPO, 2025).
    Shao et al., "DeepSeekMath" (2024), section 4.1. Errors: BatchError when no group has two rows.
    """
    group_B, size_G = _groups(scores, group_id)
    centred = scores - (_group_sum(scores, group_B, size_G) / size_G)[group_B]
    if not normalize:
        return centred
    variance_G = _group_sum(centred.square(), group_B, size_G) / (size_G - 1).clamp(min=1)
    return centred / (variance_G.sqrt()[group_B] + eps)


def rloo(scores: Tensor, group_id: Tensor) -> Tensor:
    """[B]: score - mean score of the *other* rows of its group (0 in a group of one).

    Ahmadian et al., "Back to basics: revisiting REINFORCE-style optimization" (2024), section 3.2.
    Errors: BatchError when no group has two rows.
    """
    group_B, size_G = _groups(scores, group_id)
    centred = scores - (_group_sum(scores, group_B, size_G) / size_G)[group_B]
    return centred * (size_G / (size_G - 1).clamp(min=1))[group_B]


def _groups(scores: Tensor, group_id: Tensor) -> tuple[Tensor, Tensor]:
    """Group number of each row [B] int64, and rows of each group [G] in the scores' dtype."""
    _, group_B, size_G = torch.unique(group_id, return_inverse=True, return_counts=True)
    if len(size_G) and int(size_G.max()) < 2:
        raise BatchError(
            f"{len(scores)} rows fall into {len(size_G)} groups of one response, which have no other response to be "
            f"compared with. Generate n >= 2 responses per prompt."
        )
    return group_B, size_G.to(scores.dtype)


def _group_sum(x_B: Tensor, group_B: Tensor, size_G: Tensor) -> Tensor:
    return x_B.new_zeros(len(size_G)).index_add(0, group_B, x_B)
