"""Importance weights from the policy that sampled to the policy that trains.

Sampling and training engines compute slightly different probabilities, and asynchronous rollouts sample from older
weights. Shapes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybridflow.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from hybridflow.algorithms.masked import sequence_mean
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError
from hybridflow.settings import Positive, check_fields, require

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "reject"]


class RolloutWeights(NamedTuple):
    """Per token, without gradient: `weight` [N], 0 at masked tokens; [N] 0/1 where it was `truncated`, where it was set
    to 0 because of the limits or of the divergence (`rejected`), and by the `sequence_mask`; None: not in use."""

    weight: Tensor
    truncated: Tensor | None = None
    rejected: Tensor | None = None
    sequence_mask: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """Weighs each token's loss by how much likelier the training policy finds it than the sampling policy did.

        d_t = old_log_probs_t - log_probs_t                   (training precision - sampling engine, before the update)
        w   = exp(d_t)                                        level="token"
        w   = exp(sum over the row's valid tokens of d)       level="sequence"
        w   = exp(mean over the row's valid tokens of d)      level="geometric"
        w   = 1                                               level=None

    `mode="truncate"`: min(w, high), and at least `low` where that is given. `mode="reject"`: w, and 0 outside
    [low, high]; `low` is 1 / high where it is not given. Log-weights are kept within +-20. Two masks set further
    weights to 0:

        kl_t = d_t^2 / 2                                      divergence="k2"
        kl_t = exp(d_t) - 1 - d_t                             divergence="k3"
        w = 0 where kl_t > divergence_limit                   divergence_level="token"
        w = 0 where mean of kl over the row > ...             divergence_level="sequence"
        w = 0 where max of kl over the row > ...              divergence_level="max"

        w = 0 where A_t < 0 and the row's mean of (log_probs_t - current log-probability) > negative_limit

    Both are estimates of KL(sampling policy || training policy) in nats per token. The first compares with the policy
    before the update (k2 is symmetric; k3, whose mean is the KL, grows exponentially with d and only linearly with -d);
    it never acts where `old_log_probs` are the sampling engine's own. The second compares with the policy that is being
    updated, so it sees staleness, mismatch and the steps of this update: a bad row that the policy would hardly write
    any more has little to teach it.

    Denominators of the loss do not change when tokens are rejected, so that it does not depend on how the batch was
    split (verl leaves rejected tokens out of them). Losses that are one number per row ("geo_mean") get the arithmetic
    mean of token weights.

    For streams, whose rows are of older weights, take "token" (truncation at 2) with `compute_log_prob` as the proximal
    policy. This is the decoupled objective of AReaL (Fu et al. 2025, section 5.2) with bounded weights: the ratio that
    PPO clips starts at 1 whatever the staleness, no row is lost, and the variance does not grow with the length, as it
    does with products over a response: truncated at the sequence level, training with a lag of 2 collapsed for Huang et
    al., "Stable asynchrony" (2026), whose warning sign is the effective sample size. Token weights ignore that the
    states drift, too: for responses of thousands of tokens or mixtures of experts add `negative_limit`.

    Truncation: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025); rejection
    of tokens: Ling team, "IcePop" (2025); of sequences: Liu et al., "When speed kills stability" (2025); by divergence:
    Li et al., "Trust region masking for long-horizon LLM reinforcement learning" (2025), estimators: Schulman,
    "Approximating KL divergence" (2020); sequence mask: DeepSeek-AI, "DeepSeek-V3.2" (2025), equation 9.
    Errors: ConfigError for an unknown level or mode, limits with nothing between them, and limits that are not in use.
    """

    level: Level | None = field(default="token", kw_only=False)
    mode: Mode = "truncate"
    high: Positive = 2.0
    low: Positive | None = None
    divergence: Literal["k2", "k3"] | None = None
    divergence_limit: Positive | None = None
    divergence_level: Literal["token", "sequence", "max"] = "sequence"
    negative_limit: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.floor >= self.high:
            raise ConfigError(
                f"RolloutCorrection(mode={self.mode!r}, low={self.low!r}, high={self.high!r}) keeps weights from "
                f"{self.floor:g} to {self.high:g}: the lower limit must be below the upper one."
            )
        require(
            (self.divergence is None) == (self.divergence_limit is None),
            f"RolloutCorrection(divergence={self.divergence!r}, divergence_limit={self.divergence_limit!r}): give "
            f"both, such as divergence='k3', divergence_limit=0.01 (nats per token), or neither.",
        )
        plain = (self.mode, self.high, self.low) == ("truncate", 2.0, None)
        require(
            self.level is not None or plain, "RolloutCorrection(level=None) has no weights: mode, high and low unused."
        )
        acts = (self.level, self.divergence, self.negative_limit) != (None, None, None)
        require(acts, "RolloutCorrection(level=None) corrects nothing: give divergence or negative_limit.")

    @classmethod
    def of(cls, value: RolloutCorrection | str | None) -> RolloutCorrection | None:
        """What the argument `rollout_correction` means: a level by its name, or all options. Errors: ConfigError."""
        if value is None or isinstance(value, RolloutCorrection):
            return value
        if isinstance(value, str):
            return cls(value)  # type: ignore[arg-type]
        raise ConfigError(
            f"rollout_correction={value!r}: give 'token', 'sequence', 'geometric' or "
            f"hf.algorithms.RolloutCorrection(...)."
        )

    @property
    def floor(self) -> float:
        """The smallest weight that is left alone."""
        if self.low is not None:
            return self.low
        return 0.0 if self.mode == "truncate" else 1.0 / self.high

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that `weights` needs, besides the mask."""
        old = ("old_log_probs",) if self.level or self.divergence else ()
        return (*old, "log_probs", *(("advantages",) if self.negative_limit else ()))

    def weights(
        self,
        old_log_probs: Ragged | None,
        log_probs: Ragged,
        mask: Ragged,
        current: Ragged | None = None,
        advantages: Ragged | None = None,
    ) -> RolloutWeights:
        """Weights of one micro-batch of whole rows; `log_probs` are those of the sampling policy, `mask` bool. The
        sequence mask needs the log-probabilities of the `current` policy, and `advantages`."""
        valid = mask.values
        weight, truncated, rejected, sequence_mask = valid.to(log_probs.dtype), None, None, None
        if old_log_probs is not None and self.level is not None:
            weight, outside = self._ratios(old_log_probs, log_probs, mask)
            truncated, rejected = (outside, None) if self.mode == "truncate" else (None, outside)
        if old_log_probs is not None and self.divergence is not None:
            diverged = self._diverged(old_log_probs, log_probs, mask)
            rejected = diverged if rejected is None else diverged | rejected
            weight = torch.where(diverged, 0.0, weight)
        if current is not None and advantages is not None and self.negative_limit is not None:
            drift = sequence_mean((log_probs.values - current.values).detach(), mask)
            sequence_mask = mask.expand(drift > self.negative_limit) & (advantages.values < 0) & valid
            weight = torch.where(sequence_mask, 0.0, weight)
        shares = (None if acts is None else acts.to(weight.dtype) for acts in (truncated, rejected, sequence_mask))
        return RolloutWeights(weight, *shares)

    def _ratios(self, old_log_probs: Ragged, log_probs: Ragged, mask: Ragged) -> tuple[Tensor, Tensor]:
        """[N] weights within the limits, [N] bool where a limit acted."""
        valid = mask.values
        difference = torch.where(valid, (old_log_probs.values - log_probs.values).detach(), 0.0)
        if self.level == "sequence":
            difference = mask.expand(mask.with_values(difference).row_sum())
        elif self.level == "geometric":
            difference = mask.expand(sequence_mean(difference, mask))
        plain = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside = ((plain > self.high) | (plain < self.floor)) & valid
        kept = plain.clamp(self.floor, self.high) if self.mode == "truncate" else torch.where(outside, 0.0, plain)
        return torch.where(valid, kept, 0.0), outside

    def _diverged(self, old_log_probs: Ragged, log_probs: Ragged, mask: Ragged) -> Tensor:
        """[N] bool, where the estimated divergence is above its limit."""
        estimate = kl_estimate(log_probs.values, old_log_probs.values, str(self.divergence)).detach()
        estimate = torch.where(mask.values, estimate, 0.0)
        if self.divergence_level == "sequence":
            estimate = mask.expand(sequence_mean(estimate, mask))
        elif self.divergence_level == "max":
            largest = estimate.new_zeros(len(mask)).scatter_reduce(0, mask.row_index(), estimate, "amax")
            estimate = mask.expand(largest)
        return (estimate > float(self.divergence_limit or 0.0)) & mask.values
