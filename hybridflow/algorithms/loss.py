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

from hybridflow.algorithms.aggregate import Aggregation, TokenWeights, check_aggregation
from hybridflow.algorithms.options import check_above, check_options, takes_options_of
from hybridflow.algorithms.policy_loss import POLICY_LOSSES, Outputs, PolicyLoss, Share
from hybridflow.algorithms.pretrain import negative_log_likelihood
from hybridflow.algorithms.totals import Totals
from hybridflow.algorithms.typed_columns import mask_column, response_mask, token_column, with_mask_of_bools
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
        """Errors: BatchError when a user's loss gives no scalar, or metrics that are none, and for a wrong mask."""
        found = self.function(outputs, with_mask_of_bools(rows), totals, **self.options)
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
    `aggregation` and `norm`; "pretrain" takes `coef`, `aggregation` and `norm`. `kl` is "k3" where it is not given, and
    refused without `kl_coef`. A user's function has one of two forms:

    `f(log_probs, old_log_probs, advantages, mask, **options)` gives the loss of each token: a tensor [N], ragged
    [B, R], or `PolicyTerms`. Its first parameter is called log_probs; parameters without a default name what it reads,
    so it may read less or more (`entropy` of the engine; any column of the batch). Columns of floats with one value per
    response token come ragged [B, R] and 0 at masked tokens; all others, such as [B] or integers, as they are. The
    loss is aggregated, by "token-mean" or its attribute `aggregation`, and takes all the options above.

    `f(outputs, rows, totals, **options)` gives the micro-batch's share of the whole loss, a scalar or (scalar,
    metrics). It may carry attributes `reads` (default: every column) and `outputs` (default: "log_probs").

    Figures: `actor/loss`, `actor/clip_fraction`, `actor/ratio`, `actor/entropy`, `actor/kl_loss`, and `actor/ppo_kl`,
    the k3 estimate of KL(old policy || new policy) in nats per token (verl's is k1).

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

    def per_token(self, options: Mapping[str, Any]) -> tuple[str, ...]: ...

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals) -> Share: ...


@dataclass(frozen=True)
class PretrainLoss:
    """The language-model loss of response tokens: PPO-ptx, Safe-RLHF. `aggregation` where a call names none."""

    aggregation: Aggregation = "token-mean"

    def check(self, what: str, options: Mapping[str, Any]) -> None:
        check_options(what, self.__call__, options, _ARGUMENTS)
        check_above(what, options, {"coef": -math.inf, "norm": 0.0}, ("norm",))
        check_aggregation(options.get("aggregation") or self.aggregation, options.get("norm"))

    def reads(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("response_mask?",)

    def outputs(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("log_probs",)

    def per_token(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("response_mask",)

    def __call__(
        self,
        outputs: Outputs,
        rows: Batch,
        totals: Totals,
        *,
        coef: float = 1.0,
        aggregation: str | None = None,
        norm: float | None = None,
    ) -> Share:
        mask = response_mask(rows)
        token_loss = negative_log_likelihood(outputs["log_probs"].values, mask.values)
        share = TokenWeights(mask, totals).reduce(token_loss, aggregation or self.aggregation, norm)
        return coef * share, {"actor/pretrain_loss": share.detach()}


@dataclass(frozen=True)
class ValueLoss:
    """The clipped squared error of the critic's values. `aggregation` where a call names none."""

    aggregation: Aggregation = "token-mean"

    def check(self, what: str, options: Mapping[str, Any]) -> None:
        check_options(what, self.__call__, options, _ARGUMENTS)
        check_above(what, options, {"clip": 0.0, "norm": 0.0}, ("clip", "norm"))
        check_aggregation(options.get("aggregation") or self.aggregation, options.get("norm"))

    def reads(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("values", "returns", "response_mask")

    def outputs(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("values",)

    def per_token(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return self.reads(options)

    @takes_options_of(value_terms)
    def __call__(
        self,
        outputs: Outputs,
        rows: Batch,
        totals: Totals,
        *,
        aggregation: str | None = None,
        norm: float | None = None,
        **options: Any,
    ) -> Share:
        mask = mask_column(rows)
        weights = TokenWeights(mask, totals)
        old, returns = (token_column(rows, name, mask).values for name in ("values", "returns"))
        terms = value_terms(outputs["values"].values, old, returns, mask.values, **options)
        scalar = weights.reduce(terms.loss, aggregation or self.aggregation, norm)
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
    return Loss(name, entry, options, entry.reads(options), entry.outputs(options), entry.per_token(options))


def _is_per_token(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "log_probs"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
