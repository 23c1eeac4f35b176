"""Losses by name: what an engine calls on every micro-batch.

A loss turns the engine's ragged outputs into one scalar, this micro-batch's share of the mini-batch's loss, so that
gradients do not depend on how the mini-batch was split. Shapes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.aggregate import TokenWeights, check_aggregation
from hybridflow.algorithms.kl import check_kl_kind, kl_estimate
from hybridflow.algorithms.options import check_options
from hybridflow.algorithms.ppo import ppo_terms
from hybridflow.algorithms.pretrain import negative_log_likelihood
from hybridflow.algorithms.totals import Totals
from hybridflow.algorithms.typed_columns import response_mask, token_column
from hybridflow.algorithms.value_loss import value_terms
from hybridflow.batch import Batch
from hybridflow.errors import ConfigError, nearest
from hybridflow.ragged import Ragged

Outputs = Mapping[str, Ragged]
Share = tuple[Tensor, dict[str, Tensor]]
_ARGUMENTS = 3  # outputs, rows, totals; what follows are options


@dataclass(frozen=True)
class Loss:
    """A `LossFunction` with its options bound, that says what it needs.

    `reads` names the columns it reads ("name?": if it is there; None: every column), `outputs` the engine outputs it
    differentiates, `per_token` the columns with one value per response token (of a user's loss that is not known).
    """

    name: str
    function: Callable[..., Share]
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
        return self.function(outputs, rows, totals, **self.options)


def policy_loss(loss: str | Callable[..., Share] = "ppo", **options: Any) -> Loss:
    """The actor's loss by name ("ppo", "pretrain"), or a user's `f(outputs, rows, totals, **options)`.

    A user's function may carry attributes `reads` (default: every column) and `outputs` (default: "log_probs").
    Errors: ConfigError for an unknown name or option, with the nearest known one.
    """
    return _find("policy loss", loss, POLICY_LOSSES, options)


def value_loss(loss: str | Callable[..., Share] = "value", **options: Any) -> Loss:
    """The critic's loss by name ("value"), or a user's function (default `outputs`: "values")."""
    return _find("value loss", loss, VALUE_LOSSES, options)


def _ppo(
    outputs: Outputs,
    rows: Batch,
    totals: Totals,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl: str = "k3",
    aggregation: str = "token-mean",
) -> Share:
    """Clipped surrogate, minus entropy_coef * entropy, plus kl_coef * KL to the reference (GRPO's KL term)."""
    log_probs, mask = outputs["log_probs"].values, token_column(rows, "response_mask").values
    weights = TokenWeights(token_column(rows, "response_mask"), totals)
    terms = ppo_terms(
        log_probs,
        token_column(rows, "old_log_probs").values,
        token_column(rows, "advantages").values,
        mask,
        clip=clip,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    token_loss = terms.loss
    metrics = {"actor/clip_fraction": weights.mean(terms.clipped), "actor/ppo_kl": weights.mean(terms.kl)}
    if entropy_coef != 0.0:
        entropy = torch.where(mask, outputs["entropy"].values, 0.0)
        token_loss = token_loss - entropy_coef * entropy
        metrics["actor/entropy"] = weights.mean(entropy)
    if kl_coef != 0.0:
        reference = torch.where(mask, token_column(rows, "ref_log_probs").values, 0.0)
        divergence = kl_estimate(torch.where(mask, log_probs, 0.0), reference, kl)
        token_loss = token_loss + kl_coef * divergence
        metrics["actor/kl_loss"] = weights.mean(divergence)
    scalar = weights.reduce(token_loss, aggregation)
    return scalar, {"actor/loss": scalar.detach(), **metrics}


def _pretrain(outputs: Outputs, rows: Batch, totals: Totals, *, coef: float = 1.0, aggregation: str = "token-mean"):
    mask = response_mask(rows)
    token_loss = negative_log_likelihood(outputs["log_probs"].values, mask.values)
    share = TokenWeights(mask, totals).reduce(token_loss, aggregation)
    return coef * share, {"actor/pretrain_loss": share.detach()}


def _value(
    outputs: Outputs, rows: Batch, totals: Totals, *, clip: float | None = 0.2, aggregation: str = "token-mean"
) -> Share:
    weights = TokenWeights(token_column(rows, "response_mask"), totals)
    terms = value_terms(
        outputs["values"].values,
        token_column(rows, "values").values,
        token_column(rows, "returns").values,
        token_column(rows, "response_mask").values,
        clip=clip,
    )
    scalar = weights.reduce(terms.loss, aggregation)
    return scalar, {
        "critic/loss": scalar.detach(),
        "critic/clip_fraction": weights.mean(terms.clipped),
        "critic/squared_error": weights.mean(terms.error.square()),
    }


@dataclass(frozen=True)
class _Entry:
    function: Callable[..., Share]
    reads: tuple[str, ...]
    outputs: tuple[str, ...]


POLICY_LOSSES: Mapping[str, _Entry] = MappingProxyType(
    {
        "ppo": _Entry(_ppo, ("old_log_probs", "advantages", "response_mask"), ("log_probs",)),
        "pretrain": _Entry(_pretrain, ("response_mask?",), ("log_probs",)),
    }
)
VALUE_LOSSES: Mapping[str, _Entry] = MappingProxyType(
    {"value": _Entry(_value, ("values", "returns", "response_mask"), ("values",))}
)


def _find(what: str, loss: str | Callable[..., Share], known: Mapping[str, _Entry], options: dict[str, Any]) -> Loss:
    if not isinstance(loss, str) and callable(loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        reads = getattr(loss, "reads", None)
        outputs = tuple(getattr(loss, "outputs", next(iter(known.values())).outputs))
        check_options(f"{what} {name!r}", loss, options, after=_ARGUMENTS)
        return Loss(name, loss, options, None if reads is None else tuple(reads), outputs)
    if not isinstance(loss, str) or loss not in known:
        raise ConfigError(f"{what} {loss!r} is unknown.{nearest(str(loss), known)}")
    entry = known[loss]
    check_options(f"{what} {loss!r}", entry.function, options, after=_ARGUMENTS)
    check_aggregation(options.get("aggregation", "token-mean"))
    check_kl_kind(options.get("kl", "k3"))
    reads, outputs = entry.reads, entry.outputs
    if loss == "ppo" and options.get("kl_coef", 0.0) != 0.0:
        reads = (*reads, "ref_log_probs")
    if loss == "ppo" and options.get("entropy_coef", 0.0) != 0.0:
        outputs = (*outputs, "entropy")
    return Loss(loss, entry.function, options, reads, outputs, tuple(name.removesuffix("?") for name in reads))
