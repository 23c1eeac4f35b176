"""Distillation: the divergence between a teacher's distribution and the policy's.

Shapes: N response tokens of all rows, C tokens of the vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from hybridflow.algorithms.logits import LOWEST
from hybridflow.algorithms.losses.loss import AggregatedLoss, Outputs, Share, TokenWeights, Totals
from hybridflow.algorithms.masked import response_mask, token_column
from hybridflow.batch.batch import Batch
from hybridflow.settings import Fraction, settings

TEACHER = "ref_hidden_states"
TOP_K = ("ref_top_ids", "ref_top_log_probs", "ref_tail_log_probs")
"""Columns that a ReferenceWorker writes."""


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """[N, C] in nats, differentiable by `log_p`: terms whose sums over C are the generalized Jensen-Shannon divergence

        beta * KL(q || m) + (1 - beta) * KL(p || m)     with m = beta * q + (1 - beta) * p

    of the policy p and the teacher q. At its ends, where it is 0, it is replaced by its slope: KL(q || p) for beta=0
    and KL(p || q) for beta=1 (as in TRL)."""
    log_q = log_q.clamp(min=LOWEST)
    if beta == 0.0:
        return log_q.exp() * (log_q - log_p)
    if beta == 1.0:
        return log_p.exp() * (log_p - log_q)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * log_q.exp() * (log_q - log_m) + (1.0 - beta) * log_p.exp() * (log_p - log_m)


@settings
class GKD(AggregatedLoss):
    """The generalized Jensen-Shannon divergence between a teacher and the policy at each response token, in nats.

    `beta=0` is KL(teacher || policy), as in supervised distillation; `beta=1` is KL(policy || teacher), of on-policy
    distillation; between them `divergence`. `over="vocabulary"` reads `ref_hidden_states`, and the actor needs its
    teacher= for the output layer. `over="top_k"` reads the columns of `compute_ref_top_k`: the divergence over the k
    tokens and the rest of the vocabulary as one more, which is at most that over the vocabulary. The distributions are
    those at the temperature of the batch.

    Metrics: `actor/loss`, and `actor/divergence`, its mean over tokens.
    Agarwal et al., "On-policy distillation of language models" (GKD, 2024), eq. 1 and 2, algorithm 1."""

    beta: Fraction = 0.5
    over: Literal["vocabulary", "top_k"] = "vocabulary"

    @property
    def reads(self) -> tuple[str, ...]:
        return ("response_mask?", *((TEACHER,) if self.over == "vocabulary" else TOP_K))

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("logits", "ref_logits") if self.over == "vocabulary" else ("logits",)

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals, /) -> Share:
        mask, logits = response_mask(rows), outputs["logits"]
        if self.over == "vocabulary":
            teacher = outputs["ref_logits"]
            token_loss = logits.sum(self._summed, teacher, mask=mask)
        else:
            ids, top, tail = (token_column(rows, name).values for name in TOP_K)
            log_p = logits.log_probs_and_rest(ids, mask)
            log_q = torch.cat([top, tail[:, None]], -1).to(log_p.dtype)
            token_loss = self._summed(log_p, torch.where(mask.values[:, None], log_q, 0.0))
        weights = TokenWeights(mask, totals)
        scalar = self.reduce(token_loss, weights)
        return scalar, {"actor/loss": scalar.detach(), "actor/divergence": weights.mean(token_loss)}

    def _summed(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return divergence(log_p, log_q, self.beta).sum(-1)
