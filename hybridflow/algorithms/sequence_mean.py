"""The mean of each row over its valid tokens.

Shapes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.valid_lengths import valid_lengths
from hybridflow.ragged import Ragged


def sequence_mean(token_values: Tensor, mask: Ragged) -> Tensor:
    """[B], differentiable: the mean of `token_values` [N] over the valid tokens of each row, 0 where there is none.

    Whatever stands at masked tokens is left out.
    """
    kept = mask.with_values(torch.where(mask.values, token_values, 0.0))
    return kept.row_sum() / valid_lengths(mask).to(kept.dtype).clamp(min=1.0)
