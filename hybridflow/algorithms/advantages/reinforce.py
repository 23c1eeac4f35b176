"""REINFORCE with the batch mean as its baseline. Shapes: B rows, R response tokens."""

from __future__ import annotations

from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.token_rewards import rewards_to_go
from hybridflow.algorithms.masked import mask_column, masked_moments, whiten
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
