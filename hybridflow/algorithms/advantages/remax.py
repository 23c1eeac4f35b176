"""ReMax: the reward of the greedy response is the baseline. Shapes: B rows, R response tokens."""

from __future__ import annotations

import torch

from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.token_rewards import rewards_to_go
from hybridflow.algorithms.masked import check_finite, mask_column, row_column, valid_lengths
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.settings import Fraction, settings


@settings
class ReMax(Estimator):
    """A_t = (r_t + gamma * r_{t+1} + ...) - baseline, with the column `baseline` [B] float: the reward of a greedy
    response to the same prompt.

    Li et al., "ReMax" (2023), algorithm 1."""

    gamma: Fraction = 1.0
    reads = ("baseline",)

    def __call__(self, rewards: Ragged, batch: Batch, /) -> tuple[Ragged, Ragged]:
        mask, baseline = mask_column(batch), row_column(batch, "baseline")
        check_finite("baseline", baseline, valid_lengths(mask) > 0)
        returns = rewards_to_go(rewards, mask, self.gamma)
        return returns.with_values(returns.values - returns.expand(baseline.to(torch.float64))), returns
