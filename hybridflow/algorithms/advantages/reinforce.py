"""REINFORCE and its relatives: rewards to go, over a baseline. Shapes: B rows, R response tokens."""

from __future__ import annotations

import torch

from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.prompt_groups import GroupEstimator
from hybridflow.algorithms.advantages.token_rewards import rewards_to_go
from hybridflow.algorithms.masked import check_finite, mask_column, masked_moments, row_column, valid_lengths, whiten
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.settings import Fraction, settings


@settings
class Reinforce(Estimator):
    """Rewards to go, r_t + gamma * r_{t+1} + ..., minus their mean over the valid tokens of the batch.

    `normalize=True` also divides by the standard deviation: that is `ReinforcePlusPlus`.
    Williams, "Simple statistical gradient-following algorithms" (1992)."""

    gamma: Fraction = 1.0
    normalize: bool = False

    def __call__(self, rewards: Ragged, batch: Batch, /) -> tuple[Ragged, Ragged]:
        mask = mask_column(batch)
        returns = rewards_to_go(rewards, mask, self.gamma)
        if self.normalize:
            return whiten(returns, mask), returns
        mean, _ = masked_moments(returns.values, mask.values)
        return returns.with_values(returns.values - mean), returns


@settings
class ReinforcePlusPlus(Estimator):
    """A_t = whiten(r_t + gamma * r_{t+1} + ...) over the valid tokens of the batch.

    The KL penalty of every token is part of its reward (`kl_coef`). The variance has Bessel's correction and 1e-8
    added, as in verl. Masked tokens of a multi-turn response are skipped: the sum continues over them, where verl's
    starts again at each, so that a reward at the end does not reach earlier turns.
    Hu et al., "REINFORCE++" (2025, arXiv 2501.03262), section 3."""

    gamma: Fraction = 1.0

    def __call__(self, rewards: Ragged, batch: Batch, /) -> tuple[Ragged, Ragged]:
        return Reinforce(gamma=self.gamma, normalize=True)(rewards, batch)


@settings
class ReinforcePlusPlusBaseline(GroupEstimator):
    """A = whiten(r_i - mean of its group), the same for every token of a response before whitening.

    The variance of the batch has Bessel's correction and 1e-8 added, as in verl. A group of one row is centred to 0
    (verl: its raw score).
    Hu et al., "REINFORCE++" (2025, arXiv 2501.03262), section 3: REINFORCE++ with baseline."""

    whitens = True


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
