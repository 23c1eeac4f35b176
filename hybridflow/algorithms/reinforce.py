"""REINFORCE with the batch mean as its baseline. Shapes: B rows, R response tokens."""

from __future__ import annotations

import torch

from hybridflow.algorithms.gae import rewards_to_go
from hybridflow.algorithms.whitening import masked_moments, whiten
from hybridflow.ragged import Ragged


def reinforce(rewards: Ragged, mask: Ragged, *, gamma: float = 1.0, normalize: bool = False) -> tuple[Ragged, Ragged]:
    """Advantages and returns, ragged [B, R]: rewards to go minus their mean over the valid tokens of the batch.

    `normalize=True` also divides by the standard deviation, as `reinforce_plus_plus` does. 0 at masked tokens.
    Williams, "Simple statistical gradient-following algorithms" (1992).
    """
    returns = rewards_to_go(rewards, mask, gamma)
    if normalize:
        return whiten(returns, mask), returns
    mean, _ = masked_moments(returns.values, mask.values)
    centred = torch.where(mask.values, returns.values - mean.to(returns.dtype), 0.0)
    return returns.with_values(centred), returns
