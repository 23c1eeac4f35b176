"""Loss: what an engine calls on every micro-batch; a user's whole loss; and what aggregated losses share.

A loss turns the engine's ragged outputs into one scalar, this micro-batch's share of the mini-batch's loss, so that
gradients do not depend on how the mini-batch was split. Shapes: B rows, R response tokens, N those of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hybridflow.algorithms.masked import token_column, valid_lengths, with_bool_mask
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, ConfigError, nearest
from hybridflow.settings import Positive, settings

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Outputs = Mapping[str, Any]
"""The engine's differentiable outputs for one micro-batch: ragged [B, R]; `logits` and `ref_logits` are `Logits`."""
Share = tuple[Tensor, dict[str, Tensor]]
"""A scalar and metrics, each a micro-batch's *share* of a global quantity (sums divided by `Totals`), so that adding
over micro-batches and ranks gives the value of the whole mini-batch."""


@dataclass(frozen=True)
class Totals:
    """What a mini-batch holds over *all* data parallel ranks: denominators that do not depend on how it was split.

    `tokens` counts True entries of response_mask, `rows` the rows (also those without a True entry; rows with one
    `trajectory_id` count once), `sequence_tokens` all prompt + response tokens, `longest` the response tokens of the
    longest row or trajectory, masked ones too."""

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
        Errors: ConfigError for an unknown aggregation, and without `norm` where the longest response is not known."""
        check_aggregation(how, norm)
        mask, totals = self._mask, self._totals
        kept = torch.where(mask.values, token_values, 0.0)
        if how == "token-mean":
            return kept.sum() / max(totals.tokens, 1.0)
        if how == "seq-mean-token-mean":
            kept = kept / mask.expand(valid_lengths(mask).to(kept.dtype)).clamp(min=1.0)
        share = kept.sum() / max(totals.rows, 1.0)
        if how != "seq-mean-token-sum-norm":
            return share
        if norm is None and not totals.longest and len(mask.values):
            raise ConfigError("aggregation='seq-mean-token-sum-norm' needs norm=, or Totals(longest=...).")
        return share / (max(totals.longest, 1.0) if norm is None else norm)


def declared_metrics(function: Any) -> Mapping[str, str]:
    """The attribute `metrics` of a user's loss. Errors: ConfigError for an unknown join."""
    found = getattr(function, "metrics", {})
    if not isinstance(found, Mapping) or (wrong := [how for how in found.values() if how not in ("sum", "max", "min")]):
        got = repr(wrong[0]) if isinstance(found, Mapping) else repr(found)
        raise ConfigError(
            f"metrics of a loss: got {got}. Give a dict such as {{'actor/longest': 'max'}}: sum, max, min."
        )
    return found


class Loss:
    """Base of the losses: `loss(outputs, rows, totals) -> (scalar, metrics)`, shares of one micro-batch.

    `outputs` are the engine's outputs that the loss differentiates, `rows` the micro-batch's columns on the same
    device."""

    reads: tuple[str, ...] | None = None
    """The columns that the loss reads ("name?": if it is there; None: every column)."""
    outputs: tuple[str, ...] = ("log_probs",)
    """The engine outputs that the loss differentiates."""
    metrics: Mapping[str, str] = MappingProxyType({})
    """How metrics are joined over micro-batches, ranks and steps, by name: "max", "min"; others are shares, added over
    micro-batches and ranks, and averaged over steps."""
    by_sequence: bool = True
    """Whether the loss has a term of a whole sequence. Then the rows of one `trajectory_id` lie in one micro-batch, and
    the loss gets them as one row: their response tokens joined, other columns those of the last row."""

    @property
    def per_token(self) -> tuple[str, ...]:
        """Those of the columns that are known to have one value per response token."""
        return tuple(name.removesuffix("?") for name in self.reads or ())

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
    `outputs` say what it needs, `metrics` how its metrics are joined, and `by_sequence = False` that rows of one
    trajectory need not be joined. It gives a scalar or (scalar, metrics)."""

    function: Callable[..., Share | Tensor]
    options: Mapping[str, Any]
    default_outputs: tuple[str, ...] = ("log_probs",)

    def __post_init__(self) -> None:
        declared_metrics(self.function)

    @property
    def reads(self) -> tuple[str, ...] | None:
        reads = getattr(self.function, "reads", None)
        return None if reads is None else tuple(reads)

    @property
    def per_token(self) -> tuple[str, ...]:
        return ()

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(getattr(self.function, "outputs", self.default_outputs))

    @property
    def metrics(self) -> Mapping[str, str]:
        return declared_metrics(self.function)

    @property
    def by_sequence(self) -> bool:
        return getattr(self.function, "by_sequence", True)

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

    @property
    def by_sequence(self) -> bool:
        return (self.aggregation or self.default_aggregation) != "token-mean"

    def reduce(self, token_loss: Tensor, weights: TokenWeights) -> Tensor:
        """This micro-batch's share of the aggregated loss."""
        return weights.reduce(token_loss, self.aggregation or self.default_aggregation, self.norm)


def masked(column: Ragged, mask: Ragged) -> Ragged:
    """Ragged [B, R], 0 and without gradient at masked tokens: what stands there must not reach the loss."""
    return column.with_values(torch.where(mask.values, column.values, 0.0))
