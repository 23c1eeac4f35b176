"""From a loss per token to one scalar, in shares that add up over micro-batches and ranks.

Shapes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from hybridflow.algorithms.totals import Totals
from hybridflow.errors import ConfigError, nearest
from hybridflow.ragged import Ragged

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


def check_aggregation(name: str) -> None:
    """Errors: ConfigError for an unknown aggregation, with the nearest known one."""
    if name not in get_args(Aggregation):
        raise ConfigError(f"loss aggregation {name!r} is unknown.{nearest(str(name), get_args(Aggregation))}")


class TokenWeights:
    """Reduces token values [N] of one micro-batch; `mask` ragged [B, R] bool says which tokens count."""

    def __init__(self, mask: Ragged, totals: Totals) -> None:
        self._mask, self._totals = mask, totals

    def mean(self, token_values: Tensor) -> Tensor:
        """The share of the mean over all valid tokens of the mini-batch, without gradient."""
        return self.reduce(token_values.detach(), "token-mean")

    def reduce(self, token_values: Tensor, how: str) -> Tensor:
        """This micro-batch's share, a scalar:

        `token-mean`          sum over valid tokens / valid tokens of the mini-batch
        `seq-mean-token-mean` sum over rows of the row's mean over its valid tokens / rows of the mini-batch
        `seq-mean-token-sum`  sum over valid tokens / rows of the mini-batch

        Errors: ConfigError for an unknown aggregation.
        """
        check_aggregation(how)
        mask = self._mask
        kept = torch.where(mask.values, token_values, 0.0)
        if how == "token-mean":
            return kept.sum() / max(self._totals.tokens, 1.0)
        if how == "seq-mean-token-mean":
            counts = mask.with_values(mask.values.to(kept.dtype)).row_sum()
            kept = kept / mask.expand(counts).clamp(min=1.0)
        return kept.sum() / max(self._totals.rows, 1.0)
