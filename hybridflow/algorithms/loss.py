"""Losses by name: what an engine calls on every micro-batch.

A loss turns the engine's ragged outputs into one scalar, this micro-batch's share of the mini-batch's loss, so that
gradients do not depend on how the mini-batch was split. Shapes: B rows, R response tokens, N those of all rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridflow.algorithms.aggregate import TokenWeights, check_aggregation
from hybridflow.algorithms.options import check_above, check_options
from hybridflow.algorithms.policy_loss import PER_TOKEN, POLICY_LOSSES, Outputs, PolicyLoss, Share
from hybridflow.algorithms.pretrain import negative_log_likelihood
from hybridflow.algorithms.totals import Totals
from hybridflow.algorithms.typed_columns import response_mask, token_column
from hybridflow.algorithms.value_loss import value_terms
from hybridflow.batch import Batch
from hybridflow.errors import BatchError, ConfigError, nearest

_ARGUMENTS = 3  # outputs, rows, totals; what follows are options


@dataclass(frozen=True)
class Loss:
    """A `LossFunction` with its options bound, that says what it needs.

    `reads` names the columns it reads ("name?": if it is there; None: every column), `outputs` the engine outputs it
    differentiates, `per_token` the columns with one value per response token (of a user's loss that is not known).
    """

    name: str
    function: Callable[..., Share | Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] | None = None
    outputs: tuple[str, ...] = ("log_probs",)
    per_token: tuple[str, ...] = ()

    def check(self, rows: Batch) -> None:
        """Errors: BatchError when one of the columns `per_token` has not one value for each response token."""
        for name in self.per_token:
            if name in rows:
                token_column(rows, name, token_column(rows, "response_ids"))

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals) -> Share:
        """Errors: BatchError when a user's loss gives no scalar, or metrics that are none."""
        found = self.function(outputs, rows, totals, **self.options)
        scalar, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(scalar, Tensor) or scalar.numel() != 1 or not isinstance(metrics, Mapping):
            got = f"a tensor {list(scalar.shape)}" if isinstance(scalar, Tensor) else f"a {type(scalar).__name__}"
            raise BatchError(
                f"loss {self.name!r} gave {got} with {type(metrics).__name__} metrics: return a scalar tensor, this "
                f"micro-batch's share, or (scalar, dict of metrics)."
            )
        metrics = {name: torch.as_tensor(value, device=scalar.device) for name, value in metrics.items()}
        return scalar.reshape(()), metrics


def policy_loss(loss: str | Callable[..., Any] = "ppo", **options: Any) -> Loss:
    """The actor's loss by name ("ppo", "gspo", "cispo", "geo_mean", "sapo", "reinforce", "pretrain"), or a user's.

    All but "pretrain" take, beside their own options, `entropy_coef`, `kl_coef` with `kl`, `rollout_correction`,
    `aggregation` and `norm`. A user's function has one of two forms:

    `f(log_probs, old_log_probs, advantages, mask, **options)` gives the loss of each token: a tensor [N], ragged
    [B, R], or `PolicyTerms`. Its first parameter is called log_probs; parameters without a default name what it reads,
    so it may read less or more (`entropy` of the engine; any column of the batch), all ragged and 0 at masked tokens.
    It is aggregated, by "token-mean" or its attribute `aggregation`, and takes all the options above.

    `f(outputs, rows, totals, **options)` gives the micro-batch's share of the whole loss, a scalar or (scalar,
    metrics). It may carry attributes `reads` (default: every column) and `outputs` (default: "log_probs").

    Errors: ConfigError for an unknown name or option, with the nearest known one, or an option out of range.
    """
    if not isinstance(loss, str) and callable(loss) and _is_per_token(loss):
        name = _name(loss)
        per_token = PolicyLoss(loss, getattr(loss, "aggregation", "token-mean"))
        per_token.check(f"policy loss {name!r}", options, values=False)
        return _bound(name, per_token, options)
    return _find("policy loss", loss, {**POLICY_LOSSES, "pretrain": PretrainLoss()}, options)


def value_loss(loss: str | Callable[..., Any] = "value", **options: Any) -> Loss:
    """The critic's loss by name ("value"), or a user's `f(outputs, rows, totals, **options)` (default `outputs`:
    "values"). Errors: those of `policy_loss`."""
    return _find("value loss", loss, {"value": ValueLoss()}, options)


class _Known(Protocol):
    """A loss that is chosen by name."""

    def check(self, what: str, options: Mapping[str, Any]) -> None: ...

    def reads(self, options: Mapping[str, Any]) -> tuple[str, ...]: ...

    def outputs(self, options: Mapping[str, Any]) -> tuple[str, ...]: ...

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals) -> Share: ...


@dataclass(frozen=True)
class PretrainLoss:
    """The language-model loss of response tokens: PPO-ptx, Safe-RLHF."""

    def check(self, what: str, options: Mapping[str, Any]) -> None:
        check_options(what, self.__call__, options, _ARGUMENTS)
        check_above(what, options, {"coef": -math.inf, "norm": 0.0}, ("norm",))
        check_aggregation(options.get("aggregation", "token-mean"), options.get("norm"))

    def reads(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("response_mask?",)

    def outputs(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("log_probs",)

    def __call__(
        self,
        outputs: Outputs,
        rows: Batch,
        totals: Totals,
        *,
        coef: float = 1.0,
        aggregation: str = "token-mean",
        norm: float | None = None,
    ) -> Share:
        mask = response_mask(rows)
        token_loss = negative_log_likelihood(outputs["log_probs"].values, mask.values)
        share = TokenWeights(mask, totals).reduce(token_loss, aggregation, norm)
        return coef * share, {"actor/pretrain_loss": share.detach()}


@dataclass(frozen=True)
class ValueLoss:
    """The clipped squared error of the critic's values."""

    def check(self, what: str, options: Mapping[str, Any]) -> None:
        check_options(what, self.__call__, options, _ARGUMENTS)
        check_above(what, options, {"clip": 0.0, "norm": 0.0}, ("clip", "norm"))
        check_aggregation(options.get("aggregation", "token-mean"), options.get("norm"))

    def reads(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("values", "returns", "response_mask")

    def outputs(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("values",)

    def __call__(
        self,
        outputs: Outputs,
        rows: Batch,
        totals: Totals,
        *,
        clip: float | None = 0.2,
        aggregation: str = "token-mean",
        norm: float | None = None,
    ) -> Share:
        mask = token_column(rows, "response_mask")
        weights = TokenWeights(mask, totals)
        old, returns = (token_column(rows, name, mask).values for name in ("values", "returns"))
        terms = value_terms(outputs["values"].values, old, returns, mask.values, clip=clip)
        scalar = weights.reduce(terms.loss, aggregation, norm)
        return scalar, {
            "critic/loss": scalar.detach(),
            "critic/clip_fraction": weights.mean(terms.clipped),
            "critic/squared_error": weights.mean(terms.error.square()),
        }


def _find(what: str, loss: str | Callable[..., Any], known: Mapping[str, _Known], options: dict[str, Any]) -> Loss:
    if not isinstance(loss, str) and callable(loss):
        name = _name(loss)
        reads = getattr(loss, "reads", None)
        outputs = tuple(getattr(loss, "outputs", next(iter(known.values())).outputs({})))
        check_options(f"{what} {name!r}", loss, options, after=_ARGUMENTS)
        return Loss(name, loss, options, None if reads is None else tuple(reads), outputs)
    if not isinstance(loss, str) or loss not in known:
        raise ConfigError(f"{what} {loss!r} is unknown.{nearest(str(loss), known)}")
    entry = known[loss]
    entry.check(f"{what} {loss!r}", options)
    return _bound(loss, entry, options)


def _bound(name: str, entry: _Known, options: dict[str, Any]) -> Loss:
    reads = entry.reads(options)
    columns = (column.removesuffix("?") for column in reads)
    per_token = tuple(c for c in columns if c in PER_TOKEN or isinstance(entry, ValueLoss))
    return Loss(name, entry, options, reads, entry.outputs(options), per_token)


def _is_per_token(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "log_probs"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
