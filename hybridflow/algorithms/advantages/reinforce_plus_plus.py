"""REINFORCE++: rewards to go, normalised over the whole batch; with a baseline, the group's mean is taken off first.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.prompt_groups import GroupEstimator, PromptGroups
from hybridflow.algorithms.advantages.token_rewards import rewards_to_go
from hybridflow.algorithms.masked import mask_column, whiten
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.settings import Fraction, settings


@settings
class ReinforcePlusPlus(Estimator):
    """A_t = whiten(r_t + gamma * r_{t+1} + ...) over the valid tokens of the batch.

    The KL penalty of every token is part of its reward (`kl_coef`). The variance has Bessel's correction and 1e-8
    added, as in verl. Masked tokens of a multi-turn response are skipped: the sum continues over them, where verl's
    starts again at each, so that a reward at the end does not reach earlier turns.
    Hu et al., "REINFORCE++" (2025, arXiv 2501.03262), section 3."""

    gamma: Fraction = 1.0

    def __call__(self, rewards: Ragged, batch: Batch, /) -> tuple[Ragged, Ragged]:
        mask = mask_column(batch)
        returns = rewards_to_go(rewards, mask, self.gamma)
        return whiten(returns, mask), returns


@settings
class ReinforcePlusPlusBaseline(GroupEstimator):
    """A = whiten(r_i - mean of its group), the same for every token of a response before whitening.

    The variance of the batch has Bessel's correction and 1e-8 added, as in verl. A group of one row is centred to 0
    (verl: its raw score).
    Hu et al., "REINFORCE++" (2025, arXiv 2501.03262), section 3: REINFORCE++ with baseline."""

    whitens = True

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        return groups.centred(scores)
