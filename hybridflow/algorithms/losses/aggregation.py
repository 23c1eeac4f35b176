"""From a loss per token to one scalar, in shares that add up over micro-batches and ranks.

Shapes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hybridflow.algorithms.masked import valid_lengths
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError, nearest

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Outputs = Mapping[str, Ragged]
"""The engine's differentiable outputs for one micro-batch, ragged [B, R]."""
Share = tuple[Tensor, dict[str, Tensor]]
"""A scalar and metrics, each a micro-batch's *share* of a global quantity (sums divided by `Totals`), so that adding
over micro-batches and ranks gives the value of the whole mini-batch."""


@dataclass(frozen=True)
class Totals:
    """What a mini-batch holds over *all* data parallel ranks: denominators that do not depend on how it was split.

    `tokens` counts True entries of response_mask, `rows` the rows (also those without a True entry),
    `sequence_tokens` all prompt + response tokens, `longest` the response tokens of the longest row, masked ones too.
    """

    tokens: float
    rows: float
    sequence_tokens: float = 0.0
    longest: float = 0.0


LossFunction = Callable[[Outputs, Batch, Totals], Share]
"""`loss(outputs, rows, totals) -> (scalar, metrics)`: what an engine calls; `rows` are on the device of the outputs."""


def check_aggregation(name: str, norm: float | None = None) -> None:
    """Errors: ConfigError for an unknown aggregation, with the nearest known one, or a `norm` that it does not use."""
    if name not in get_args(Aggregation):
        raise ConfigError(f"loss aggregation {name!r} is unknown.{nearest(str(name), get_args(Aggregation))}")
    if norm is not None and name != "seq-mean-token-sum-norm":
        raise ConfigError(f"norm={norm!r} is of aggregation='seq-mean-token-sum-norm', found aggregation={name!r}.")


class TokenWeights:
    """Reduces token values [N] of one micro-batch; `mask` ragged [B, R] bool says which tokens count."""

    def __init__(self, mask: Ragged, totals: Totals) -> None:
        self._mask, self._totals = mask, totals

    def mean(self, token_values: Tensor) -> Tensor:
        """The share of the mean over all valid tokens of the mini-batch, without gradient."""
        return self.reduce(token_values.detach(), "token-mean")

    def reduce(self, token_values: Tensor, how: str, norm: float | None = None) -> Tensor:
        """This micro-batch's share, a scalar:

        `token-mean`              sum over valid tokens / valid tokens of the mini-batch
        `seq-mean-token-mean`     sum over rows of the row's mean over its valid tokens / rows of the mini-batch
        `seq-mean-token-sum`      sum over valid tokens / rows of the mini-batch
        `seq-mean-token-sum-norm` the same / `norm`, a constant such as the most tokens that a response may have (Liu
                                  et al., "Understanding R1-Zero-like training", 2025: Dr. GRPO); without it, the
                                  longest response of the mini-batch, which changes from one to the next

        Rows without a valid token count among the rows (verl leaves them out unless it is given the number of rows).
        Errors: ConfigError for an unknown aggregation, and without `norm` where the longest response is not known.
        """
        check_aggregation(how, norm)
        mask, totals = self._mask, self._totals
        kept = torch.where(mask.values, token_values, 0.0)
        if how == "token-mean":
            return kept.sum() / max(totals.tokens, 1.0)
        if how == "seq-mean-token-mean":
            kept = kept / mask.expand(valid_lengths(mask).to(kept.dtype)).clamp(min=1.0)
        share = kept.sum() / max(totals.rows, 1.0)
        return share / self._norm(norm) if how == "seq-mean-token-sum-norm" else share

    def _norm(self, norm: float | None) -> float:
        if norm is not None:
            return norm
        if not self._totals.longest and len(self._mask.values):
            raise ConfigError("aggregation='seq-mean-token-sum-norm' needs norm=, or Totals(longest=...).")
        return max(self._totals.longest, 1.0)
