"""The critic's clipped value loss. Shapes: N response tokens of all rows."""

from __future__ import annotations

import torch

from hybridflow.algorithms.losses.loss import AggregatedLoss, Outputs, Share, TokenWeights, Totals, masked
from hybridflow.algorithms.masked import mask_column, token_column
from hybridflow.batch.batch import Batch
from hybridflow.settings import Positive, settings


@settings
class ValueLoss(AggregatedLoss):
    """Half the squared error to the returns, clipped around the old values.

        v_clip = old + clamp(v - old, -clip, clip)
        loss   = 1/2 * max((v - R)^2, (v_clip - R)^2)            (clip=None: 1/2 * (v - R)^2)

    As in OpenAI's baselines and Ziegler et al. (2019); Huang et al., "The N implementation details of RLHF with PPO"
    (2023), detail 3.8."""

    clip: Positive | None = 0.2
    reads = ("values", "returns", "response_mask")
    outputs = ("values",)

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals, /) -> Share:
        mask = mask_column(rows)
        weights = TokenWeights(mask, totals)
        old, returns = (masked(token_column(rows, name, mask), mask).values for name in ("values", "returns"))
        values = masked(outputs["values"], mask).values
        loss = 0.5 * (values - returns).square()
        clipped = torch.zeros_like(loss)
        if self.clip is not None:
            moved = values - old
            bounded = 0.5 * (old + moved.clamp(-self.clip, self.clip) - returns).square()
            # old + (values - old) differs from values by rounding: a token is clipped only where the clamp acted
            clipped = ((moved.abs() > self.clip) & (bounded > loss)).to(loss.dtype)
            loss = torch.maximum(loss, bounded)
        scalar = self.reduce(loss, weights)
        return scalar, {
            "critic/loss": scalar.detach(),
            "critic/clip_fraction": weights.mean(clipped),
            "critic/squared_error": weights.mean((returns - values).detach().square()),
        }
