"""Importance weights from the policy that sampled to the policy that trains.

Sampling and training engines compute slightly different probabilities, and asynchronous rollouts sample from older
weights. Shapes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybridflow.algorithms.kl import MAX_LOG_RATIO
from hybridflow.algorithms.masked import sequence_mean
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError
from hybridflow.settings import Positive, check_fields

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "reject"]


class RolloutWeights(NamedTuple):
    """Per token, without gradient: `weight` [N], 0 at masked tokens; `outside` [N] 0/1, where a limit acted."""

    weight: Tensor
    outside: Tensor


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """Weighs each token's loss by how much likelier the training policy finds it than the sampling policy did.

        d_t = old_log_probs_t - log_probs_t                   (training precision - sampling engine, before the update)
        w   = exp(d_t)                                        level="token"
        w   = exp(sum over the row's valid tokens of d)       level="sequence"
        w   = exp(mean over the row's valid tokens of d)      level="geometric"

    `mode="truncate"`: min(w, high), and at least `low` where that is given. `mode="reject"`: w, and 0 outside
    [low, high]; `low` is 1 / high where it is not given. Log-weights are kept within +-20. Denominators of the loss do
    not change when tokens are rejected, so that it does not depend on how the batch was split (verl leaves rejected
    tokens out of them). Losses that are one number per row ("geo_mean") get the arithmetic mean of token weights.
    Truncation: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025); rejection
    of tokens: Ling team, "IcePop" (2025); of sequences: Liu et al., "When speed kills stability" (2025).
    Errors: ConfigError for an unknown level or mode, and for limits with nothing between them.
    """

    level: Level = field(default="token", kw_only=False)
    mode: Mode = "truncate"
    high: Positive = 2.0
    low: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.floor >= self.high:
            raise ConfigError(
                f"RolloutCorrection(mode={self.mode!r}, low={self.low!r}, high={self.high!r}) keeps weights from "
                f"{self.floor:g} to {self.high:g}: the lower limit must be below the upper one."
            )

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

    def weights(self, old_log_probs: Ragged, log_probs: Ragged, mask: Ragged) -> RolloutWeights:
        """Weights of one micro-batch of whole rows; `log_probs` are those of the sampling policy, `mask` bool."""
        valid = mask.values
        difference = torch.where(valid, (old_log_probs.values - log_probs.values).detach(), 0.0)
        if self.level == "sequence":
            difference = mask.expand(mask.with_values(difference).row_sum())
        elif self.level == "geometric":
            difference = mask.expand(sequence_mean(difference, mask))
        plain = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside = ((plain > self.high) | (plain < self.floor)) & valid
        kept = plain.clamp(self.floor, self.high) if self.mode == "truncate" else torch.where(outside, 0.0, plain)
        return RolloutWeights(torch.where(valid, kept, 0.0), outside.to(plain.dtype))
