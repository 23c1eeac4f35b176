"""Loss: what an engine calls on every micro-batch; a user's whole loss; and what aggregated losses share.

A loss turns the engine's ragged outputs into one scalar, this micro-batch's share of the mini-batch's loss, so that
gradients do not depend on how the mini-batch was split. Shapes: B rows, R response tokens, N those of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.losses.aggregation import (
    Aggregation,
    Outputs,
    Share,
    TokenWeights,
    Totals,
    check_aggregation,
)
from hybridflow.algorithms.masked import token_column, with_bool_mask
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError
from hybridflow.settings import Positive, settings


class Loss:
    """Base of the losses: `loss(outputs, rows, totals) -> (scalar, metrics)`, shares of one micro-batch.

    `outputs` are the engine's outputs that the loss differentiates, `rows` the micro-batch's columns on the same
    device.
    """

    @property
    def reads(self) -> tuple[str, ...] | None:
        """The columns that the loss reads ("name?": if it is there; None: every column)."""
        return None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The engine outputs that the loss differentiates."""
        return ("log_probs",)

    @property
    def per_token(self) -> tuple[str, ...]:
        """Those of the columns that are known to have one value per response token."""
        return ()

    def check(self, rows: Batch) -> None:
        """Errors: BatchError when one of the columns `per_token` has not one value for each response token."""
        for name in self.per_token:
            if name in rows:
                token_column(rows, name, token_column(rows, "response_ids"))

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals, /) -> Share:
        raise NotImplementedError


@dataclass(frozen=True)
class UserLoss(Loss):
    """`function(outputs, rows, totals, **options)` of a user, whose attributes `reads` (default: every column) and
    `outputs` say what it needs. It gives a scalar or (scalar, metrics)."""

    function: Callable[..., Share | Tensor]
    options: Mapping[str, Any]
    default_outputs: tuple[str, ...] = ("log_probs",)

    @property
    def reads(self) -> tuple[str, ...] | None:
        reads = getattr(self.function, "reads", None)
        return None if reads is None else tuple(reads)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(getattr(self.function, "outputs", self.default_outputs))

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals, /) -> Share:
        """Errors: BatchError when the function does not give a scalar and metrics, and for a wrong mask."""
        found = self.function(outputs, with_bool_mask(rows), totals, **self.options)
        scalar, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(scalar, Tensor) or scalar.numel() != 1 or not isinstance(metrics, Mapping):
            got = f"a tensor {list(scalar.shape)}" if isinstance(scalar, Tensor) else f"a {type(scalar).__name__}"
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise BatchError(
                f"loss {name!r} gave {got} with {type(metrics).__name__} metrics: return a scalar tensor, this "
                f"micro-batch's share, or (scalar, dict of metrics)."
            )
        metrics = {name: torch.as_tensor(value, device=scalar.device) for name, value in metrics.items()}
        return scalar.reshape(()), metrics


@settings
class AggregatedLoss(Loss):
    """A loss per token and its `aggregation` (None: the loss's own, `default_aggregation`), with its `norm`."""

    aggregation: Aggregation | None = None
    norm: Positive | None = None
    default_aggregation = "token-mean"

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation or self.default_aggregation, self.norm)

    def reduce(self, token_loss: Tensor, weights: TokenWeights) -> Tensor:
        """This micro-batch's share of the aggregated loss."""
        return weights.reduce(token_loss, self.aggregation or self.default_aggregation, self.norm)


def masked(column: Ragged, mask: Ragged) -> Ragged:
    """Ragged [B, R], 0 and without gradient at masked tokens: what stands there must not reach the loss."""
    return column.with_values(torch.where(mask.values, column.values, 0.0))
