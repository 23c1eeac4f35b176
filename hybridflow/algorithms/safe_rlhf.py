"""Safe RLHF: reward and cost each have a critic, and a multiplier weighs their advantages against each other.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

import torch

from hybridflow.algorithms import whitening
from hybridflow.algorithms.gae import gae
from hybridflow.algorithms.precision import result_dtype
from hybridflow.ragged import Ragged


def safe_rlhf(
    rewards: Ragged,
    costs: Ragged,
    values: Ragged,
    cost_values: Ragged,
    mask: Ragged,
    *,
    multiplier: float,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = False,
) -> dict[str, Ragged]:
    """`advantages`, `returns`, `cost_advantages` and `cost_returns`, each ragged [B, R], exactly 0 at masked tokens.

        A = (A_r - lambda * A_c) / (1 + lambda)

    with A_r, A_c the generalised advantage estimates of rewards with values and of costs with cost_values, all ragged
    [B, R] float, and lambda = `multiplier`, at least 0. `whiten` brings A_r and A_c to one scale before (not in the
    paper; lambda then weighs them whatever their units); `cost_advantages` are A_c as they went in.
    Dai et al., "Safe RLHF" (2023), section 3.3 and equation 30.
    """
    dtype = result_dtype(rewards.dtype, costs.dtype, values.dtype, cost_values.dtype)
    advantages, returns = gae(rewards.to(torch.float64), values, mask, gamma=gamma, lam=lam)
    cost_advantages, cost_returns = gae(costs.to(torch.float64), cost_values, mask, gamma=gamma, lam=lam)
    if whiten:
        advantages, cost_advantages = whitening.whiten(advantages, mask), whitening.whiten(cost_advantages, mask)
    multiplier = float(multiplier)
    weighed = (advantages.values - multiplier * cost_advantages.values) / (1.0 + multiplier)
    columns = {
        "advantages": advantages.with_values(weighed),
        "returns": returns,
        "cost_advantages": cost_advantages,
        "cost_returns": cost_returns,
    }
    return {name: column.to(dtype) for name, column in columns.items()}
