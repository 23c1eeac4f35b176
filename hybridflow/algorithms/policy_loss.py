"""PolicyLoss: what all policy losses share - columns in, entropy, KL, rollout correction, aggregation, metrics out.

Shapes: B rows, R response tokens, N response tokens of all rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.aggregate import Aggregation, TokenWeights, check_aggregation
from hybridflow.algorithms.cispo import cispo_terms
from hybridflow.algorithms.geo_mean import geo_mean_terms
from hybridflow.algorithms.gspo import gspo_terms
from hybridflow.algorithms.kl import check_kl_kind, kl_estimate
from hybridflow.algorithms.options import check_above, check_names, check_not_negative, inputs_of, options_of
from hybridflow.algorithms.policy_gradient import policy_gradient_terms
from hybridflow.algorithms.policy_terms import PolicyTerms, log_ratio, policy_kl
from hybridflow.algorithms.ppo import ppo_terms
from hybridflow.algorithms.rollout_correction import RolloutCorrection
from hybridflow.algorithms.sapo import sapo_terms
from hybridflow.algorithms.totals import Totals
from hybridflow.algorithms.typed_columns import mask_column, token_column
from hybridflow.batch import Batch
from hybridflow.errors import BatchError, ConfigError
from hybridflow.ragged import Ragged

Outputs = Mapping[str, Ragged]
Share = tuple[Tensor, dict[str, Tensor]]
Columns = Callable[[str], Any]

PER_TOKEN = ("old_log_probs", "advantages", "response_mask", "ref_log_probs", "log_probs")
_FROM_ENGINE = ("log_probs", "entropy")
_LIMITS = {"clip": 0.0, "clip_high": 0.0, "dual_clip": 1.0, "tau_pos": 0.0, "tau_neg": 0.0}
_SHARED_LIMITS = {"norm": 0.0, "entropy_coef": -math.inf}


@dataclass(frozen=True)
class PolicyLoss:
    """A loss per token with what all policy losses share; a `LossFunction` once its options are bound.

    `terms` is called with the columns that `inputs` names ("log_probs" and "entropy" are the engine's, "mask" is the
    response_mask): those of floats per token are 0 at masked ones, and ragged [B, R], or where it is `flat` tensors
    [N]; others come as they are. It returns `PolicyTerms` or the loss [N] alone. `aggregation` is used where a call
    names none.
    """

    terms: Callable[..., PolicyTerms | Tensor | Ragged]
    aggregation: Aggregation = "token-mean"
    flat: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        return inputs_of(self.terms)

    def check(self, what: str, options: Mapping[str, Any], *, values: bool = True) -> None:
        """Errors: ConfigError for an option that is unknown, missing, or (of the loss itself only with `values`) out
        of range."""
        own = options_of(self.terms, after=len(self.inputs))
        if both := sorted(SHARED_OPTIONS & (own or {}).keys()):
            raise ConfigError(f"{what} has a parameter {both[0]!r}, which every policy loss has: give it another name.")
        if own is not None:
            check_names(what, [*own, *sorted(SHARED_OPTIONS)], options)
            if missing := [name for name, p in own.items() if p.default is p.empty and name not in options]:
                raise ConfigError(f"{what} needs the option {missing[0]!r}.")
        if values:
            unset = [name for name, p in (own or {}).items() if p.default is None]
            check_above(what, options, _LIMITS, unset)
        check_above(what, options, _SHARED_LIMITS, ("norm",))
        check_aggregation(options.get("aggregation") or self.aggregation, options.get("norm"))
        check_not_negative(what, options, "kl_coef")
        if (kl := options.get("kl")) is not None:
            check_kl_kind(kl)
            if "kl_coef" not in options:
                raise ConfigError(f"{what}: kl={kl!r} without kl_coef adds no KL: give kl_coef=..., or leave out kl.")
        _ = RolloutCorrection.of(options.get("rollout_correction"))

    def reads(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The columns of the batch that a call with these options reads."""
        names = [name for name in self.inputs if name not in (*_FROM_ENGINE, "mask")]
        names.append("response_mask")
        if options.get("kl_coef", 0.0) != 0.0:
            names.append("ref_log_probs")
        if options.get("rollout_correction") is not None:
            names += ["old_log_probs", "log_probs"]
        return tuple(dict.fromkeys(names))

    def outputs(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The engine outputs that a call with these options differentiates."""
        entropy = "entropy" in self.inputs or options.get("entropy_coef", 0.0) != 0.0
        return ("log_probs", "entropy") if entropy else ("log_probs",)

    def per_token(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of the columns read that are known to have one value per response token."""
        return tuple(name for name in self.reads(options) if name in PER_TOKEN)

    def __call__(
        self,
        outputs: Outputs,
        rows: Batch,
        totals: Totals,
        *,
        entropy_coef: float = 0.0,
        kl_coef: float = 0.0,
        kl: str | None = None,
        rollout_correction: RolloutCorrection | str | None = None,
        aggregation: str | None = None,
        norm: float | None = None,
        **options: Any,
    ) -> Share:
        """The loss of the policy, minus entropy_coef * entropy, plus kl_coef * KL to the reference (GRPO's KL term).

        A rollout correction weighs the loss of the policy alone. All three are reduced by the same aggregation.
        """
        mask = mask_column(rows)
        weights, columns = TokenWeights(mask, totals), _masked(outputs, rows, mask)
        terms = self._terms([columns(name) for name in self.inputs], mask, options)
        token_loss, metrics = terms.loss, self._figures(terms, columns, weights)
        if (correction := RolloutCorrection.of(rollout_correction)) is not None:
            sampled = token_column(rows, "log_probs", mask)
            found = correction.weights(columns("old_log_probs"), sampled, mask)
            token_loss = token_loss * found.weight
            metrics |= {
                "rollout/weight": weights.mean(found.weight),
                "rollout/weight_squared": weights.mean(found.weight.square()),
                f"rollout/{'truncated' if correction.mode == 'truncate' else 'rejected'}": weights.mean(found.outside),
            }
        if entropy_coef != 0.0:
            entropy = columns("entropy").values
            token_loss = token_loss - entropy_coef * entropy
            metrics["actor/entropy"] = weights.mean(entropy)
        if kl_coef != 0.0:
            divergence = kl_estimate(columns("log_probs").values, columns("ref_log_probs").values, kl or "k3")
            token_loss = token_loss + kl_coef * divergence
            metrics["actor/kl_loss"] = weights.mean(divergence)
        scalar = weights.reduce(token_loss, aggregation or self.aggregation, norm)
        return scalar, {"actor/loss": scalar.detach(), **metrics}

    def _terms(self, inputs: list[Any], mask: Ragged, options: Mapping[str, Any]) -> PolicyTerms:
        given = [column.values if self.flat else column for column in inputs]
        found = self.terms(*given, **options)
        loss, clipped, kl = found if isinstance(found, PolicyTerms) else (found, None, None)
        return PolicyTerms(
            self._token_values("loss", loss, mask),
            None if clipped is None else self._token_values("clipped", clipped, mask),
            None if kl is None else self._token_values("kl", kl, mask),
        )

    def _token_values(self, name: str, term: Any, mask: Ragged) -> Tensor:
        """Errors: BatchError when a user's loss gave something else than one value per response token."""
        term = term.values if isinstance(term, Ragged) else term
        if isinstance(term, Tensor) and term.shape == mask.values.shape:
            return term
        got = f"a tensor {list(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
        raise BatchError(
            f"the {name} of policy loss {getattr(self.terms, '__name__', self.terms)!r} is {got}, it must be one value "
            f"per response token: a tensor [{len(mask.values)}], or ragged like its inputs."
        )

    def _figures(self, terms: PolicyTerms, columns: Columns, weights: TokenWeights) -> dict[str, Tensor]:
        """How far the policy is from the old one, where the loss knows that one."""
        metrics: dict[str, Tensor] = {}
        if terms.clipped is not None:
            metrics["actor/clip_fraction"] = weights.mean(terms.clipped)
        if "old_log_probs" in self.inputs:
            new, old = columns("log_probs").values.detach(), columns("old_log_probs").values
            change = log_ratio(new, old, columns("mask").values)
            metrics["actor/ppo_kl"] = weights.mean(policy_kl(change) if terms.kl is None else terms.kl)
            metrics["actor/ratio"] = weights.mean(change.exp())
        return metrics


SHARED_OPTIONS = frozenset(
    p.name for p in inspect.signature(PolicyLoss.__call__).parameters.values() if p.kind is p.KEYWORD_ONLY
)


def _masked(outputs: Outputs, rows: Batch, mask: Ragged) -> Columns:
    """Inputs by name, floats per token 0 at masked ones: what stands there must not reach the loss or its gradient."""

    def column(name: str) -> Any:
        if name == "mask":
            return mask
        if name in _FROM_ENGINE:
            found: Any = outputs[name]
        else:
            found = token_column(rows, name, mask) if name in PER_TOKEN else rows.peek(name)
        if not isinstance(found, Ragged) or not found.offsets.equal(mask.offsets) or not found.dtype.is_floating_point:
            return found
        return found.with_values(torch.where(mask.values, found.values, 0.0))

    return column


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "ppo": PolicyLoss(ppo_terms, flat=True),
        "gspo": PolicyLoss(gspo_terms, "seq-mean-token-mean"),
        "cispo": PolicyLoss(cispo_terms, flat=True),
        "geo_mean": PolicyLoss(geo_mean_terms, "seq-mean-token-mean"),
        "sapo": PolicyLoss(sapo_terms, "seq-mean-token-mean", flat=True),
        "reinforce": PolicyLoss(policy_gradient_terms, flat=True),
    }
)
"""The losses of the policy gradient by name; "pretrain" is none of them."""
