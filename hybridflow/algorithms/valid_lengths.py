"""How many tokens of a row count.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.ragged import Ragged


def valid_lengths(mask: Ragged) -> Tensor:
    """[B] int64: valid tokens of each row of `mask` ragged [B, R] bool."""
    return mask.with_values(mask.values.to(torch.int64)).row_sum()
