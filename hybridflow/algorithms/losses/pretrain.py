"""The language-model loss. Shapes: N response tokens of all rows."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hybridflow.algorithms.losses.loss import AggregatedLoss, Outputs, Share, TokenWeights, Totals
from hybridflow.algorithms.masked import response_mask
from hybridflow.batch.batch import Batch
from hybridflow.settings import Finite, settings


def negative_log_likelihood(log_probs: Tensor, mask: Tensor) -> Tensor:
    """[N]: -log p of each token, in nats, differentiable; exactly 0 at masked tokens. `mask` [N] bool."""
    return -torch.where(mask, log_probs, 0.0)


@settings
class PretrainLoss(AggregatedLoss):
    """-coef * log p of every response token (all of them without a `response_mask`), in nats.

    The pretraining loss of PPO-ptx (InstructGPT, 2022, eq. 2) and of Safe-RLHF."""

    coef: Finite = 1.0
    figure: ClassVar[str] = "actor/pretrain_loss"
    reads = ("response_mask?",)

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals, /) -> Share:
        mask = response_mask(rows)
        token_loss = negative_log_likelihood(outputs["log_probs"].values, mask.values)
        share = self.reduce(token_loss, TokenWeights(mask, totals))
        return self.coef * share, {self.figure: share.detach()}


@settings
class SFTLoss(PretrainLoss):
    """Supervised fine-tuning: the same loss on completions."""

    figure: ClassVar[str] = "actor/sft_loss"
