"""PolicyLoss: what all policy losses share - columns in, entropy, KL, rollout correction, aggregation, metrics out.

Shapes: B rows, R response tokens, N response tokens of all rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.algorithms.kl import MAX_LOG_RATIO, KLKind, kl_estimate
from hybridflow.algorithms.losses.loss import AggregatedLoss, Outputs, Share, TokenWeights, Totals, masked
from hybridflow.algorithms.losses.rollout_correction import Level, RolloutCorrection
from hybridflow.algorithms.masked import mask_column, token_column
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, ConfigError
from hybridflow.settings import Finite, NonNegative, settings

PER_TOKEN = ("old_log_probs", "advantages", "response_mask", "ref_log_probs", "log_probs")
_FROM_ENGINE = ("log_probs", "entropy", "logits", "ref_logits")


class TokenLoss(NamedTuple):
    """Per token: `loss` [N] differentiable; `clipped` [N] 0/1, None where the loss has no clip; `kl` [N] (k3, old
    policy to new one), None where it is not known. Their means are the metrics `actor/clip_fraction` and
    `actor/ppo_kl`, and `actor/ppo_kl` is k1, mean(old_log_probs - log_probs), in verl."""

    loss: Tensor
    clipped: Tensor | None = None
    kl: Tensor | None = None


@settings
class PolicyLoss(AggregatedLoss):
    """Base of the policy losses: a loss per token, minus entropy_coef * entropy, plus kl_coef * KL to the reference.

    The KL term is GRPO's, estimated as `kl` ("k3" where it is not given; refused without `kl_coef`). As a loss, only
    "k2" has the gradient of KL(policy || reference) in expectation; that of "k3" is the gradient of KL(reference ||
    policy), that of "abs" only knows the sign, and that of "k1" is 0 on average, so it is refused. `rollout_correction`
    ("token", "sequence", "geometric" or `RolloutCorrection(...)`) weighs the loss of the policy alone. All three are
    reduced by the same `aggregation` (None: the loss's own).

    Metrics: `actor/loss`, `actor/clip_fraction`, `actor/ratio`, `actor/entropy`, `actor/kl_loss`, and `actor/ppo_kl`,
    the k3 estimate of KL(old policy || new policy) in nats per token (verl's is k1).

    A loss implements `token_loss`; the names of its parameters are the columns that it gets ("log_probs" and "entropy"
    are the engine's, "mask" is the response_mask): floats per token come ragged [B, R] and 0 at masked tokens, others
    as they are."""

    entropy_coef: Finite = 0.0
    kl_coef: NonNegative | None = None
    kl: KLKind | None = None
    rollout_correction: RolloutCorrection | Level | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl is not None and self.kl_coef is None:
            raise ConfigError(
                f"{type(self).__name__}(kl={self.kl!r}) without kl_coef adds no KL: give kl_coef=..., or leave out kl."
            )
        if self.kl == "k1":
            raise ConfigError(
                f"{type(self).__name__}(kl='k1') as a loss only adds noise: the expected gradient of log policy - log "
                f"reference at tokens of the policy is 0. Use kl='k2', whose gradient is that of KL(policy || "
                f"reference), or 'k3' and 'abs', which are biased; or give compute_advantage(kl_coef=..., kl='k1')."
            )
        _ = RolloutCorrection.of(self.rollout_correction)

    def token_loss(self, *columns: Any) -> TokenLoss | Tensor | Ragged:
        """The loss of each token [N]."""
        raise NotImplementedError

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return columns_of(self.token_loss)

    @property
    def by_sequence(self) -> bool:
        return super().by_sequence or "mask" in self.inputs or self.rollout_correction is not None

    @cached_property
    def reads(self) -> tuple[str, ...]:
        names = [name for name in self.inputs if name not in (*_FROM_ENGINE, "mask")]
        names.append("response_mask")
        if self.kl_coef:
            names.append("ref_log_probs")
        if (correction := RolloutCorrection.of(self.rollout_correction)) is not None:
            names += correction.reads
        return tuple(dict.fromkeys(names))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        asked = {"log_probs", *self.inputs} | ({"entropy"} if self.entropy_coef != 0.0 else set())
        return tuple(name for name in _FROM_ENGINE if name in asked)

    @cached_property
    def per_token(self) -> tuple[str, ...]:
        return tuple(name for name in self.reads if name in PER_TOKEN)

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals, /) -> Share:
        mask = mask_column(rows)
        weights, columns = TokenWeights(mask, totals), _masked_columns(outputs, rows, mask)
        found = self._checked(self.token_loss(*map(columns, self.inputs)), mask)
        token_loss, metrics = found.loss, self._metrics(found, columns, weights)
        if (correction := RolloutCorrection.of(self.rollout_correction)) is not None:
            sampled = token_column(rows, "log_probs", mask)
            old, a = (columns(name) if name in correction.reads else None for name in ("old_log_probs", "advantages"))
            found_weights = correction.weights(old, sampled, mask, columns("log_probs"), a)
            token_loss = token_loss * found_weights.weight
            metrics["rollout/weight_squared"] = weights.mean(found_weights.weight.square())
            shares = found_weights._asdict().items()
            metrics |= {f"rollout/{name}": weights.mean(share) for name, share in shares if share is not None}
        if self.entropy_coef != 0.0:
            entropy = columns("entropy").values
            token_loss = token_loss - self.entropy_coef * entropy
            metrics["actor/entropy"] = weights.mean(entropy)
        if self.kl_coef:
            divergence = kl_estimate(columns("log_probs").values, columns("ref_log_probs").values, self.kl or "k3")
            token_loss = token_loss + self.kl_coef * divergence
            metrics["actor/kl_loss"] = weights.mean(divergence)
        scalar = self.reduce(token_loss, weights)
        return scalar, {"actor/loss": scalar.detach(), **metrics}

    def _checked(self, found: Any, mask: Ragged) -> TokenLoss:
        """Errors: BatchError when a user's loss gave something else than one value per response token."""
        flat = {}
        for name, given in (found._asdict() if isinstance(found, TokenLoss) else {"loss": found}).items():
            value = flat[name] = given.values if isinstance(given, Ragged) else given
            optional = value is None and name != "loss"
            if not optional and not (isinstance(value, Tensor) and value.shape == mask.values.shape):
                got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise BatchError(
                    f"the {name} of {self} is {got}, it must be one value per response token: a tensor "
                    f"[{len(mask.values)}], or ragged like its inputs."
                )
        return TokenLoss(**flat)

    def _metrics(self, found: TokenLoss, columns: Callable[[str], Any], weights: TokenWeights) -> dict[str, Tensor]:
        """How far the policy is from the old one, where the loss knows that one."""
        metrics: dict[str, Tensor] = {}
        if found.clipped is not None:
            metrics["actor/clip_fraction"] = weights.mean(found.clipped)
        if "old_log_probs" in self.inputs:
            change = log_ratio(columns("log_probs"), columns("old_log_probs")).detach()
            metrics["actor/ppo_kl"] = weights.mean(policy_kl(change) if found.kl is None else found.kl)
            metrics["actor/ratio"] = weights.mean(change.exp())
        return metrics


@settings
class UserTokenLoss(PolicyLoss):
    """A user's function of a loss per token, with its own `options`; its attribute `aggregation` is the default."""

    function: Callable[..., TokenLoss | Tensor | Ragged]
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "default_aggregation", getattr(self.function, "aggregation", "token-mean"))
        super().__post_init__()

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return columns_of(self.function)

    def token_loss(self, *columns: Any) -> TokenLoss | Tensor | Ragged:
        return self.function(*columns, **self.options)

    def __str__(self) -> str:
        return f"policy loss {getattr(self.function, '__name__', self.function)!r}"


def columns_of(function: Callable[..., object]) -> tuple[str, ...]:
    """Names of the parameters that have to be given by position: those without a default that may be."""
    parameters = inspect.signature(function).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in positional and p.default is p.empty)


def log_ratio(log_probs: Ragged, old_log_probs: Ragged) -> Tensor:
    """[N]: log_probs - old_log_probs within +-20, differentiable."""
    return (log_probs.values - old_log_probs.values).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_kl(log_ratio: Tensor) -> Tensor:
    """[N] without gradient: the k3 estimate of KL(old policy || new policy), in nats, from `log_ratio`."""
    ratio = log_ratio.detach()
    return kl_estimate(torch.zeros_like(ratio), ratio, "k3")


def _masked_columns(outputs: Outputs, rows: Batch, mask: Ragged) -> Callable[[str], Any]:
    """Inputs by name, floats per token 0 at masked tokens."""

    def column(name: str) -> Any:
        if name == "mask":
            return mask
        if name in _FROM_ENGINE:
            found: Any = outputs[name]
        else:
            found = token_column(rows, name, mask) if name in PER_TOKEN else rows.peek(name)
        if not isinstance(found, Ragged) or not found.offsets.equal(mask.offsets) or not found.dtype.is_floating_point:
            return found
        return masked(found, mask)

    return column
